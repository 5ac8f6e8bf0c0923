"""A tag under the names of the live side, so that readers need not handle different names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.renaming import Renaming
from nxd_ckpt.core.topology import Coordinates
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

    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        saved = None if param_names is None else [self._renaming.saved(name) for name in param_names]
        return super().optimizer_tree(at, saved)

    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        names = super().optimizer_names(at)
        self._seen.update(names or ())
        return None if names is None else [self._renaming.live(name) for name in names]
