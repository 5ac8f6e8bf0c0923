"""Replacement of neuronx-distributed's checkpoint functions, wherever a program reaches them, and its undoing.

neuronx-distributed is not imported: scripts set variables for Neuron and XLA first. What is loaded is replaced at once,
what is not, right after its import.

Children of multiprocessing that begin the script again ("spawn", "forkserver") install what their parent has, after
they have imported the main script again, and before they call its function. A forked child has it by itself.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import isfunction
from multiprocessing import current_process
from types import CellType, ModuleType
from typing import Any, NamedTuple

from typing_extensions import Unpack

from nxd_ckpt.commit.tier import Tier
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.drop_in import functions, rank_files
from nxd_ckpt.drop_in.functions import CHECKPOINT_MODULE, IOState, Settings
from nxd_ckpt.effects import logger
from nxd_ckpt.keywords import InstallKeywords
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.options.checkpointer_options import CheckpointerOptions
from nxd_ckpt.saving.options import SaveOptions

_Imported = Callable[[str, ModuleType], None]


class ImportHook(MetaPathFinder):
    """A finder that calls ``imported`` with the name of each of the modules ``names``, and the module itself."""

    def __init__(self, names: Collection[str], imported: _Imported) -> None:
        self._names = names
        self._imported = imported

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec


class _Loader(Loader):
    """The module's own loader, with ``imported`` called at the end."""

    def __init__(self, loader: Loader, imported: _Imported) -> None:
        self._loader = loader
        self._imported = imported

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._imported(module.__name__, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_KEY = "nxd_ckpt"
_OF_THIS_PROCESS = "topology", "process_group"


class _Handed:
    """Is unpickled by a call of ``install`` there, with the options here."""

    def __init__(self, install: Callable[[Settings], None], settings: Settings) -> None:
        self._install = install
        self._settings = settings

    def __reduce__(self) -> tuple[Any, ...]:
        shared = {name: value for name, value in self._settings.options.items() if name not in _OF_THIS_PROCESS}
        options = {name: value for name, value in shared.items() if _can_be_pickled(name, value)}
        return _received, (self._install, Settings(options, self._settings.tiers))


def _received(install: Callable[[Settings], None], settings: Settings) -> _Handed:
    install(settings)
    return _Handed(install, settings)


def hand_to_children(install: Callable[[Settings], None], settings: Settings) -> None:
    """Have children of this process, and theirs, call ``install(settings)``."""
    _of_children()[_KEY] = _Handed(install, settings)


def hand_nothing() -> None:
    """Undo `hand_to_children`."""
    _of_children().pop(_KEY, None)


def _of_children() -> dict[str, Any]:
    """Return what multiprocessing hands on to each child, by name."""
    handed: dict[str, Any] = vars(current_process()).setdefault("_config", {})
    return handed


def _can_be_pickled(name: str, value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception as error:  # of whatever class: it is an object of the caller's
        logger.warning(
            "nxd_ckpt: a child of multiprocessing saves without %s=, which cannot be handed to it (%s): call install() "
            "in the child", name, error,
        )  # fmt: skip
        return False
    return True


_NXD = "neuronx_distributed"
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "save_checkpoint": functions.save_checkpoint,
    "load_checkpoint": functions.load_checkpoint,
    "has_checkpoint": functions.has_checkpoint,
    "finalize_checkpoint": functions.finalize_checkpoint,
}
_RANK_FILES: dict[str, Callable[..., Any]] = {"save": rank_files.save, "load": rank_files.load}

_OURS: dict[str, dict[str, Callable[..., Any]]] = {
    _NXD: _FUNCTIONS,
    f"{_NXD}.trainer": _FUNCTIONS,
    CHECKPOINT_MODULE: _FUNCTIONS,
    f"{_NXD}.parallel_layers": _RANK_FILES,
    f"{_NXD}.parallel_layers.checkpointing": _RANK_FILES,
    f"{_NXD}.lightning.checkpoint_io": _RANK_FILES,
}
"""Our functions, by NxD's modules and the names there."""

_METHODS = {
    "save_checkpoint": rank_files.save_checkpoint,
    "load_checkpoint": rank_files.load_checkpoint,
    "remove_checkpoint": rank_files.remove_checkpoint,
}
_ADAPTER = "NeuronCheckpointIO"
"""NxD's class for Lightning, whose methods these replace."""


class _Replaced(NamedTuple):
    """A global name of a module, or an attribute of a class, that was replaced; ``place`` is its name in full."""

    owner: Any
    name: str
    place: str
    original: Any
    ours: Any


class _Installation:
    """Functions that are replaced in this process."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []
        self._hook = ImportHook(_OURS, self._replace)

    @property
    def is_on(self) -> bool:
        return self._hook in sys.meta_path

    def begin(self) -> list[str]:
        """Replace what is loaded, and watch for the rest; return the places, none if all were replaced before."""
        is_first = not self.is_on
        before = len(self._replaced)
        if is_first:
            sys.meta_path.insert(0, self._hook)
        for name in _OURS:
            module = sys.modules.get(name)
            if module is not None:
                self._replace(name, module)
        ours = {id(one.original): one.ours for one in self._replaced}
        for names, name, original in _held_elsewhere([one.original for one in self._replaced]):
            self._set(names, name, f"{names['__name__']}.{name}", ours[id(original)])
        replaced = self._replaced[before:]
        _warn_of_unreachable(filter(isfunction, dict.fromkeys(one.original for one in replaced)))
        if not (replaced or is_first):
            return []
        places = [one.place for one in replaced]
        if not _OURS.keys() <= sys.modules.keys():
            is_absent = _NXD not in sys.modules and find_spec(_NXD) is None
            here = f" ({_NXD} is not installed here)" if is_absent else ""
            places.append(f"{'the others' if replaced else 'all of them'} as soon as they are imported{here}")
        return places

    def end(self) -> None:
        """Put back what was there, where it is still ours."""
        if self.is_on:
            sys.meta_path.remove(self._hook)
        for one in reversed(self._replaced):
            if _names_of(one.owner).get(one.name) is one.ours:
                _put(one.owner, one.name, one.original)
        originals = {id(one.ours): one.original for one in self._replaced}
        for names, name, ours in _held_elsewhere([one.ours for one in self._replaced]):
            names[name] = originals[id(ours)]
        self._replaced.clear()
        library: Any = sys.modules.get(CHECKPOINT_MODULE)
        if isinstance(getattr(library, "g_iostate", None), IOState):
            library.g_iostate = None

    def _replace(self, place: str, module: Any) -> None:
        for name, ours in _OURS[place].items():
            self._set(vars(module), name, f"{place}.{name}", ours)
        adapter = vars(module).get(_ADAPTER)
        if isinstance(adapter, type):
            for name, method in _METHODS.items():
                self._set(adapter, name, f"{place}.{_ADAPTER}.{name}", method)

    def _set(self, owner: Any, name: str, place: str, ours: Any) -> None:
        original = _names_of(owner).get(name)
        if original is not None and original is not ours:
            if ours is rank_files.load:
                rank_files.original_load = original
            self._replaced.append(_Replaced(owner, name, place, original, ours))
            _put(owner, name, ours)


def _names_of(owner: Any) -> Mapping[str, Any]:
    """Return the names of a class, or of a module whose globals ``owner`` is."""
    return owner if isinstance(owner, dict) else vars(owner)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _held_elsewhere(wanted: Iterable[Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the global names, of modules other than ours, that hold one of these objects.

    Not all such modules are in ``sys.modules``: in a child that multiprocessing starts by "spawn", the functions of the
    main script have globals of their own.
    """
    for one in {id(one): one for one in wanted}.values():
        for names in gc.get_referrers(one):
            is_of_a_module = isinstance(names, dict) and {"__name__", "__spec__"} <= names.keys()
            if is_of_a_module and not str(names["__name__"]).startswith("nxd_ckpt"):
                yield from [(names, name, one) for name, value in names.items() if value is one]


_installation = _Installation()


@takes(SaveOptions, CheckpointerOptions, LoadOptions)
def install(
    *, tiers: Sequence[Tier] | None = None, async_save: bool | None = None, **options: Unpack[InstallKeywords]
) -> None:
    """Save and load with nxd_ckpt wherever this program calls neuronx-distributed's checkpoint functions.

    The first line of a script; ``python -m nxd_ckpt.run script.py`` does it for one that nobody edits. It replaces what
    is imported by now, and the rest as soon as it is; neuronx-distributed itself is not imported. A second call looks
    again, and its options count instead. `uninstall` puts everything back.

    The options are defaults of all saves and loads: a call's own arguments count before them. A call that keeps all
    tags (``num_kept_ckpts`` None or -1) gets those for retention.

    Args:
        tiers: the places that checkpoints go to. They are for the directory that is the first of them.
        async_save: for calls that do not say.

    Raises:
        InvalidArgument: options that no save or load could honour. Nothing is replaced.
    """
    given = dict(options) if async_save is None else {**options, "async_save": async_save}
    settings = Settings(given, tiers)
    settings.validate()
    places = _install(settings)
    if places and os.environ.get("RANK", "0") == "0":
        logger.warning("nxd_ckpt takes the place of neuronx_distributed's checkpoint functions: %s", ", ".join(places))


def _install(settings: Settings) -> list[str]:
    functions.settings = settings
    hand_to_children(_install_in_child, settings)
    return _installation.begin()


def _install_in_child(settings: Settings) -> None:
    """Do the same in a child of multiprocessing, without a word, unless the script's own line has done it."""
    if not _installation.is_on:
        _install(settings)


def uninstall() -> None:
    """Put neuronx-distributed's own functions back; saves in flight go on."""
    hand_nothing()
    _installation.end()
    functions.settings = Settings()


def _warn_of_unreachable(originals: Iterable[Any]) -> None:
    """Warn of objects that hold one of the functions where a program cannot be made to look again."""
    for original in originals:
        for holder in map(_held_by, gc.get_referrers(original)):
            if holder is not None:
                logger.warning(
                    "nxd_ckpt: %s holds neuronx_distributed's %s, bound before install(), and will call that: call "
                    "install() before, as the first line of the script", holder, original.__name__,
                )  # fmt: skip


def _held_by(holder: Any) -> str | None:
    """Describe a partial, or a function with the default argument or closure ``holder``; None for anything else."""
    if isinstance(holder, partial):
        return f"a functools.partial{_name_of(holder)}"
    if not isinstance(holder, (tuple, dict, CellType)):
        return None
    for function in gc.get_referrers(holder):
        if isfunction(function) and holder in (function.__defaults__, function.__kwdefaults__):
            return f"a default argument of {function.__module__}.{function.__qualname__}"
        if isinstance(holder, CellType) and isinstance(function, tuple):
            for inner in filter(isfunction, gc.get_referrers(function)):
                if inner.__closure__ is function:
                    return f"{inner.__module__}.{inner.__qualname__}"
    return None


def _name_of(value: Any) -> str:
    """Return where a module has ``value``, for a message; an empty text if none has."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, one in list(vars(module).items()):
                if one is value:
                    return f" ({module.__name__}.{name})"
    return ""
