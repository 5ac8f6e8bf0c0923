"""Tags in which ranks saved state for themselves, because it differed between them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from nxd_ckpt.core.limits import shown
from nxd_ckpt.core.name_patterns import OPTIMIZER, lineage
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import IncompatibleState, MalformedFile
from nxd_ckpt.formats.tensors import Path, iter_tensors
from nxd_ckpt.layouts.payload import checked_names

if TYPE_CHECKING:
    from nxd_ckpt.tag.opened import OpenTag
    from nxd_ckpt.tag.reading import Leaf


class Gone(Enum):
    """Stands for a value: the rank has none of that name, or it had changed before it was known to be its own."""

    ABSENT = "absent"
    LOST = "lost"


class OwnValue(NamedTuple):
    """A value, tensor or container. ``path`` leads to it in the tree of its part; None if that is not known.

    ``mesh`` describes the placement of a DTensor. ``is_of_older``: the tag is of a version in which a rank that had its
    param groups in another order kept their options by its own numbers.
    """

    value: Any
    path: Path | None = None
    mesh: str | None = None
    is_of_older: bool = False


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
            Gone.ABSENT.value: self.names_of(Gone.ABSENT),
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
            self.values[name] = OwnValue(leaf, path, meshes.get(name), Gone.LOST.value in content)
        # Older tags have no parameters, and a list of what was lost.
        listed = {"parameters": [], Gone.LOST.value: [], **content}
        for kind in Gone:
            self.values.update(dict.fromkeys(_listed(listed, kind.value, where), OwnValue(kind)))
        self.parameters.extend(_listed(listed, "parameters", where))


_BY_NAME = ("leaves", "paths", "meshes")


def _listed(content: dict[str, Any], key: str, where: str) -> list[str]:
    listed = content.get(key)
    if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
        raise MalformedFile(f"{where}: {key} must be names, found {shown(listed)}")
    return [*listed]


def with_own(tree: dict[str, Any], state: OwnState) -> dict[str, Any]:
    """Return a model's ``tree``, which another rank wrote for all, with what a rank had in place of its entries.

    DTensors, of which the ``state`` has parts, and entries of extra state are not among it.
    """
    whole = dict(tree)
    for name, own in state.values.items():
        if not name.startswith("model/"):
            continue
        if own.value is Gone.ABSENT:
            whole.pop(name.removeprefix("model/"), None)
        elif own.path is not None and len(own.path) == 1 and own.mesh is None:
            whole[own.path[0]] = own.value
    return whole


def own_tensors(opened: OpenTag, rank: int) -> Iterator[tuple[str, Leaf]]:
    """Yield the tensors that the global ``rank`` saved for itself, by their global names."""
    own = opened.rank_state(rank) if opened.per_rank else OwnState()
    parameters = dict(enumerate(own.parameters))
    for (name, _, *path), leaf in iter_tensors(own.values):
        entry = entry_name(path, parameters) if name == OPTIMIZER else "/".join(map(str, path))
        yield f"{name}/{entry}" if path else name, leaf


def entry_name(path: Sequence[Any], parameters: Mapping[int, str]) -> str:
    """Name a state entry as indexes do: ``(base_state, 0, exp_avg)`` of a parameter without name ``#0/exp_avg``.

    ``parameters`` are names by index.
    """
    section, *rest = path
    if section not in ("state", "base_state", "sharded_master_weights") or not rest:
        return "/".join(map(str, path))
    index, *state = rest
    return "/".join([parameters.get(index, f"#{index}"), *map(str, state or ["master_weights"])])


def refuse_per_rank(opened: OpenTag, *wanted: str, instead: str = "") -> None:
    """Raise IncompatibleState if ranks saved their own values of some of what is ``wanted``: parts, or names in them.
    """
    there = {path for name in wanted if name != "optim" or opened.parts.optimizer is not None for path in lineage(name)}
    parts = there.intersection(wanted)
    own = [name for name in (*opened.per_rank, *opened.of_groups) if name in there or name.partition("/")[0] in parts]
    if own and instead:
        raise IncompatibleState(f"{opened.where}: {first_of(own)} differed between the ranks that saved it; {instead}")
    if own:
        is_optimizer = all(name.partition("/")[0] == "optim" for name in own)
        without = ", or leave out the optimizer: optimizer=False (--no-optimizer)" if is_optimizer else ""
        raise IncompatibleState(
            f"{opened.where}: {first_of(own)} differed between the ranks that saved it, and each rank's own was "
            "saved: nothing tells whose to take. Resume on the same ranks, make them equal there, and save "
            f"again{without}"
        )
