"""Files to write, laid out before any byte of them is copied, and the waves in which they are.

A wave is the bytes of files that are in memory at the same time, if the files are larger than that memory. A file has
the same layout in memory as on disk: tensors at their offsets, and the bytes between them filled in once the digests
are known. Bytes after the last tensor of a file are in no wave, nor is its head.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from nxd_ckpt.core.dcp_names import DcpChunk
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.errors import StagingTooLarge, UnsupportedState
from nxd_ckpt.formats.image import Image
from nxd_ckpt.formats.recorded_tree import RecordedTree
from nxd_ckpt.formats.tensors import form_of
from nxd_ckpt.formats.torch_zip_writer import image_of


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a planned file, as in the index; ``storage`` numbers the image's storages."""

    name: str
    storage: int
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] | None
    replicated: bool = False


@dataclass(frozen=True)
class PlannedFile:
    """One file to write: its key relative to the tag, its image, and the global tensors in it.

    ``part`` is the field of SaveState that it belongs to. ``contents`` extracts from that part's tree the object to
    pickle, if that is more than one tensor: a tree with other values gives another pickle. ``pickling`` makes the
    pickle, if that is postponed: tensors can be staged without it. ``chunks`` are the metadata of each torch file in a
    torch DCP directory, except its place; each follows its position in the state dict.
    """

    key: str
    image: Image
    tensors: tuple[NamedTensor, ...] = ()
    part: str = ""
    contents: Callable[[Any], Any] | None = None
    pickling: Callable[[Any], Image] | None = None
    chunks: tuple[tuple[int, DcpChunk], ...] = ()

    @cached_property
    def names(self) -> dict[int, str]:
        """A tensor's name for each storage, by number."""
        return {tensor.storage: tensor.name for tensor in self.tensors}

    @property
    def tree(self) -> RecordedTree | None:
        """The tree of a settled file for the index, if that lists all tensors of the file."""
        tree = self.image.recorded
        return None if tree is None or tree.tensors != len(self.tensors) else tree

    def settled(self) -> PlannedFile:
        """Return the file with its final image."""
        return self if self.pickling is None else replace(self, image=self.pickling(self.image), pickling=None)

    def placed_chunks(self) -> list[tuple[int, DcpChunk]]:
        """Return ``chunks`` with their places, of a settled file."""
        spans = zip(self.chunks, self.image.spans, strict=True) if self.chunks else ()
        return [(position, chunk._replace(start=start, nbytes=nbytes)) for (position, chunk), (start, nbytes) in spans]


class NamedLeaf(NamedTuple):
    """A tensor of a tree with its name in the index; those of equal ``tie`` share a storage of the file."""

    leaf: Any
    tie: Hashable
    name: str
    pieces: tuple[Piece, ...] | None = None
    replicated: bool = False


def file_of(key: str, tree: Any, leaves: Sequence[NamedLeaf], *, records: bool = False) -> PlannedFile:
    """Return the torch file of ``tree``, all of whose tensors are among the ``leaves``.

    Raises UnsupportedState for a tensor where a tree names none.
    """
    ties = {id(each.leaf): each.tie for each in leaves}

    def tie_of(leaf: Any) -> Hashable:
        if id(leaf) not in ties:
            raise UnsupportedState(
                f"{key}: a tensor {list(leaf.shape)} is the key of a dict, or in a set, where no name leads to it; "
                "keep it as a value, under a name or in a list"
            )
        return ties[id(leaf)]

    image = image_of(tree, tensor_key=tie_of, records=records)
    storage_of = {ties[id(leaf)]: number for number, leaf in enumerate(image.tensors)}
    tensors = tuple(
        NamedTensor(each.name, storage_of[each.tie], *form_of(each.leaf), each.pieces, each.replicated)
        for each in leaves
    )
    return PlannedFile(key, image, tensors)


_ALIGNMENT = 4096
"""Memory and file agree on where multiples of this are, so that all but the ends of a span can be written directly."""


@dataclass(frozen=True)
class Span:
    """Bytes ``start <= offset < stop`` of the file number ``file``, at ``at`` in memory.

    They are ``storages`` of its image, by number, with the bytes before each. If it ``is_part``, they are a part of the
    one storage, which is larger than the memory, and ``start`` is a multiple of the digest's block from its beginning.
    """

    file: int
    start: int
    stop: int
    at: int
    storages: range
    is_part: bool = False

    @property
    def end(self) -> int:
        """Its end in memory."""
        return self.at + self.stop - self.start

    def is_whole(self, image: Image) -> bool:
        """Return whether all tensors of the image are in it."""
        return not self.is_part and len(self.storages) == len(image.storages)

    def tensors(self, image: Image) -> Iterator[tuple[int, int, int, int]]:
        """Yield the bytes of tensors in it: (storage's number, its bytes from, up to, their place in the span)."""
        for number in self.storages:
            storage = image.storages[number]
            first = max(storage.offset, self.start)
            last = min(storage.end, self.stop)
            if first < last:
                yield number, first - storage.offset, last - storage.offset, first - self.start


Wave = list[Span]


def views_of(wave: Wave, memory: memoryview) -> list[memoryview]:
    """Return the memory of each span of the wave, in order, whatever it holds."""
    return [memory[span.at : span.end] for span in wave]


def end_of(wave: Wave) -> int:
    """Return the bytes of memory that the wave takes."""
    return wave[-1].end if wave else 0


def plan_waves(files: Sequence[PlannedFile], cap: int) -> list[Wave]:
    """Divide the files into waves of at most ``cap`` bytes; a single wave of whole files if they fit.

    Raises StagingTooLarge if a tensor must be cut, and not even a block of its digest fits.
    """
    plan = _Plan(cap)
    for number, planned in enumerate(files):
        plan.add(number, planned)
    return plan.waves


class _Plan:
    def __init__(self, cap: int) -> None:
        self._cap = cap
        self.waves: list[Wave] = [[]]

    def add(self, file: int, planned: PlannedFile) -> None:
        image = planned.image
        begin = planned.image.begin
        if image.tensor_nbytes <= self._cap:
            self._put(Span(file, begin, image.tensor_nbytes, 0, range(len(image.storages))))
            return
        for number, storage in enumerate(image.storages):
            if storage.end - begin + begin % _ALIGNMENT <= self._cap:
                self._put(Span(file, begin, storage.end, 0, range(number, number + 1)))
            else:
                self._cut(Span(file, storage.offset, storage.end, 0, range(number, number + 1), True), planned.key)
            begin = storage.end

    def _cut(self, whole: Span, key: str) -> None:
        """Add the span in parts, the first of which fills the wave."""
        start = whole.start
        while start < whole.stop:
            room = self._room(start)
            step = room if whole.stop - start <= room else room // CRC_BLOCK * CRC_BLOCK
            if step > 0:
                self._put(replace(whole, start=start, stop=min(start + step, whole.stop)))
                start += step
            elif self.waves[-1]:
                self.waves.append([])
            else:
                raise StagingTooLarge(
                    f"{key}: a tensor of {whole.stop - whole.start} bytes does not fit a staging cap of {self._cap} "
                    f"bytes, and waves need at least {CRC_BLOCK}; raise memory_cap"
                )

    def _put(self, span: Span) -> None:
        if span.stop - span.start > self._room(span.start):
            self.waves.append([])
        wave = self.waves[-1]
        last = wave[-1] if wave and not span.is_part else None
        if last is not None and (last.file, last.stop, last.is_part) == (span.file, span.start, False):
            wave[-1] = replace(last, stop=span.stop, storages=range(last.storages.start, span.storages.stop))
        else:
            wave.append(replace(span, at=self._place(span.start)))

    def _place(self, start: int) -> int:
        """Return the place in memory of a span that starts at byte ``start`` of its file."""
        end = end_of(self.waves[-1])
        return end + (start - end) % _ALIGNMENT

    def _room(self, start: int) -> int:
        return self._cap - self._place(start)
