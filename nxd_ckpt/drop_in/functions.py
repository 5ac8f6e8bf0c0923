"""neuronx-distributed's four functions as its callers know them, on top of ours.

They differ from those of `nxd_ckpt.api` where programs rely on NxD: they return None, take whatever is true or false as
flags, log NxD's lines, keep its ``g_iostate``, fill dicts that are not empty, leave out what no load could read, and
save nothing in a run that only compiles. The options that were given to ``install`` are defaults of all calls.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Any

import torch

from nxd_ckpt import api
from nxd_ckpt.commit.tier import Tier, checked_tiers
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.effects import Event, logger
from nxd_ckpt.formats.plain_data import without_refused
from nxd_ckpt.live.environment import default_topology
from nxd_ckpt.live.named import by_name
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.options.checkpointer_options import CheckpointerOptions, DirectoryOptions
from nxd_ckpt.saving.options import SaveOptions
from nxd_ckpt.storage.urls import StrPath, is_url, join, overlap

_COMPILING = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Variable of a run that only compiles: its parameters are not trained."""


@dataclass(frozen=True)
class Settings:
    """Options by name, which a call's own arguments replace. ``tiers`` are of the directory of the first of them."""

    options: Mapping[str, Any] = field(default_factory=dict)
    tiers: Sequence[Tier] | None = None

    def validate(self) -> None:
        """Raise InvalidArgument or UnsupportedState for options that no save or load could honour."""
        shared = CheckpointerOptions(**self._own(_names(CheckpointerOptions)))
        SaveOptions(**self._own(_names(SaveOptions))).validate(shared.timeout)
        LoadOptions(**self._own(_names(LoadOptions)))
        if self.tiers is not None:
            checked_tiers(None, self.tiers)

    def save_arguments(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a save by name; see `_arguments`."""
        arguments = self._arguments(api.save_checkpoint, args, keywords, _SAVE)
        if arguments.get("num_kept_ckpts") in (None, -1):  # NxD's defaults, which keep all
            arguments["num_kept_ckpts"] = self.options.get("num_kept_ckpts")
        if arguments.get("use_xser"):
            arguments.pop("num_workers", None)  # of no effect, whatever it is
        return arguments

    def load_arguments(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a load by name; see `_arguments`."""
        return self._arguments(api.load_checkpoint, args, keywords, _LOAD)

    def has_arguments(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a look for a checkpoint by name; see `_arguments`."""
        return self._arguments(api.has_checkpoint, args, keywords, {"storage_options"})

    def _arguments(
        self, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], names: set[str]
    ) -> dict[str, Any]:
        """Return the arguments of a call of ``function`` by name, with options of these ``names`` that it does not say.

        As in NxD, what counts of a flag is whether it is true: 0 and 1, None and NumPy's are booleans.
        """
        declared = signature(function)
        arguments = {**self._own(names), **declared.bind_partial(*args, **keywords).arguments}
        flags = (name for name in arguments if _is_flag(declared.parameters[name]))
        for name in flags:
            if not isinstance(arguments[name], str):
                arguments[name] = bool(arguments[name])
        directory = next((arguments[name] for name in ("checkpoint_dir_str", "path") if name in arguments), None)
        if self.tiers and isinstance(directory, (str, os.PathLike)) and _is_first(self.tiers, directory):
            arguments.setdefault("tiers", self.tiers)
        return arguments

    def _own(self, names: set[str]) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in names}


def _is_flag(parameter: Parameter) -> bool:
    return isinstance(parameter.default, bool)


def _is_first(tiers: Sequence[Tier], directory: StrPath) -> bool:
    return overlap(directory, tiers[0].path, inside=False)


def _names(*kinds: type[Any]) -> set[str]:
    return {field.name for kind in kinds for field in fields(kind)}


_SAVE = _names(SaveOptions, CheckpointerOptions) | {"async_save"}
_LOAD = _names(LoadOptions, DirectoryOptions)


def only_compiles() -> bool:
    """Return whether this run only compiles: then nothing is saved."""
    return os.environ.get(_COMPILING, "0") not in ("", "0")


class IOState:
    """The methods of NxD's ``CheckpointIOState`` that programs call from outside, for the directory saved to last."""

    def __init__(self) -> None:
        self._place: tuple[StrPath, Topology | None] | None = None
        self._removals: list[Event] = []

    def saved(self, directory: StrPath, topology: Topology | None) -> None:
        """Note the directory of a save."""
        self._place = directory, topology

    def wait_save(self, async_remove: bool = True) -> None:
        """Wait until the saves in flight are complete; raise the first failure that was not raised before."""
        api.finalize_checkpoint()

    def wait_remove(self) -> None:
        """Wait until the removals so far have been made, or put off."""
        while self._removals:
            self._removals.pop(0).wait()

    def wait_all(self) -> None:
        """Wait for saves and removals."""
        self.wait_save()
        self.wait_remove()

    def submit_remove(
        self, num_kept: int | None, async_remove: bool = True, remove_tags: Sequence[str] | None = None
    ) -> None:
        """Remove tags behind the save in flight, which is not waited for; one that does not exist is no error.

        Without ``async_remove`` this call waits for the removal. Without ``remove_tags`` there is nothing to do: each
        save removes what its own ``num_kept_ckpts`` says.
        """
        if not remove_tags or self._place is None:
            return
        directory, topology = self._place
        done = api.remove_later(directory, list(remove_tags), topology)
        if done is not None:
            self._removals.append(done)
        if not async_remove:
            self.wait_remove()


_nxd_logger = logging.getLogger("neuronx_distributed[0]")
"""NxD's own logger, for the lines that programs look for."""

CHECKPOINT_MODULE = "neuronx_distributed.trainer.checkpoint"

settings: Settings = Settings()
"""The options of `install`."""

_said: set[str] = set()

_as = partial(wraps, assigned=("__doc__",))
"""For the signature and help of our own function; by its own name and module, a function can be pickled."""


@_as(api.save_checkpoint)
def save_checkpoint(*args: Any, **keywords: Any) -> None:
    arguments = settings.save_arguments(args, keywords)
    if nothing_is_saved(arguments.get("tag")):
        return
    if not arguments.get("trust_pickle"):
        arguments["user_content"] = readable(arguments.get("user_content"), "user_content")
    arguments["model"] = _with_a_state(arguments.get("model"))
    named = arguments.get("tag")
    if isinstance(named, str) and "/" in named:
        _place_in(arguments, named)
    topology = arguments.get("topology") or default_topology()
    say = partial(_nxd_logger.log, logging.INFO if topology.rank == 0 else logging.DEBUG)
    method = "async" if arguments.get("async_save") else "synced"
    tag = named
    say("%s saving of checkpoint %s began", method, tag)
    saved = api.save_checkpoint(**arguments)
    _io_state().saved(_directory(arguments), arguments.get("topology"))
    saved.add_done_callback(lambda _: saved.error or say("%s saving of checkpoint %s completed", method, tag))


@_as(api.load_checkpoint)
def load_checkpoint(*args: Any, **keywords: Any) -> Any:
    arguments = settings.load_arguments(args, keywords)
    tag = arguments.get("tag")
    if tag == "" or (isinstance(tag, str) and "/" in tag):
        _place_in(arguments, tag.rstrip("/"))
    filled: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for part in ("model", "optimizer", "scheduler"):
        own = arguments.get(part)
        if isinstance(own, dict) and own and by_name(own, part) is None:
            arguments[part] = {}
            filled.append((own, arguments[part]))
    content = api.load_checkpoint(**arguments)
    for own, loaded in filled:
        own.update(loaded)
    return content


@_as(api.has_checkpoint)
def has_checkpoint(*args: Any, **keywords: Any) -> bool:
    return api.has_checkpoint(**settings.has_arguments(args, keywords))


@_as(api.finalize_checkpoint)
def finalize_checkpoint() -> None:
    api.finalize_checkpoint()
    state = getattr(sys.modules.get(CHECKPOINT_MODULE), "g_iostate", None)
    if isinstance(state, IOState):
        state.wait_remove()


def nothing_is_saved(what: object) -> bool:
    """Return whether this run only compiles, so that ``what`` is not saved; the first time it is logged."""
    if not only_compiles():
        return False
    if "compiles" not in _said and default_topology().rank == 0:
        logger.warning("nxd_ckpt: NEURON_EXTRACT_GRAPHS_ONLY is set: this run only compiles, %r is not saved", what)
    _said.add("compiles")
    return True


def readable(content: Any, name: str) -> Any:
    """Return ``content`` as `plain`, without the values that a load would refuse, which are logged."""
    kept, refused = without_refused(plain(content), name)
    if refused and default_topology().rank == 0:
        logger.warning(
            "nxd_ckpt: left out, as it is not plain data, with which a checkpoint is safe to open "
            "(install(trust_pickle=True) keeps it): %s", "; ".join(refused),
        )  # fmt: skip
    return kept


def plain(node: Any) -> Any:
    """Return OmegaConf's containers in ``node`` as dicts and lists."""
    library: Any = sys.modules.get("omegaconf")
    if library is None:
        return node
    if isinstance(node, (library.DictConfig, library.ListConfig)):
        return library.OmegaConf.to_container(node)
    if type(node) is dict:
        return {key: plain(value) for key, value in node.items()}
    return type(node)(map(plain, node)) if type(node) in (list, tuple) else node


def _with_a_state(model: Any) -> Any:
    """Return the model; in place of a module whose ``state_dict()`` holds other tensors than its own, that dict.

    That is so for modules made for one save, whose ``state_dict(self)`` takes no argument.
    """
    if not isinstance(model, torch.nn.Module) or list(signature(type(model).state_dict).parameters) != ["self"]:
        return model
    state = model.state_dict()
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return model if isinstance(state, Mapping) and state.keys() <= own.keys() and own else dict(state)


def _directory(arguments: Mapping[str, Any]) -> StrPath:
    named = arguments.get("checkpoint_dir_str") or arguments.get("path")
    directory: StrPath = named or arguments["tiers"][0].path
    return directory


def _place_in(arguments: dict[str, Any], tag: str) -> None:
    """Pass the directory that a tag such as "exp/step_2" is in, or that "" is itself, and its name there, as NxD does.

    One that leads out of the directory stays as it is, and is refused.
    """
    name = next((name for name in ("path", "checkpoint_dir_str") if name in arguments), None)
    if name is not None and {"", ".", ".."}.isdisjoint(tag.split("/") if tag else []):
        arguments[name], arguments["tag"] = _split(join(os.fspath(arguments[name]), tag) if tag else arguments[name])


def _split(directory: StrPath) -> tuple[str, str]:
    """Return the directory above a checkpoint, and the checkpoint's name."""
    text = os.fspath(directory).rstrip("/")
    above, _, name = text.rpartition("/") if is_url(text) else os.path.abspath(text).rpartition("/")
    return above or "/", name


def _io_state() -> IOState:
    """Return NxD's ``g_iostate``, which the first save makes."""
    module: Any = sys.modules.get(CHECKPOINT_MODULE)
    state = getattr(module, "g_iostate", None)
    if not isinstance(state, IOState):
        state = IOState()
        if module is not None:
            module.g_iostate = state
    return state
