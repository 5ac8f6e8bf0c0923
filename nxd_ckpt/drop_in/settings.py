"""The options that were given to ``install``: defaults of all saves and loads of the program."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, signature
from typing import Any

from nxd_ckpt import api
from nxd_ckpt.commit.tier import Tier, checked_tiers
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.options.checkpointer_options import CheckpointerOptions, DirectoryOptions
from nxd_ckpt.saving.options import SaveOptions
from nxd_ckpt.storage.urls import StrPath, overlap

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
