"""Content that each rank saved for itself, because it differed from the one that another rank wrote for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from nxd_ckpt.core.mesh import Mesh, Placed
from nxd_ckpt.core.name_patterns import OPTIMIZER, PARAM_GROUPS, filtered_name, how_to_leave_out
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import IncompatibleState
from nxd_ckpt.formats.optimizer_trees import MASTERS
from nxd_ckpt.formats.tensors import Path, form_of, is_tensor, iter_tensors
from nxd_ckpt.live.dtensor import described_layout
from nxd_ckpt.live.state_names import SECTIONS, is_below, is_in, key_text, leaf_name, replaced, values_in
from nxd_ckpt.loading.filters import Filter
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import Gone, OwnValue

NO_MESH = Mesh((), (), ())
"""Stands for that of a model without DTensors."""


@dataclass(frozen=True)
class RankState:
    """This rank's own values, by name. They were saved ``on`` these meshes."""

    where: str = ""
    values: Mapping[str, OwnValue] = field(default_factory=dict)
    on: Set[Mesh] = frozenset()

    def regrouped(self, order: Sequence[Sequence[int]]) -> RankState:
        """Return it for live param groups, of which ``order`` has each one's numbers in the tag; none of a new one.

        Raises IncompatibleState if groups become one that have other options on this rank, or if an older tag does not
        say in which order this rank had them.
        """
        values: dict[str, OwnValue] = {}
        firsts = [numbers[0] for numbers in order if numbers]
        for name, own in self.values.items():
            if not is_below(name, {PARAM_GROUPS}):
                values[name] = own
                continue
            if own.is_of_older and firsts != sorted(firsts):
                raise IncompatibleState(
                    f"{self.where}: {name} differed between the ranks that saved it, and the live param groups are in "
                    "another order than the tag's: an older version saved it, without this rank's order. Leave it out "
                    f"with ignore_keys=[{filtered_name(name)!r}], and set it afterwards"
                )
            saved, _, option = name.removeprefix(f"{PARAM_GROUPS}/").partition("/")
            for live, numbers in enumerate(order):
                if saved in map(str, numbers):
                    self._refuse_joined(name, option, live, numbers)
                if saved in map(str, numbers[:1]):
                    path = own.path and (*own.path[:1], live, *own.path[2:])
                    values[f"{PARAM_GROUPS}/{live}/{option}"] = own._replace(path=path)
        return replace(self, values=values)

    def _refuse_joined(self, name: str, option: str, live: int, numbers: Sequence[int]) -> None:
        absent = OwnValue(Gone.ABSENT)
        own = (self.values.get(f"{PARAM_GROUPS}/{number}/{option}", absent) for number in numbers)
        if len({repr(each.value) for each in own}) > 1:
            raise IncompatibleState(
                f"{self.where}: {name} differed between the ranks that saved it, and the live param group {live} "
                f"holds parameters of groups {first_of(list(map(str, numbers)))}, which had other values on this "
                f"rank. Build the groups as at the save, or keep the live options: {how_to_leave_out([name])}"
            )

    def refuse_others(self, live: Set[Mesh]) -> None:
        """Raise IncompatibleState if they were not saved on these meshes of a job."""
        if not live <= self.on:
            raise IncompatibleState(
                f"{self.where}: {first_of([*self.values])} differed between the ranks that saved it on "
                f"{_described(self.on)}, and each rank's own was saved; this job is on {_described(live)}, and nothing "
                f"tells whose it takes. {how_to_leave_out(sorted(self.values))}"
            )

    def put_into(
        self, part: str, tree: Any, parameters: Sequence[str] | None, placed: Mapping[Path, Placed] | None = None
    ) -> Any:
        """Return the ``tree`` of a part, ``placed`` on meshes, with this rank's own values.

        Without ``placed``, parts of DTensors are not among them.

        Raises IncompatibleState for a tensor of another form, or on another mesh.
        """
        # All of an optimizer is in the tree already, which is filtered.
        taken = {
            name: own
            for name, own in self.values.items()
            if is_in(part, name) and name != OPTIMIZER and (placed is not None or own.mesh is None)
        }
        if not taken:
            return tree
        text = key_text if part == "scheduler" else str
        tensors = dict(iter_tensors(tree))
        at = {leaf_name(part, path, parameters, text): path for path in tensors}
        at |= {name: path for name, path, _ in values_in(part, tree, parameters)}
        # In tags of before, keys are in names as they are. What differs there has a path, except tensors.
        before = {leaf_name(part, path, parameters): path for path in (*tensors, *at.values())}
        index_of = {name: index for index, name in enumerate(parameters or ())}
        paths = {name: _live_path(name, own.path, index_of) for name, own in taken.items() if own.path is not None}
        places = before | paths | at
        values = {places[name]: own.value for name, own in taken.items() if name in places}
        for name, own in taken.items() if part != "scheduler" else ():  # there each may have another form
            path = places.get(name)
            if path in tensors and is_tensor(own.value):
                self._check(name, own, tensors[path], (placed or {}).get(path))
        absent = [path for path, value in values.items() if value is Gone.ABSENT]
        whole = replaced(tree, {path: value for path, value in values.items() if value is not Gone.ABSENT}, absent)
        return {key: value for key, value in whole.items() if value or key != MASTERS} if part == "optimizer" else whole

    def _check(self, name: str, own: OwnValue, leaf: Any, placed: Placed | None) -> None:
        mesh = None if placed is None else described_layout(placed.layout)
        is_free = mesh is None and is_in("optimizer", name)  # there each rank may have another form
        if own.mesh != mesh or not (is_free or form_of(own.value) == form_of(leaf)):
            raise IncompatibleState(
                f"{self.where}: {name} differed between the ranks that saved it, and each rank's own was saved, here "
                f"as {form_of(own.value)}; the live one is {form_of(leaf)}, or lies on another mesh. "
                f"{how_to_leave_out([name])}"
            )


def _live_path(name: str, path: Path, index_of: Mapping[str, int]) -> Path:
    """Return the saved ``path`` of that name, with the live index of an optimizer's parameter."""
    if not is_in("optimizer", name) or path[0] not in SECTIONS:
        return path
    entry = "".join(f"/{key_text(key)}" for key in path[2:])
    parameter = name.removeprefix("optim/").removesuffix(entry)
    return (path[0], index_of.get(parameter, path[1]), *path[2:])


def rank_state(opened: OpenTag, topology: Topology, filtered: Filter, parts: Sequence[str]) -> RankState:
    """Return this rank's own values of the ``parts`` to load.

    Raises IncompatibleState on other sizes, and for what the save could not keep.
    """
    of_groups = opened.of_groups
    wanted = [name for part in parts for name in (*opened.per_rank, *of_groups) if is_in(part, name)]
    names = [name for name in wanted if not _ignores(filtered, name)]
    if not names:
        return RankState()
    saved = opened.topology
    if opened.rank is None or not set(of_groups).isdisjoint(names):
        raise IncompatibleState(
            f"{opened.where}: {first_of(names)} differed between the ranks that saved it ({saved.describe()}), and "
            f"each rank's own was saved; this is another job ({topology.describe()}), and nothing tells whose "
            f"it takes. {how_to_leave_out(names)}"
        )
    state = opened.rank_state(topology.rank)
    lost = [name for name in state.names_of(Gone.LOST) if name in names]
    if lost:
        raise IncompatibleState(
            f"{opened.where}: this rank's own values of {first_of(lost)} were noticed when they had changed "
            "already, and are not in this tag. Load another one, or leave them out with ignore_keys="
        )
    values = {name: _chosen(name, own, filtered) for name, own in state.values.items() if name in names}
    on = {NO_MESH}
    if opened.mesh is not None:
        rank = topology.rank
        on = (opened.mesh.meshes_of(rank, "model/") or on) | opened.mesh.meshes_of(rank, "optim/")
    if topology.members is not None:  # in the tag ranks are places among them
        on = {replace(mesh, ranks=tuple(topology.members[place] for place in mesh.ranks)) for mesh in on}
    return RankState(opened.where, values, on)


def tree_of_rank(opened: OpenTag, part: str, rank: int) -> tuple[OpenTag, dict[str, Any]]:
    """Return the tree of a part as the global ``rank`` had it, and the tag that its tensors are read from."""
    at = opened.topology.coordinates_of(rank)
    view, own = opened, RankState()
    if opened.per_rank:
        view = OpenTag(opened.storage, opened.tag, opened._layout, opened.manifest, opened.identity)
        view.rank = rank
        own = rank_state(view, view.topology.at(rank), Filter(LoadOptions()), [part])
    trees: Mapping[str, Any] = {"model": view.model_tree, "optimizer": view.optimizer_tree}
    tree = trees[part](at) if part in trees else view.scheduler()
    return view, own.put_into(part, tree, view.optimizer_names(at) if part == "optimizer" else None)


def _chosen(name: str, own: OwnValue, filtered: Filter) -> OwnValue:
    """Return the value, of a parameter's state only what is not left out of the load."""
    if not is_in("optimizer", name) or not isinstance(own.value, dict):
        return own
    chosen = {key: entry for key, entry in own.value.items() if not _ignores(filtered, f"{name}/{key}")}
    return own._replace(value=chosen)


def _described(meshes: Set[Mesh]) -> str:
    """Return ``fsdp=2 tp=4``."""
    return " and ".join(sorted({mesh.describe() for mesh in meshes})) or "no mesh"


def _ignores(filtered: Filter, name: str) -> bool:
    """Return whether a value of this name is left out of the load."""
    return filtered.ignores(filtered_name(name))
