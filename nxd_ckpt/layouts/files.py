"""Files of one tag: listing them, and reading them as trees whose tensors are still on disk.

xser files hold references in place of tensors; `TagFiles.joined` resolves them, so that callers see one
kind of tree. Files are listed once: a tag does not change while it is being read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nxd_ckpt.core import names
from nxd_ckpt.core.limits import check_sizes, shown
from nxd_ckpt.core.manifest import TensorEntry
from nxd_ckpt.core.suggestions import closest
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, MalformedFile, PartLost, PartNotFound, TagReplaced
from nxd_ckpt.formats import torch_zip
from nxd_ckpt.formats.recorded_tree import tree_of
from nxd_ckpt.formats.safetensors import read_header
from nxd_ckpt.formats.strides import Stride, note, noted, with_stride
from nxd_ckpt.formats.tensors import (
    Assembly,
    Path,
    TensorReference,
    TensorStub,
    UnfinishedReference,
    dtype_name,
    iter_tensors,
    map_tensors,
    torch_class,
)
from nxd_ckpt.formats.unpickle import Leaf
from nxd_ckpt.formats.zip_directory import has_digests
from nxd_ckpt.storage.base import MemoryReader, Reader, Storage, pread_of
from nxd_ckpt.storage.local import LocalStorage

if TYPE_CHECKING:
    import torch


Hint = Callable[[str], TensorStub | None]
"""Returns the tensor of an xser file; None if the file must be opened to find out."""


@dataclass(frozen=True)
class MissingTensor:
    """A leaf whose tensor was referred to but never saved (NxD's ``avoid_saving_lower_precision_weights``).

    ``name`` is its path in the tree, joined by dots; ``dtype`` and ``shape`` are None without an info file.
    """

    name: str
    file: str
    dtype: str | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class UnfinishedTensor(MissingTensor):
    """A leaf whose reference NxD wrote but cannot read back in any load; see `UnfinishedReference`."""


_KEPT_NBYTES = 16 * 2**20

_LONGEST_END = 16 * 2**20
"""Bytes after a file's last tensor that are looked through for its directory."""


class TagFiles:
    """Files below ``tag`` ("" for the storage's root itself). Keys are relative to the tag.

    ``trust_pickle=True`` also unpickles files that hold more than plain data: only for checkpoints whose
    author is trusted as much as the code that reads them.
    """

    def __init__(self, storage: Storage, tag: str, *, trust_pickle: bool = False) -> None:
        self.storage = storage
        self.tag = tag
        self.trust_pickle = trust_pickle
        self._listings: dict[str, Mapping[str, bool]] = {}
        self._hint: Hint = lambda file: None
        self._kept: dict[str, memoryview] = {}
        self._kept_nbytes = 0
        self._recorded: dict[str, int] = {}
        self._trees: dict[str, tuple[Any, Sequence[TensorStub]]] = {}
        self._referring: set[str] = set()
        self._signs: dict[str, tuple[int, float] | None] = {}
        self.entries: dict[tuple[str, int], TensorEntry] = {}
        """Tensors with digests that are known so far, by file and offset of their first byte in it."""

    def record(self, file: str, nbytes: int) -> None:
        """Take from an index that a file is there, with its size: it is neither listed nor asked for its size."""
        self._recorded[file] = nbytes

    def record_tree(self, file: str, element: Any, tensors: Sequence[TensorStub]) -> None:
        """Take from an index what a file holds, and its tensors in this order: it is not parsed."""
        self._trees[file] = element, tensors

    def is_of_index(self, file: str) -> bool:
        """Return whether the tree of this file, which was read, consists of what its index says, tensors too."""
        return file in self._trees and file not in self._referring

    @contextmanager
    def with_hint(self, hint: Hint) -> Iterator[None]:
        """Within this context, files are not opened for tensors that ``hint`` has."""
        before = self._hint
        self._hint = hint
        try:
            yield
        finally:
            self._hint = before

    def whole(self, file: str, nbytes: int) -> memoryview:
        """Read the ``nbytes`` of a small file. Raises PartNotFound, MalformedFile."""
        data = memoryview(bytearray(nbytes))
        self.read_ranges(file, [(0, data)])
        return data

    def keep(self, file: str, data: memoryview) -> None:
        """Keep the bytes of a file, all of them verified: it is not read again. Beyond 16 MiB none are kept."""
        if self._kept_nbytes + len(data) <= _KEPT_NBYTES:
            self._kept[file] = data
            self._kept_nbytes += len(data)

    def drop_kept(self) -> None:
        """Release the memory of kept files, which are read again if need be."""
        self._kept.clear()
        self._kept_nbytes = 0

    def kept(self, file: str) -> memoryview | None:
        """Return the bytes of a file that is kept."""
        return self._kept.get(file)

    def open(self, file: str) -> Reader:
        """Open a file for many reads, in memory if it is kept."""
        kept = self._kept.get(file)
        if kept is not None:
            return MemoryReader(kept, self.where(file))
        if file in self._recorded:
            return self.storage.open_unseen(self.key(file))
        return self.storage.open(self.key(file))

    def key(self, file: str) -> str:
        """Return the storage's key of a file of this tag."""
        return f"{self.tag}/{file}" if self.tag and file else self.tag or file

    def where(self, file: str) -> str:
        """Return the name of a file of this tag for errors."""
        return f"{self.storage.url}/{self.key(file)}"

    @property
    def directory(self) -> str:
        """Name of the tag's directory for errors."""
        return f"{self.storage.url}/{self.tag}" if self.tag else self.storage.url

    def names(self, directory: str = "") -> Mapping[str, bool]:
        """Return everything directly below ``directory``: name -> whether it is a directory."""
        if directory not in self._listings:
            self._listings[directory] = dict(self.storage.list(self.key(directory)))
        return self._listings[directory]

    def has(self, file: str) -> bool:
        directory, _, name = file.rpartition("/")
        return file in self._recorded or self.names(directory).get(name) is False

    def object(self, file: str) -> Any:
        """Read all of a small file, tensors included. Raises the errors of `tree` and `read`."""
        return self._parse(file, 0, None, self._read_strided)

    def tree(self, file: str, start: int = 0, nbytes: int | None = None, *, dtensors: bool = False) -> Any:
        """Read a ``torch.save`` file, with a TensorStub or (xser) a TensorReference for each tensor.

        ``start`` and ``nbytes`` select one inside a larger file, as in torch DCP's ``.distcp`` files.
        ``dtensors`` reads a DTensor as a `LocalTensor`, which is refused otherwise.

        Raises:
            PartNotFound: no such file.
            MalformedFile: truncated, or not such a file.
            UnsafePickle: more than plain data, without ``trust_pickle``.
        """
        return self._parse(file, start, nbytes, lambda stub: stub, dtensors)

    def safetensors(self, file: str) -> Mapping[str, TensorStub]:
        """Return the tensors of a safetensors file by name, from its header, and add their digests to ``entries``.

        Raises PartNotFound, MalformedFile, DigestMismatch.
        """
        key = self.key(file)
        sign = self._sign(file)
        with self.named(file), closing(self.storage.open(key)) as reader:
            header = read_header(pread_of(reader), self.storage.size(key), file)
        self._signs.setdefault(file, sign)
        for name, crcs in header.blocks.items():
            stub = header.tensors[name]
            entry = TensorEntry(name, file, stub.offset, stub.nbytes, stub.dtype, stub.shape, crcs)
            if crcs:  # an empty tensor lies where the next one does
                self.entries[file, stub.offset] = entry
        return header.tensors

    def require_unchanged(self, *read: str) -> None:
        """Raise TagReplaced if a safetensors file on a disk changed since its header was read: most have no digests.

        Only the files ``read`` are looked at, if there are any.
        """
        for file in read or self._signs:
            if file in self._signs and self._sign(file) != self._signs[file]:
                raise TagReplaced(
                    f"{self.where(file)} changed while it was read (its size or time); read it when nobody writes to it"
                )

    def _sign(self, file: str) -> tuple[int, float] | None:
        key = self.key(file)
        if not (self.storage.renames and self.storage.is_file(key)):
            return None
        return self.storage.size(key), self.storage.time(key)

    def read(self, stub: TensorStub) -> torch.Tensor:
        """Read one tensor to the CPU, and compare it with the CRC-32 in its file, if it has one.

        Raises:
            DigestMismatch: the bytes are not those that were written.
        """
        with self.named(stub.file):
            return self._read(stub)

    def read_ranges(self, file: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memory with the file's bytes from its offset on."""
        with self.named(file), closing(self.open(file)) as reader:
            reader.read_ranges(ranges)

    def has_digests(self, file: str, nbytes: int, tensors: Sequence[TensorStub]) -> bool:
        """Return whether the directory at the end of a file has the digests of these tensors: it is of their save."""
        spans = {stub.storage.offset: stub.storage for stub in tensors}
        begin = max((span.offset + span.nbytes for span in spans.values()), default=0)
        if nbytes - begin > _LONGEST_END:
            return False
        end = bytearray(nbytes - begin)
        self.read_ranges(file, [(begin, memoryview(end))])
        return has_digests(end, [spans[offset] for offset in sorted(spans)])

    def joined(self, file: str, shared: str | None = None) -> Any:
        """Read a tree with every xser reference resolved; a file may hold tensors inline as well.

        A tensor without a file becomes a `MissingTensor`. ``shared`` is the ``ep_rank_00`` file with the state that
        expert-parallel ranks have in common: a tensor that is not an expert's and not beside ``file`` is looked up
        there, by the same path in the tree (tids count for each file by itself). Raises the errors of `tree`.
        """
        tree = self.tree(file)
        if self.is_of_index(file):
            return tree
        paths = {reference.tid: path for path, reference in iter_tensors(tree, TensorReference)}
        if not paths:
            return tree
        info = self._info(file)
        elsewhere = self._shared_files(shared) if shared not in (None, file) else {}
        followed: dict[int, TensorStub | MissingTensor] = {}

        def follow(reference: TensorReference) -> TensorStub | MissingTensor:
            """Resolve a reference; each file is read once, however often a damaged one refers to it."""
            if reference.tid not in followed:
                followed[reference.tid] = first(reference)
            return followed[reference.tid]

        def first(reference: TensorReference) -> TensorStub | MissingTensor:
            path = paths[reference.tid]
            about = info.get(reference.tid, reference.about)
            tensor_file = names.tensor_file(file, reference.tid)
            if not self.has(tensor_file) and about.get("expert_model_parallel") is False:
                tensor_file = elsewhere.get(path, tensor_file)
            dtype = dtype_name(about["dtype"]) if "dtype" in about else None
            shape = tuple(about["shape"]) if "shape" in about else None
            if isinstance(reference, UnfinishedReference):
                return UnfinishedTensor(".".join(map(str, path)), tensor_file, dtype, shape)
            if not self.has(tensor_file):
                return MissingTensor(".".join(map(str, path)), tensor_file, dtype, shape)
            stub = self._hint(tensor_file) or self.tree(tensor_file)
            if not isinstance(stub, TensorStub):
                raise MalformedFile(f"{self.key(tensor_file)}: expected one tensor, found {type(stub).__name__}")
            if (dtype, shape) not in ((None, None), (stub.dtype, stub.shape)):
                raise MalformedFile(
                    f"{self.key(tensor_file)}: {names.info_file(file) if info else file} says {dtype} {shape}, "
                    f"found {stub.dtype} {stub.shape}: the tag mixes files of two saves"
                )
            return with_stride(stub, noted(reference.noted))

        return map_tensors(tree, follow, TensorReference)

    def marked_experts(self, file: str) -> set[str] | None:
        """Return the top-level names whose tensors are marked as experts'; None if the files mark nothing.

        Raises PartNotFound, MalformedFile, UnsafePickle.
        """
        marks = {tid: about.get("expert_model_parallel") for tid, about in self._info(file).items()}
        if None in marks.values() or not marks:
            return None
        return {
            str(path[0])
            for path, reference in iter_tensors(self.tree(file), TensorReference)
            if marks.get(reference.tid)
        }

    def _parse(self, file: str, start: int, nbytes: int | None, leaf: Leaf, dtensors: bool = False) -> Any:
        if file in self._trees:
            return self._as_recorded(file, leaf)

        def absolute(stub: TensorStub) -> Any:
            span = stub.storage._replace(offset=start + stub.storage.offset)
            return leaf(replace(stub, offset=start + stub.offset, storage=span))

        with self.named(file), closing(self.open(file)) as reader:
            if nbytes is None:
                recorded = self._recorded.get(file)
                nbytes = self.storage.size(self.key(file)) if recorded is None else recorded
            return torch_zip.read_tree(
                pread_of(reader, start),
                nbytes,
                file,
                trust_pickle=self.trust_pickle,
                leaf=absolute if start else leaf,
                dtensors=dtensors,
            )

    def _as_recorded(self, file: str, leaf: Leaf) -> Any:
        element, tensors = self._trees[file]
        left = iter(tensors)

        def next_leaf(stride: Stride | None, tid: int | None) -> Any:
            if tid is not None:
                self._referring.add(file)
                return TensorReference(tid, None if stride is None else note(stride))
            stub = next(left, None)
            if stub is None:
                raise MalformedFile(f"its recorded tree has more than the {len(tensors)} tensors of its index")
            return leaf(with_stride(stub, stride))

        with self.named(file):
            tree = tree_of(element, next_leaf)
            unused = next(left, None)
            if unused is not None:
                raise MalformedFile(f"its recorded tree has fewer than the {len(tensors)} tensors of its index")
            return tree

    def _read(self, stub: TensorStub) -> torch.Tensor:
        from nxd_ckpt.formats.stored_tensors import read_tensor

        return read_tensor(partial(self.storage.read_into, self.key(stub.file)), stub)

    def _read_strided(self, stub: TensorStub) -> torch.Tensor:
        from nxd_ckpt.formats.stored_tensors import read_strided

        return read_strided(partial(self.storage.read_into, self.key(stub.file)), stub)

    def _info(self, file: str) -> dict[int, dict[str, Any]]:
        """Return dtype and shape by tid; empty for NxD 0.6 and the converter's output, which have no info file."""
        info_file = names.info_file(file)
        info = self.tree(info_file) if self.has(info_file) else {}
        if not isinstance(info, dict) or not all(isinstance(about, dict) for about in info.values()):
            raise MalformedFile(f"{self.key(info_file)}: expected dtype and shape for each tensor id")
        for about in info.values():
            check_sizes(about.get("shape", ()), self.key(info_file))
            if "dtype" in about and not isinstance(about["dtype"], torch_class("dtype")):
                raise MalformedFile(f"{self.key(info_file)}: expected a dtype, found {shown(about['dtype'])}")
        return info

    def _shared_files(self, shared: str) -> dict[Path, str]:
        """Return the tensor file of every path in the tree of ``shared``."""
        if not self.has(shared):
            return {}
        references = iter_tensors(self.tree(shared), TensorReference)
        return {path: names.tensor_file(shared, reference.tid) for path, reference in references}

    @contextmanager
    def named(self, file: str) -> Iterator[None]:
        """Add storage and tag to errors of the formats and of reading ``file``."""
        where = self.directory
        try:
            yield
        except (FileNotFoundError, IsADirectoryError) as error:
            if file in self._recorded:
                raise PartLost(f"{where}/{file} is missing: the tag lost files since it was saved") from error
            raise PartNotFound(f"{where}: no file {file!r}") from error
        except EOFError as error:
            raise MalformedFile(f"{where}: {file} is shorter than its contents need: {error}") from error
        except CheckpointError as error:
            raise type(error)(f"{where}: {error}") from error


def require_directory(storage: Storage, key: str = "", what: str = "checkpoint directory") -> None:
    """Raise CheckpointNotFound unless ``key``, described by ``what``, is a directory."""
    if storage.is_dir(key):
        return
    where = f"{storage.url.rstrip('/')}/{key}" if key else storage.url
    obstacle = f"{where} is a file" if storage.is_file(key) else None
    if isinstance(storage, LocalStorage):
        obstacle = storage.in_the_way(key)
    if obstacle is not None:
        raise CheckpointNotFound(f"{obstacle}, expected a directory: the {what}")
    raise CheckpointNotFound(f"{what} {where} does not exist{meant_instead(storage, key)}")


def meant_instead(storage: Storage, key: str) -> str:
    """Return a question that names what may be meant by a directory that does not exist; "" if there is nothing.

    On a file system that is one of its name a level below, as if a tag is named without its directory. Otherwise it is
    the most similar neighbour.
    """
    looks_below = not key
    if not key:
        if not isinstance(storage, LocalStorage):
            return ""
        storage, key = LocalStorage(storage.root.parent), storage.root.name
    above, _, name = key.rpartition("/")
    try:
        beside = [entry.name for entry in storage.list(above) if entry.is_dir]
        below = (f"{folder}/{name}" for folder in beside if looks_below and storage.is_dir(f"{folder}/{name}"))
        close = next(below, None) or closest(name, beside)
    except (OSError, MalformedFile):
        return ""
    return "" if close is None else f"; did you mean {'/'.join(filter(None, (storage.url.rstrip('/'), above, close)))}?"


Tree = dict[str, Any]

_CACHED = 2**16
"""Maximum number of tensors in all cached trees: about 40 MB."""


class TreeCache:
    """The trees that were used last, of `_CACHED` tensors together, or a single larger one.

    A view that uses many trees for each of its tensors holds them itself: they may be more than the cache keeps.
    """

    def __init__(self) -> None:
        self._count = 0
        self._trees: dict[Hashable, tuple[dict[str, Any], int]] = {}  # in order of last use

    def get(self, key: Hashable, read: Callable[[], Tree]) -> Tree:
        """Return the tree of that key; ``read`` makes it if it is not cached. It is shared: nobody may change it."""
        cached = self._trees.pop(key, None)
        if cached is None:
            tree = read()
            cached = tree, sum(1 for _ in iter_tensors(tree, (TensorStub, Assembly, MissingTensor)))
            self._count += cached[1]
        self._trees[key] = cached
        while self._count > _CACHED and len(self._trees) > 1:
            self._count -= self._trees.pop(next(iter(self._trees)))[1]
        return cached[0]
