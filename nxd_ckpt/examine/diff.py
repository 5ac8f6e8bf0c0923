"""Differences between two tags, which may have been saved on different sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from nxd_ckpt.checkpoint import Checkpoint, open_checkpoint
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.core.names import RANK_STATE_DIR
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.errors import IncompatibleState, InvalidArgument, PartLost, PartNotFound, as_checkpoint_errors
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.reshard.summary import ABSENT, Tally, equal_values
from nxd_ckpt.reshard.whole_tag import GlobalTensor, WholeTag, plain_values
from nxd_ckpt.storage.progress import Counter, watched
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.reading import Leaf
from nxd_ckpt.tag.side_by_side import Matched, windows

__all__ = ["ABSENT", "Difference", "TensorDifference", "ValueDifference", "diff_checkpoints"]


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not the same in both tags.

    Attributes:
        name: its name in `Checkpoint.metadata`.
        a, b: the tensor of each tag; None where a tag has none.
        differing: the number of elements that differ; None where they were not compared.
        nans: how many of them are NaN on one side only.
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
        """The kind of difference: only in a, only in b, shape, values, dtype (nothing else differs), not compared."""
        if self.a is None or self.b is None:
            return "only in b" if self.a is None else "only in a"
        if self.problem is not None:
            return "not compared"
        if self.differing is None:
            return "shape"
        return "values" if self.differing else "dtype"


@dataclass
class _Pair:
    """A name that both tags have, with the result of its comparison so far."""

    shapes_fit: bool = True
    problem: str | None = None
    tally: Tally = field(default_factory=Tally)


class _TensorComparison:
    """Comparison of the tensors of ``a`` and ``b`` that ``is_selected`` names.

    Tensors with equal digests are read only if ``full``; ``same_digests`` counts those not read. ``names`` are the
    selected names of either tag, ``nbytes`` the bytes to read of ``b``, and ``done`` counts those read so far.
    """

    def __init__(self, a: WholeTag, b: WholeTag, is_selected: Callable[[str], bool], full: bool) -> None:
        self._a = a
        self._b = b
        self._full = full
        self.names = [name for name in dict.fromkeys([*a.tensors, *b.tensors]) if is_selected(name)]
        self.same_digests = 0
        self.done = Counter()
        self._by_name = {name: _Pair() for name in self.names if name in a.tensors and name in b.tensors}
        self._pairs = [matched for name, pair in self._by_name.items() for matched in self._plan(name, pair)]

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for matched in self._pairs for _, b in matched.leaves[1:])

    def differences(self) -> Iterator[TensorDifference]:
        """Yield the tensors that differ, by name.

        Raises:
            CorruptCheckpoint: bytes of a tag are not those that were written.
        """
        for window in windows([self._a.opened, self._b.opened], self._pairs):
            for tally, (a, b) in window:
                tally.add(a, b)
                self.done.add(b.nbytes)
        for name in self.names:
            difference = self._difference(name)
            if difference is not None:
                yield difference

    def _difference(self, name: str) -> TensorDifference | None:
        a = self._a.tensors.get(name)
        b = self._b.tensors.get(name)
        pair = self._by_name.get(name)
        if a is None or b is None or pair is None:
            return TensorDifference(name, a, b)
        if pair.problem is not None or not pair.shapes_fit:
            return TensorDifference(name, a, b, problem=pair.problem)
        tally = pair.tally
        if not tally.differing and a.dtype == b.dtype:
            return None
        return TensorDifference(name, a, b, tally.differing, tally.nans, tally.max_difference, tally.relative_norm)

    def _plan(self, name: str, pair: _Pair) -> list[Matched[Tally]]:
        """Return the reads that compare the tensors of that name."""
        try:
            leaves = self._leaves(name)
        except PartLost:
            raise
        except (IncompatibleState, PartNotFound) as error:
            pair.problem = _without_name(str(error), name)
            return []
        pair.shapes_fit = all(a.shape == b.shape for a, b in leaves)
        if not pair.shapes_fit:
            return []
        unlike = [(a, b) for a, b in leaves if self._full or not same_digests(a, b)]
        self.same_digests += not unlike
        return [Matched(pair.tally, name, ((0, a), (1, b))) for a, b in unlike]

    def _leaves(self, name: str) -> list[tuple[Leaf, Leaf]]:
        """Return the tensor of both tags, or the parts of each rank (of equal sizes) if its partition is unknown."""
        try:
            return [(self._a.leaf(name), self._b.leaf(name))]
        except PartLost:
            raise
        except (IncompatibleState, PartNotFound):
            sizes_a = self._a.opened.topology
            sizes_b = self._b.opened.topology
            if (sizes_a.tp, sizes_a.ep) != (sizes_b.tp, sizes_b.ep):
                raise
            a = self._a.leaves_by_rank(name)
            b = self._b.leaves_by_rank(name)
            if len(a) != len(b):  # other ZeRO-1 shards
                raise
        # Expert-parallel ranks hold what is not an expert's in one file: that is compared once.
        return list(dict.fromkeys(zip(a, b, strict=True)))


def _rank_states(tag: Checkpoint) -> list[FileEntry]:
    """Return the sizes and digests of the files of what ranks saved for themselves, in order of ranks."""
    ranks = range(tag.topology.world_size if tag.opened.per_rank else 0)
    indexes = [tag.opened.index(tag.topology.coordinates_of(rank)) for rank in ranks]
    return [entry for index in indexes for file, entry in index.files.items() if file.startswith(RANK_STATE_DIR)]


def _without_name(message: str, name: str) -> str:
    """Return the message without ``name``, or a part of it, in front."""
    head, _, rest = message.partition(": ")
    return rest if f"/{head}/" in f"/{name}/" else message


def same_digests(a: Leaf, b: Leaf) -> bool:
    """Return whether both consist of the same parts of tensors with the same recorded digests."""
    parts = [_parts(Assembly.of(leaf)) for leaf in (a, b)]
    return a.dtype == b.dtype and None not in parts and parts[0] == parts[1]


def _parts(leaf: Assembly) -> list[tuple[object, ...]] | None:
    """Return a description that is equal for equal tensors; None if files lack digests."""
    parts: list[tuple[object, ...]] = []
    for fragment in sorted(leaf.fragments, key=lambda fragment: fragment.target):
        stub = fragment.stub
        record = fragment.stub.storage
        if record.crc32 is None:
            return None
        begin = stub.offset - record.offset
        form = (stub.dtype, stub.shape, stub.stride, begin, record.nbytes, record.crc32)
        parts.append((fragment.target, fragment.source, *form))
    return parts


@dataclass(frozen=True)
class ValueDifference:
    """A differing value that is not a tensor.

    Attributes:
        name: for example "optim/param_groups/0/lr", "scheduler/last_epoch" or "user_content/steps".
        a, b: the value in each tag; ABSENT where a tag does not have it.
    """

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Difference:
    """Differences between the tags ``a`` and ``b``. True if they differ, or if something could not be compared.

    Attributes:
        tensors, values: those that differ.
        same_tensors: the number of tensors that do not differ.
        same_digests: how many of those were not read, because their recorded digests are equal.
        problems: parts of the tags that could not be compared.
        nbytes: bytes that were read of the tensors of ``b``.
    """

    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    same_tensors: int
    same_digests: int
    problems: tuple[str, ...]
    nbytes: int

    def __bool__(self) -> bool:
        return bool(self.tensors or self.values or self.problems)


@as_checkpoint_errors
@takes()
def diff_checkpoints(
    a: Checkpoint | StrPath,
    b: Checkpoint | StrPath,
    *,
    prefix: str | Sequence[str] = (),
    full: bool = False,
    progress: bool = False,
) -> Difference:
    """Compare two tags, of nxd_ckpt or NxD, in any place, saved on any sizes.

    Tensors are matched by name, and compared in 64 MiB of memory; their digests are verified. NaN in the same place is
    equal. Tensors of different dtypes are compared as numbers, and always differ. If a
    tensor's partition is unknown and both tags were saved on the same tp and ep, the parts of each rank are compared.

    Args:
        a, b: opened by `open_checkpoint`, with ``partitions=`` and ``saved_param_names=`` if the tags do not record
            them; or the path of each.
        prefix: compare only names with this beginning; shell patterns such as "model/" or "optim/*/exp_avg".
        full: also read tensors whose recorded digests (CRC-32) are equal.
        progress: show a bar on a terminal.

    Raises:
        InvalidArgument: neither tag has such a name.
        CorruptCheckpoint, PartLost: a tag is not what was written, or lost a file.
        TagReplaced: a tag was removed, or saved again, since it was opened.
    """
    a, b = (one if isinstance(one, Checkpoint) else open_checkpoint(one) for one in (a, b))
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
    with a.opened.guarded(), b.opened.guarded():
        difference = _difference(a, b, prefixes, full, progress)
        if difference.problems or any(tensor.problem for tensor in difference.tensors):
            a.opened.require_unchanged()
            b.opened.require_unchanged()
    return difference


def _difference(a: Checkpoint, b: Checkpoint, prefixes: Sequence[str], full: bool, progress: bool) -> Difference:
    def is_selected(name: str) -> bool:
        return not prefixes or any(fnmatchcase(name, f"{prefix}*") for prefix in prefixes)

    problems: dict[str, str] = {}
    if _rank_states(a) != _rank_states(b):
        own = dict.fromkeys([*a.opened.per_rank, *b.opened.per_rank])
        problems |= {name: f"{name} is not compared: each rank's own was saved" for name in own}
    values_a, values_b = (plain_values(tag.whole, problems) for tag in (a, b))
    names = [name for name in dict.fromkeys([*values_a, *values_b]) if is_selected(name)]
    comparison = _TensorComparison(a.whole, b.whole, is_selected, full)
    if prefixes and not names and not comparison.names:
        raise InvalidArgument(f"no name in either tag begins with {' or '.join(prefixes)}")
    with watched("diff", comparison.nbytes, lambda: comparison.done.nbytes, progress):
        tensors = tuple(comparison.differences())
    pairs = [ValueDifference(name, values_a.get(name, ABSENT), values_b.get(name, ABSENT)) for name in names]
    return Difference(
        tensors,
        tuple(pair for pair in pairs if not equal_values(pair.a, pair.b)),
        len(comparison.names) - len(tensors),
        comparison.same_digests,
        tuple(problem for name, problem in problems.items() if is_selected(name)),
        comparison.done.nbytes,
    )
