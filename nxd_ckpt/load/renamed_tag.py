"""A tag under the names of the live side: whoever reads it so need not know that names differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.renaming import Renaming
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.tag.opened import OpenTag


class RenamedTag(OpenTag):
    """The tag ``opened``, as if it had been saved with the live names of ``renaming``.

    Of the model it has what that concerns. Parameters of the optimizer are all there, since their positions count.
    """

    def __init__(self, opened: OpenTag, renaming: Renaming) -> None:
        manifest = opened.manifest
        if manifest is not None:
            known = manifest.parameters.items()
            parameters = {renaming.live(name): spec for name, spec in known if renaming.concerns(name)}
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
        found = super().experts()
        return None if found is None else set(map(self._renaming.live, found))

    @property
    def saved_names(self) -> set[str]:
        """The parameters, as the tag calls them, that it is known by now to hold."""
        return self._seen

    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        saved = None if param_names is None else [self._renaming.saved(name) for name in param_names]
        return super().optimizer_tree(at, saved)

    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        names = super().optimizer_names(at)
        self._seen.update(names or ())
        return None if names is None else [self._renaming.live(name) for name in names]
