"""The tensors of two tags compared by name: which are the same, and how far the others are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from nxd_ckpt.errors import IncompatibleState, PartLost, PartNotFound
from nxd_ckpt.formats.tensors import Assembly, itemsize
from nxd_ckpt.reshard.tally import Tally
from nxd_ckpt.reshard.whole_tag import GlobalTensor, WholeTag
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.tag.side_by_side import Leaf, Matched, SideBySide


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not the same in both tags.

    Attributes:
        name: as :attr:`Checkpoint.metadata` has it.
        a, b: what each tag has; None where it has none.
        differing: elements that differ, as numbers; None where they were not compared.
        nans: those of them that are NaN on one side only.
        max_difference: the largest ``|a - b|`` of the others, right to six digits.
        relative_norm: ``||a - b|| / ||a||`` of the others, right to six digits.
        problem: why the tensors could not be compared.
    """

    name: str
    a: GlobalTensor | None
    b: GlobalTensor | None
    differing: int | None = None
    nans: int | None = None
    max_difference: float | None = None
    relative_norm: float | None = None
    problem: str | None = None

    @property
    def kind(self) -> str:
        """What differs: "only in a", "only in b", "shape", "values", or the "dtype" alone; or "not compared"."""
        if self.a is None or self.b is None:
            return "only in b" if self.a is None else "only in a"
        if self.problem is not None:
            return "not compared"
        if self.differing is None:
            return "shape"
        return "values" if self.differing else "dtype"


@dataclass
class _Compared:
    """A name that both tags have, and what is found out about it."""

    shapes_fit: bool = True
    problem: str | None = None
    tally: Tally = field(default_factory=Tally)


class TensorComparison:
    """Compares the tensors of ``a`` and ``b`` whose names are ``wanted``; those with equal digests only if ``full``.

    ``names`` are those of either tag, ``nbytes`` what is to be read of ``b``, of which ``done`` counts what was.
    ``same_digests`` is how many tensors are not read at all.
    """

    def __init__(self, a: WholeTag, b: WholeTag, wanted: Callable[[str], bool], *, full: bool = False) -> None:
        self._a, self._b, self._full = a, b, full
        self.names = [name for name in dict.fromkeys([*a.tensors, *b.tensors]) if wanted(name)]
        self.same_digests, self.done = 0, Counter()
        self._compared = {name: _Compared() for name in self.names if name in a.tensors and name in b.tensors}
        self._pairs = [pair for name, found in self._compared.items() for pair in self._plan(name, found)]

    @property
    def nbytes(self) -> int:
        return sum(b.numel * itemsize(b.dtype) for pair in self._pairs for _, b in pair.leaves[1:])

    def differences(self, tolerance: float | None = None) -> Iterator[TensorDifference]:
        """Those tensors that differ, in the order of their names; with a ``tolerance`` those with an element that does
        by more, whatever their dtypes.

        Raises:
            CorruptCheckpoint: bytes of a tag are not those that were written.
        """
        for window in SideBySide(self._a.opened, self._b.opened).windows(self._pairs):
            for tally, (a, b) in window:
                tally.add(a, b)
                self.done.add(b.nbytes)
        for name in self.names:
            difference = self._difference(name, tolerance)
            if difference is not None:
                yield difference

    def _difference(self, name: str, tolerance: float | None) -> TensorDifference | None:
        a, b = self._a.tensors.get(name), self._b.tensors.get(name)
        found = self._compared.get(name)
        if a is None or b is None or found is None:
            return TensorDifference(name, a, b)
        if found.problem is not None or not found.shapes_fit:
            return TensorDifference(name, a, b, problem=found.problem)
        tally = found.tally
        if tolerance is None:
            same = not tally.differing and a.dtype == b.dtype
        else:
            same = not tally.nans and tally.max_difference <= tolerance
        if same:
            return None
        return TensorDifference(
            name, a, b, tally.differing, tally.nans, tally.max_difference, tally.relative_norm
        )

    def _plan(self, name: str, found: _Compared) -> list[Matched[Tally]]:
        """What is to be read to compare the tensors of that name."""
        try:
            leaves = self._leaves(name)
        except PartLost:
            raise
        except (IncompatibleState, PartNotFound) as error:
            found.problem = str(error)
            return []
        found.shapes_fit = all(a.shape == b.shape for a, b in leaves)
        if not found.shapes_fit:
            return []
        unlike = [(a, b) for a, b in leaves if self._full or not _same_digests(a, b)]
        self.same_digests += not unlike
        return [Matched(found.tally, name, ((0, a), (1, b))) for a, b in unlike]

    def _leaves(self, name: str) -> list[tuple[Leaf, Leaf]]:
        """The tensor of both tags; where one does not know its cut, what each rank of the same sizes held."""
        try:
            return [(self._a.leaf(name), self._b.leaf(name))]
        except PartLost:
            raise
        except (IncompatibleState, PartNotFound):
            sizes, other = self._a.opened.topology, self._b.opened.topology
            if (sizes.tp, sizes.ep) != (other.tp, other.ep):
                raise
            a, b = self._a.leaves_by_rank(name), self._b.leaves_by_rank(name)
            if len(a) != len(b):  # other ZeRO-1 shards
                raise
        # Expert-parallel ranks hold what is not an expert's in one file: that is compared once.
        return list(dict.fromkeys(zip(a, b, strict=True)))


def _same_digests(a: Leaf, b: Leaf) -> bool:
    """Whether both are made of the same parts of tensors with the same recorded digests."""
    parts = [_parts(Assembly.of(leaf)) for leaf in (a, b)]
    return a.dtype == b.dtype and None not in parts and parts[0] == parts[1]


def _parts(leaf: Assembly) -> list[tuple[object, ...]] | None:
    """Equal for equal tensors; None where files do not tell."""
    found: list[tuple[object, ...]] = []
    for fragment in sorted(leaf.fragments, key=lambda fragment: fragment.target):
        stub, record = fragment.stub, fragment.stub.storage
        if record.crc32 is None:
            return None
        begin = stub.offset - record.offset
        form = (stub.dtype, stub.shape, stub.stride, begin, record.nbytes, record.crc32)
        found.append((fragment.target, fragment.source, *form))
    return found
