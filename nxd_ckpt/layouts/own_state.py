"""State that a rank saved for itself, because it differed from what another rank wrote for all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from nxd_ckpt.core.limits import shown
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.tensors import Path
from nxd_ckpt.layouts.payload import checked_names


class Gone(Enum):
    """Stands for a value: the rank has none of that name, or it had changed before it was known to be its own."""

    ABSENT = "absent"
    LOST = "lost"


class OwnValue(NamedTuple):
    """A value, tensor or container. ``path`` leads to it in the tree of its part; None if that is not known.

    ``mesh`` describes the placement of a DTensor.
    """

    value: Any
    path: Path | None = None
    mesh: str | None = None


@dataclass(frozen=True)
class OwnState:
    """Values by name; ``parameters`` are those of an optimizer that is all the rank's own."""

    values: dict[str, OwnValue] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.values)

    def names_of(self, kind: Gone) -> list[str]:
        """Return the names of values that are gone in this way."""
        return [name for name, own in self.values.items() if own.value is kind]

    def content(self) -> dict[str, Any]:
        """Return the content of a file."""
        there = {name: own for name, own in self.values.items() if not isinstance(own.value, Gone)}
        return {
            "leaves": {name: own.value for name, own in there.items()},
            "paths": {name: list(own.path) for name, own in there.items() if own.path is not None},
            "meshes": {name: own.mesh for name, own in there.items() if own.mesh is not None},
            **{kind.value: self.names_of(kind) for kind in Gone},
            "parameters": self.parameters,
        }

    def add(self, content: Any, where: str) -> None:
        """Add the content of a file. Raises MalformedFile, naming ``where``, if it has not the form of one."""
        checked_names(content, f"{where}: expected a rank's own state")
        leaves, paths, meshes = (checked_names(content.get(key), f"{where}: {key}") for key in _BY_NAME)
        for name, path in paths.items():
            if not isinstance(path, (list, tuple)) or not all(isinstance(key, Hashable) for key in path):
                raise MalformedFile(f"{where}: the path of {shown(name)} must be keys, found {shown(path)}")
        for name, leaf in leaves.items():
            path = tuple(paths[name]) if name in paths else None
            self.values[name] = OwnValue(leaf, path, meshes.get(name))
        for kind in Gone:
            self.values.update(dict.fromkeys(_listed(content, kind.value, where), OwnValue(kind)))
        # Tags of before have no parameters.
        self.parameters.extend(_listed({"parameters": [], **content}, "parameters", where))


_BY_NAME = ("leaves", "paths", "meshes")


def _listed(content: dict[str, Any], key: str, where: str) -> list[str]:
    listed = content.get(key)
    if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
        raise MalformedFile(f"{where}: {key} must be names, found {shown(listed)}")
    return [*listed]
