"""A tag under the names of the live side, so that readers need not handle different names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.mapping import ModelMapping
from nxd_ckpt.core.renaming import NOT_LIVE, Renaming
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import KeyMismatch
from nxd_ckpt.live.dtensor import plain_names
from nxd_ckpt.live.state_names import parameter_sections
from nxd_ckpt.options.execution import SavedNames
from nxd_ckpt.tag.opened import OpenTag


class RenamedTag(OpenTag):
    """The tag ``opened``, as if it had been saved with the live names of ``renaming``.

    Its model has only the renamed parameters. The optimizer's parameters are all there, since their positions count.
    """

    def __init__(self, opened: OpenTag, renaming: Renaming) -> None:
        manifest = opened.manifest
        if manifest is not None:
            items = manifest.parameters.items()
            parameters = {renaming.live(name): spec for name, spec in items if renaming.concerns(name)}
            manifest = replace(manifest, parameters=parameters)
        super().__init__(opened.storage, opened.tag, opened._layout, manifest, opened.identity)
        self._renaming = renaming
        self._seen = set() if opened.manifest is None else set(opened.manifest.parameters)

    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        renaming = self._renaming
        tree = super().model_tree(at)
        self._seen.update(tree)
        return {renaming.live(name): leaf for name, leaf in tree.items() if renaming.concerns(name)}

    def experts(self) -> set[str] | None:
        names = super().experts()
        return None if names is None else set(map(self._renaming.live, names))

    @property
    def saved_names(self) -> set[str]:
        """The parameters seen in the tag so far, by their saved names."""
        return self._seen

    def live_names(self, names: SavedNames) -> SavedNames:
        """Return names of the optimizer's parameters, saved or live ones, as live ones."""
        renaming = self._renaming

        def live(name: str) -> str:
            return name if name in renaming.key_mapping else renaming.live(name)

        return [[list(map(live, group)) for group in stage] for stage in names]

    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        saved = None if param_names is None else [self._renaming.saved(name) for name in param_names]
        return super().optimizer_tree(at, saved)

    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        names = super().optimizer_names(at)
        self._seen.update(names or ())
        return None if names is None else [self._renaming.live(name) for name in names]


def unwrapped(opened: OpenTag, mapping: ModelMapping | None = None) -> OpenTag:
    """Return the tag under the names that its parameters have without wrappers, such as torch.compile's.

    Names for which ``mapping`` has a rule stay. Raises UnsupportedState if two names become equal.
    """
    if not opened.parts.model:
        return opened
    plain = plain_names(opened.model_names(), opened.where)
    changed = {name: saved for name, saved in plain.items() if name != saved}
    if mapping is not None:
        with_rules = {match.name for match in mapping.split(changed.values())[0]}
        changed = {name: saved for name, saved in changed.items() if saved not in with_rules}
    return RenamedTag(opened, Renaming(changed)) if changed else opened


class OneModelTag(RenamedTag):
    """One of several models of the tag ``opened``, and its part of the optimizers, under the model's own names."""

    def __init__(self, opened: OpenTag, model: str) -> None:
        """Raise KeyMismatch if no name in the tag begins with ``model``."""
        saved = opened.model_names() if opened.parts.model else set()
        if not any(name.startswith(f"{model}.") for name in saved):
            names = sorted({name.partition(".")[0] for name in saved if "." in name})
            raise KeyMismatch(f"{opened.where} has no model {listed([model], names)}; its names begin with {names}")
        super().__init__(opened, Renaming(prefix=f"{model}."))

    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        tree, names = super().optimizer_tree(at, param_names), super().optimizer_names(at)
        indices = [index for group in tree["param_groups"] for index in group["params"]]
        own = {index for index, name in zip(indices, names or (), strict=False) if not name.startswith(NOT_LIVE)}
        groups = [
            {**group, "params": [index for index in group["params"] if index in own]} for group in tree["param_groups"]
        ]
        parts = {section: _of(tree[section], own) for section in parameter_sections(tree)}
        return {**tree, **parts, "param_groups": [group for group in groups if group["params"]]}

    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        names = super().optimizer_names(at)
        return None if names is None else [name for name in names if not name.startswith(NOT_LIVE)]


def _of(entries: Mapping[Any, Any], indices: set[Any]) -> dict[Any, Any]:
    return {index: value for index, value in entries.items() if index in indices}
