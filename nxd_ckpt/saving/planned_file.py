"""One file to write, laid out before any byte of it is copied."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from nxd_ckpt.core.dcp_names import DcpChunk
from nxd_ckpt.core.partition import Piece
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
    """Return the torch file of ``tree``, all of whose tensors are among the ``leaves``."""
    ties = {id(each.leaf): each.tie for each in leaves}
    image = image_of(tree, tensor_key=lambda leaf: ties[id(leaf)], records=records)
    storage_of = {ties[id(leaf)]: number for number, leaf in enumerate(image.tensors)}
    tensors = tuple(
        NamedTensor(each.name, storage_of[each.tie], *form_of(each.leaf), each.pieces, each.replicated)
        for each in leaves
    )
    return PlannedFile(key, image, tensors)
