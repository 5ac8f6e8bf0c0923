"""Sizes of the parallel dimensions, and the map between global ranks and coordinates.

The standard order of global ranks is pipeline outermost, then data, then tensor parallel fastest::

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

Expert parallelism splits the data-parallel dimension: ``dp_rank = expert_dp_rank * ep + ep_rank``. Real clusters
deviate (tp = 4 on Trn1 is strided inside a node; Trn2 uses rings), so a topology that was read from live process
groups has its own map in ``rank_map``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nxd_ckpt.core.arguments import Count, plain_value
from nxd_ckpt.errors import InvalidArgument


@dataclass(frozen=True, order=True)
class Coordinates:
    """The coordinates of one rank. ``ep_rank`` follows from ``dp_rank`` and the topology's ``ep``."""

    pp_rank: int = 0
    dp_rank: int = 0
    tp_rank: int = 0


@dataclass(frozen=True, init=False)
class Topology:
    """Sizes for dp, tp, pp and ep, and the coordinates of this rank.

    ``Topology(dp=2, tp=4, rank=5)``, or with coordinates instead of the rank:
    ``Topology(dp=2, tp=4, dp_rank=1, tp_rank=1)``. ``ep`` must divide ``dp``, because experts are spread over
    data-parallel ranks. Without arguments it is a single process. If the ranks are a process group of a larger job,
    ``members`` are their ranks in that job, in order.

    Raises:
        InvalidArgument: a size below 1, a number of ``members`` other than the number of ranks, a rank or coordinate
            out of range, ``ep`` that does not divide ``dp``, or a rank and coordinates that contradict each other.
    """

    dp: int
    tp: int
    pp: int
    ep: int
    coordinates: Coordinates
    rank_map: tuple[Coordinates, ...] | None = field(repr=False)
    members: tuple[int, ...] | None = field(repr=False)
    _ranks: Mapping[Coordinates, int] = field(repr=False, compare=False)

    def __init__(
        self,
        dp: int = 1,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        *,
        rank: int | None = None,
        dp_rank: int | None = None,
        tp_rank: int | None = None,
        pp_rank: int | None = None,
        rank_map: Sequence[Coordinates] | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        sizes = {"dp": dp, "tp": tp, "pp": pp, "ep": ep}
        dp, tp, pp, ep = (plain_value(Count, size, f"Topology(): {name}") for name, size in sizes.items())
        if dp % ep:
            raise InvalidArgument(f"Topology: ep={ep} must divide dp={dp}: experts are spread over dp ranks")
        set_ = object.__setattr__  # frozen
        set_(self, "dp", dp)
        set_(self, "tp", tp)
        set_(self, "pp", pp)
        set_(self, "ep", ep)
        set_(self, "rank_map", _own_map(rank_map, dp, tp, pp))
        set_(self, "members", None if members is None else tuple(members))
        if members is not None and len(set(members)) != dp * tp * pp:
            raise InvalidArgument(
                f"Topology: the process group has the {len(set(members))} ranks {list(members)[:8]}, expected "
                f"{dp * tp * pp} for dp={dp} tp={tp} pp={pp}"
            )
        set_(self, "_ranks", {place: rank_ for rank_, place in enumerate(self.rank_map or ())})
        named = {"dp_rank": dp_rank, "tp_rank": tp_rank, "pp_rank": pp_rank}
        passed = {name: plain_value(int, at, f"Topology(): {name}") for name, at in named.items() if at is not None}
        rank = plain_value(int | None, rank, "Topology(): rank")
        if rank is None:
            coordinates = Coordinates(**passed)
            self.rank_of(coordinates)
        else:
            coordinates = self.coordinates_of(rank)
            contradicting = {name: value for name, value in passed.items() if getattr(coordinates, name) != value}
            if contradicting:
                raise InvalidArgument(
                    f"Topology: rank {rank} is at {coordinates}, which contradicts {contradicting}; pass one of the two"
                )
        set_(self, "coordinates", coordinates)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def rank(self) -> int:
        return self.rank_of(self.coordinates)

    @property
    def dp_rank(self) -> int:
        return self.coordinates.dp_rank

    @property
    def tp_rank(self) -> int:
        return self.coordinates.tp_rank

    @property
    def pp_rank(self) -> int:
        return self.coordinates.pp_rank

    @property
    def ep_rank(self) -> int:
        return self.coordinates.dp_rank % self.ep

    @property
    def expert_dp_rank(self) -> int:
        return self.coordinates.dp_rank // self.ep

    @property
    def expert_dp(self) -> int:
        """Number of replicas of each expert."""
        return self.dp // self.ep

    @property
    def sizes(self) -> dict[str, int]:
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep}

    def rank_of(self, at: Coordinates) -> int:
        """Return the global rank at these coordinates."""
        limits = ((at.pp_rank, self.pp, "pp"), (at.dp_rank, self.dp, "dp"), (at.tp_rank, self.tp, "tp"))
        for value, size, name in limits:
            if not 0 <= value < size:
                raise InvalidArgument(f"Topology: {name}_rank {value} is not in [0, {size}) of {self.sizes}")
        standard = (at.pp_rank * self.dp + at.dp_rank) * self.tp + at.tp_rank
        return standard if self.rank_map is None else self._ranks[at]

    def coordinates_of(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank."""
        if not 0 <= rank < self.world_size:
            raise InvalidArgument(f"Topology: rank {rank} is not in [0, {self.world_size}) of {self.sizes}")
        if self.rank_map is not None:
            return self.rank_map[rank]
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coordinates(pp_rank, dp_rank, tp_rank)

    def at(self, rank: int) -> Topology:
        """Return the same sizes and map for another rank."""
        return Topology(**self.sizes, rank=rank, rank_map=self.rank_map, members=self.members)

    def replicas(self, at: Coordinates, *, expert: bool = False) -> list[int]:
        """Return the global ranks that hold the same model state as ``at``, in order of dp rank.

        They are its dp group, for expert tensors only those of the same ep rank.
        """
        step = self.ep if expert else 1
        start = at.dp_rank % step
        return [self.rank_of(Coordinates(at.pp_rank, dp_rank, at.tp_rank)) for dp_rank in range(start, self.dp, step)]

    def writer_of(self, at: Coordinates) -> Coordinates:
        """Return the first rank with the same model state as ``at``, experts included, which writes for all of them."""
        return Coordinates(at.pp_rank, at.dp_rank % self.ep, at.tp_rank)

    def describe(self) -> str:
        """Return ``dp=2 tp=4 pp=1 ep=1``."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())


def _own_map(rank_map: Sequence[Coordinates] | None, dp: int, tp: int, pp: int) -> tuple[Coordinates, ...] | None:
    """Return the map, or None if it is the standard one, so that equal topologies compare equal."""
    if rank_map is None:
        return None
    world = dp * tp * pp
    # The length first: sizes read from a damaged manifest may be astronomical.
    fits = len(rank_map) == world
    standard = [Coordinates(p, d, t) for p in range(pp) for d in range(dp) for t in range(tp)] if fits else []
    if not fits or sorted(rank_map) != standard:
        raise InvalidArgument(
            f"Topology: rank_map must give each of the {world} ranks of dp={dp} tp={tp} pp={pp} "
            f"coordinates of its own, found {len(rank_map)} entries: {list(rank_map)[:8]}"
        )
    return None if list(rank_map) == standard else tuple(rank_map)


def topology_from_groups(
    rank: int,
    tp_groups: Sequence[Sequence[int]],
    dp_groups: Sequence[Sequence[int]],
    pp_groups: Sequence[Sequence[int]],
    ep: int = 1,
) -> Topology:
    """Return the topology that live replica groups (lists of lists of global ranks) describe.

    A rank's coordinate in a dimension is its position in its group of that dimension; any stride of the ranks is
    allowed (source: neuronx_distributed's ``parallel_state``, whose groups differ between platforms).
    """
    position = [
        {member: index for group in groups for index, member in enumerate(group)}
        for groups in (pp_groups, dp_groups, tp_groups)
    ]
    world = sum(len(group) for group in tp_groups)
    if any(set(places) != set(range(world)) for places in position):
        raise InvalidArgument(f"replica groups must cover the ranks 0..{world - 1} once in each dimension")
    rank_map = [Coordinates(*(places[member] for places in position)) for member in range(world)]
    dp, tp, pp = (len(groups[0]) for groups in (dp_groups, tp_groups, pp_groups))
    return Topology(dp, tp, pp, ep, rank=rank, rank_map=rank_map)
