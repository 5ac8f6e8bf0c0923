"""Tags in which ranks saved state for themselves, because it differed between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nxd_ckpt.core.name_patterns import OPTIMIZER, lineage
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import IncompatibleState
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.layouts.own_state import Gone, OwnState

if TYPE_CHECKING:
    from nxd_ckpt.tag.opened import OpenTag
    from nxd_ckpt.tag.reading import Leaf


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
    for (name, _, *path), leaf in iter_tensors(own.values):
        entry = entry_name(path, own.parameters) if name == OPTIMIZER else "/".join(map(str, path))
        yield f"{name}/{entry}" if path else name, leaf


def entry_name(path: Sequence[Any], parameters: Sequence[str] | None) -> str:
    """Name a state entry as indexes do: ``(base_state, 0, exp_avg)`` of a parameter without name ``#0/exp_avg``."""
    section, *rest = path
    if section not in ("state", "base_state", "sharded_master_weights") or not rest:
        return "/".join(map(str, path))
    index, *state = rest
    names_by_index = dict(enumerate(parameters or ()))
    return "/".join([names_by_index.get(index, f"#{index}"), *map(str, state or ["master_weights"])])


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
