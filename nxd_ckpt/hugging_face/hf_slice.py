"""Parts of Hugging Face tensors and their places in an NxD tensor, as boxes for both directions. Pure.

NxD's tensor is the *whole* one: the parts of all tensor-parallel ranks in order along the rule's dimension (each member
separately), and of all expert-parallel ranks along the first. So it has every copy of k and v. The cut comes from
`partition_of`, not from the parameter's attributes.

Boxes of a Hugging Face tensor use NxD's layout: the last two dimensions are swapped if the rule is transposed, and
there is a first dimension of 1 if it is stacked.

`NxdTensor` and `HfTensor` are the two sides of an export: a tensor of the tag, and the tensors that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.heads import HeadRun
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition, Piece, Section
from nxd_ckpt.errors import InvalidArgument, ShapeMismatch, TopologyMismatch
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.hugging_face.mapping import MappingRule, Match, RuleMember
from nxd_ckpt.hugging_face.sizes import Sizes

ALL_RANKS = (
    ", and check that the files of all ranks are there. If each rank holds a whole copy of this tensor, and parts of "
    "others, make a tag by convert(..., to='tag', tp=1, partitions=...), with the cuts of the others, and take that"
)
"""Advice for a tensor that is larger than its model's."""


@dataclass(frozen=True)
class HfSlice:
    """One Hugging Face tensor of an NxD tensor.

    Attributes:
        name: name of the Hugging Face tensor.
        shape: its shape in the file.
        pieces: everything that both tensors share: ``local`` is the box in the Hugging Face tensor, in NxD's layout,
            and ``box`` that in NxD's whole tensor. An element of k or v is in several pieces.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def once(self) -> tuple[Piece, ...]:
        """The pieces of the first copy: each element of the Hugging Face tensor once."""
        return self.copies[0]

    @property
    def copies(self) -> list[tuple[Piece, ...]]:
        """The pieces copy by copy; each copy has every element of the Hugging Face tensor once."""
        places: dict[Box, list[Piece]] = {}
        for piece in self.pieces:
            places.setdefault(piece.local, []).append(piece)
        return list(zip(*places.values(), strict=True))


def hf_slices(match: Match, shape: tuple[int, ...], sizes: Sizes, experts: slice = slice(None)) -> list[HfSlice]:
    """Return the Hugging Face tensors of an NxD tensor whose whole shape is ``shape``.

    Of a stack, only those of ``experts`` along its first dimension.

    Raises:
        ShapeMismatch: a model with these sizes has another shape.
        InvalidArgument: config.json lacks a size that the rule needs, or heads do not divide.
    """
    rule = match.rule
    _check_dimensions(match, shape)
    members = []
    for member, runs in zip(rule.members, _places(rule, _lengths(match, shape, sizes), sizes), strict=True):
        laid_out = _laid_out(rule, shape, runs)
        members.append((member.name, _in_file(rule, laid_out), tuple(_pieces(rule, laid_out, runs))))
    if rule.stacked is None:
        return [HfSlice(name.fill(match.numbers), in_file, pieces) for name, in_file, pieces in members]
    expected = sizes.find(rule.stacked)
    if expected not in (None, shape[0]):
        raise ShapeMismatch(f"{match.name} has shape {shape}, but by config.json its first size is {expected}")
    return [
        HfSlice(
            name.fill({**match.numbers, rule.stacked: index}),
            in_file,
            tuple(Piece(piece.local, piece.box.narrowed(0, index, 1)) for piece in pieces),
        )
        for index in range(shape[0])[experts]
        for name, in_file, pieces in members
    ]


def whole_shape(match: Match, shapes: Sequence[tuple[int, ...]], sizes: Sizes, multiple: int = 1) -> tuple[int, ...]:
    """Return the shape of an NxD tensor, from the shapes of its Hugging Face tensors in the order of the rule's names.

    If it may have more rows than Hugging Face's (a vocabulary), rows are rounded up to a multiple of ``multiple``.

    Raises:
        ShapeMismatch: the tensors do not lie side by side.
    """
    rule = match.rule
    laid_out = [_swapped(shape) if rule.transposed else shape for shape in shapes]
    first = laid_out[0]
    dim = None if rule.dim is None else rule.dim - (rule.stacked is not None)
    for name, shape in zip(rule.names(match.numbers, sizes), laid_out, strict=True):
        other_sizes = [size for at, size in enumerate(shape) if at != dim]
        if len(shape) != len(first) or other_sizes != [size for at, size in enumerate(first) if at != dim]:
            raise ShapeMismatch(f"{name} has shape {shape}, which does not fit beside {first} in {match.name}")
    if dim is not None:
        lengths = [
            sizes.attention().length(member.heads) if member.heads else shape[dim]
            for member, shape in zip(rule.members, laid_out, strict=False)
        ]
        padding = -sum(lengths) % multiple if rule.members[0].rows else 0
        first = (*first[:dim], sum(lengths) + padding, *first[dim + 1 :])
    return first if rule.stacked is None else (sizes.get(rule.stacked), *first)


def partition_of(match: Match, shape: tuple[int, ...], sizes: Sizes, tp: int) -> Partition:
    """Return the cut over ``tp`` ranks (and any number of expert-parallel ones) of an NxD tensor of whole ``shape``.

    Raises:
        TopologyMismatch: a member cannot be cut into ``tp`` equal parts.
    """
    rule = match.rule
    expert = match.rule.stacked is not None
    if rule.dim is None or (tp == 1 and rule.units is None):
        return Partition(expert=expert)
    lengths = _lengths(match, shape, sizes)
    for member, length in zip(rule.members, lengths, strict=True):
        head_dim = length // sizes.get("kv_heads") if rule.interleaved else sizes.get("head_dim") if member.heads else 1
        count, what = (length // head_dim, "heads") if member.heads else (length, "elements")
        if rule.units is not None:
            count = sizes.get(rule.units)
            what = sizes.key(rule.units)
            if length % count:
                raise ShapeMismatch(
                    f"{member.name.text}: {length} elements cannot be {count} {what}; pass the model's own config.json"
                )
        if count % tp:
            raise TopologyMismatch(
                f"{match.name}: the {count} {what} of {member.name.text} along dimension {rule.dim} cannot be "
                f"divided equally among {tp} tensor-parallel ranks; choose another size, or another kv_size_multiplier"
            )
    if tp == 1:
        return Partition(expert=expert)
    if rule.interleaved:
        return Partition(rule.dim, 1, tp, expert=expert)
    if len(set(lengths)) == 1:
        return Partition(rule.dim, len(lengths), tp, expert=expert)
    return Partition(rule.dim, expert=expert, fused=tuple(Section(length, tp) for length in lengths))


def _check_dimensions(match: Match, shape: tuple[int, ...]) -> None:
    rule = match.rule
    least = max(0 if rule.dim is None else rule.dim + 1, 2 * rule.transposed + (rule.stacked is not None))
    if len(shape) < least:
        raise ShapeMismatch(f"{match.name} has shape {shape}, but its rule needs at least {least} dimensions")


def _lengths(match: Match, shape: tuple[int, ...], sizes: Sizes) -> list[int]:
    """Return how many elements of NxD's dimension each member has."""
    rule = match.rule
    if rule.dim is None:
        return [0]
    by_heads = [
        sizes.attention().length(member.heads) if member.heads else None
        for member in rule.members
    ]
    left = shape[rule.dim] - sum(length or 0 for length in by_heads)
    share, rest = divmod(left, by_heads.count(None)) if None in by_heads else (0, left)
    if rest or left < 0:
        names = ", ".join(member.name.text for member in rule.members)
        raise ShapeMismatch(
            f"{match.name}: {shape[rule.dim]} elements along dimension {rule.dim} do not fit {names}: "
            f"{_sizes_text(sizes)}. Check that this is the model's config.json, that kv_size_multiplier is that of the "
            f"training{ALL_RANKS}"
        )
    return [share if length is None else length for length in by_heads]


def _places(rule: MappingRule, lengths: Sequence[int], sizes: Sizes) -> list[list[HeadRun]]:
    """Return the runs of each member along NxD's dimension."""
    places = []
    start = 0
    if not rule.interleaved:
        for member, length in zip(rule.members, lengths, strict=True):
            places.append([run._replace(nxd=start + run.nxd) for run in _runs(member, length, sizes)])
            start += length
        return places
    if sizes.kv_size_multiplier != 1:
        raise InvalidArgument(f"{rule.nxd.text} holds each key-value head once; leave out kv_size_multiplier")
    groups = sizes.get("kv_heads")
    group = sum(lengths) // groups
    for share in (length // groups for length in lengths):
        places.append([HeadRun(start + number * group, number * share, share) for number in range(groups)])
        start += share
    return places


def _runs(member: RuleMember, length: int, sizes: Sizes) -> list[HeadRun]:
    """Return the runs of a member's elements along the dimension, counted from its own start."""
    if member.heads:
        return sizes.attention().runs(member.heads)
    rows = length if member.rows is None else sizes.get(member.rows)
    if rows > length:
        raise ShapeMismatch(
            f"{member.name.text} should have {rows} rows by config.json ({sizes.key(member.rows or '')}), but there "
            f"are {length}; check that this is the model's config.json, and that the files of all ranks are there"
        )
    return [HeadRun(0, 0, rows)]


def _laid_out(rule: MappingRule, shape: tuple[int, ...], runs: Sequence[HeadRun]) -> tuple[int, ...]:
    """Return the shape of the Hugging Face tensor in NxD's layout."""
    stacked = shape if rule.stacked is None else (1, *shape[1:])
    if rule.dim is None:
        return stacked
    length = max(run.hf + run.length for run in runs)
    return (*stacked[: rule.dim], length, *stacked[rule.dim + 1 :])


def _pieces(rule: MappingRule, laid_out: tuple[int, ...], runs: Sequence[HeadRun]) -> Iterator[Piece]:
    """Yield the pieces of the first tensor of a stack, or of the only one."""
    whole = Box.whole(laid_out)
    if rule.dim is None:
        yield from (Piece(whole, whole) for _ in runs)
        return
    for run in runs:
        yield Piece(whole.narrowed(rule.dim, run.hf, run.length), whole.narrowed(rule.dim, run.nxd, run.length))


def _in_file(rule: MappingRule, laid_out: tuple[int, ...]) -> tuple[int, ...]:
    shape = laid_out if rule.stacked is None else laid_out[1:]
    return _swapped(shape) if rule.transposed else shape


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        raise InvalidArgument(f"a tensor of shape {shape} cannot be transposed")
    return (*shape[:-2], shape[-1], shape[-2])


def _sizes_text(sizes: Sizes) -> str:
    names = ("heads", "kv_heads", "head_dim")
    parts = [f"{name}={sizes.find(name)}" for name in names if sizes.find(name) is not None]
    return ", ".join([*parts, f"kv_size_multiplier={sizes.kv_size_multiplier}"])


@dataclass(frozen=True)
class NxdTensor:
    """A whole tensor of the tag: its rule, the pipeline stage that holds it, and its cut over the stage's ranks.

    ``local_shape`` is the shape on each rank, ``shape`` the whole one.
    """

    match: Match
    pp_rank: int
    dtype: str
    local_shape: tuple[int, ...]
    shape: tuple[int, ...]
    partition: Partition

    @property
    def name(self) -> str:
        return self.match.name

    @property
    def spec(self) -> ParameterSpec:
        """The whole tensor on a single rank."""
        return ParameterSpec(self.dtype, self.shape, Partition(expert=self.partition.expert), explicit=True)


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor, and the tensor of the tag that holds it.

    With ``entry`` it is the optimizer's state of that name for the tensor, which is cut like the tensor.
    """

    hf_slice: HfSlice
    dtype: str
    source: NxdTensor
    entry: str | None = None

    @property
    def weight(self) -> str:
        """Name of the Hugging Face tensor that it is, or is the state of."""
        return self.hf_slice.name

    @property
    def name(self) -> str:
        return self.weight if self.entry is None else f"{self.weight}/{self.entry}"

    @property
    def source_name(self) -> str:
        return self.source.name if self.entry is None else f"{self.source.name}/{self.entry}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.hf_slice.shape

    @property
    def layout(self) -> Assembly:
        """The tensor without its elements."""
        return Assembly(self.dtype, self.shape, ())
