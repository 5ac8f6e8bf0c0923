"""Replacement of neuronx-distributed's checkpoint functions, wherever a program reaches them, and its undoing.

neuronx-distributed is not imported: scripts set variables for Neuron and XLA first. What is loaded is replaced at once,
what is not, right after its import.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from inspect import isfunction
from types import CellType, ModuleType
from typing import Any, NamedTuple

from typing_extensions import Unpack

from nxd_ckpt.commit.tier import Tier
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.drop_in import functions, lightning, rank_files
from nxd_ckpt.drop_in.functions import CHECKPOINT_MODULE
from nxd_ckpt.drop_in.import_hook import ImportHook
from nxd_ckpt.drop_in.io_state import IOState
from nxd_ckpt.drop_in.settings import Settings
from nxd_ckpt.keywords import InstallKeywords
from nxd_ckpt.load.options import LoadOptions
from nxd_ckpt.options.checkpointer_options import CheckpointerOptions
from nxd_ckpt.save.options import SaveOptions

logger = logging.getLogger("nxd_ckpt")

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
    "save_checkpoint": lightning.save_checkpoint,
    "load_checkpoint": lightning.load_checkpoint,
    "remove_checkpoint": lightning.remove_checkpoint,
}
_ADAPTER = "NeuronCheckpointIO"
"""NxD's class for Lightning, whose methods these replace."""


class _Replaced(NamedTuple):
    """An attribute of a module or class that was replaced; ``place`` is its name in full."""

    owner: Any
    name: str
    place: str
    original: Any
    ours: Any


class _Installation:
    """What is replaced in this process."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []
        self._hook = ImportHook(_OURS, self._replace)

    def begin(self) -> None:
        """Replace what is loaded, and watch for the rest."""
        is_first, before = self._hook not in sys.meta_path, len(self._replaced)
        if is_first:
            sys.meta_path.insert(0, self._hook)
        for name in _OURS:
            module = sys.modules.get(name)
            if module is not None:
                self._replace(name, module)
        originals = {id(one.original): one.ours for one in self._replaced}
        for module, name, value in _held_elsewhere(originals):
            self._set(module, name, f"{module.__name__}.{name}", originals[id(value)])
        replaced = self._replaced[before:]
        _warn_of_unreachable(filter(isfunction, dict.fromkeys(one.original for one in replaced)))
        if _is_rank_0() and (replaced or is_first):
            later = [f"{name} (once it is imported)" for name in _OURS if name not in sys.modules]
            places = ", ".join([one.place for one in replaced] + later)
            logger.warning("nxd_ckpt takes the place of neuronx_distributed's checkpoint functions: %s", places)

    def end(self) -> None:
        """Put back what was there, where it is still ours."""
        if self._hook in sys.meta_path:
            sys.meta_path.remove(self._hook)
        for one in reversed(self._replaced):
            if vars(one.owner).get(one.name) is one.ours:
                setattr(one.owner, one.name, one.original)
        originals = {id(one.ours): one.original for one in self._replaced}
        for module, name, value in _held_elsewhere(originals):
            setattr(module, name, originals[id(value)])
        self._replaced.clear()
        library: Any = sys.modules.get(CHECKPOINT_MODULE)
        if isinstance(getattr(library, "g_iostate", None), IOState):
            library.g_iostate = None

    def _replace(self, place: str, module: Any) -> None:
        for name, ours in _OURS[place].items():
            self._set(module, name, f"{place}.{name}", ours)
        adapter = vars(module).get(_ADAPTER)
        if isinstance(adapter, type):
            for name, method in _METHODS.items():
                self._set(adapter, name, f"{place}.{_ADAPTER}.{name}", method)

    def _set(self, owner: Any, name: str, place: str, ours: Any) -> None:
        original = vars(owner).get(name)
        if original is not None and original is not ours:
            if ours is rank_files.load:
                rank_files.original_load = original
            self._replaced.append(_Replaced(owner, name, place, original, ours))
            setattr(owner, name, ours)


def _held_elsewhere(wanted: Collection[int]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield the names of modules, other than ours, that hold an object with one of these ids."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not module.__name__.startswith("nxd_ckpt"):
            for name, value in list(vars(module).items()):
                if id(value) in wanted:
                    yield module, name, value


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
    functions.settings = settings
    _installation.begin()


def uninstall() -> None:
    """Put neuronx-distributed's own functions back; saves in flight go on."""
    _installation.end()
    functions.settings = Settings()


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


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
