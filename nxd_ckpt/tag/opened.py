"""One complete tag that is open: the state that each rank saved in it, read and verified."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from nxd_ckpt.core import names
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.document import as_written
from nxd_ckpt.core.manifest import FileEntry, Manifest, Parts, RankIndex, load_index
from nxd_ckpt.core.name_patterns import OPTIMIZER
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    DigestMismatch,
    IncompatibleState,
    MalformedFile,
    PartLost,
    PartNotFound,
)
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.strides import stored_stride
from nxd_ckpt.formats.tensors import Assembly, TensorStub, map_tensors
from nxd_ckpt.layouts.files import MissingTensor, TreeCache
from nxd_ckpt.layouts.hugging_face_directory import HuggingFaceDirectory, WeightsLayout
from nxd_ckpt.layouts.nxd_tag import TagLayout
from nxd_ckpt.layouts.payload import checked_optimizer
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.identity import Identity
from nxd_ckpt.tag.mesh_trees import MeshTrees
from nxd_ckpt.tag.per_rank import OwnState, with_own
from nxd_ckpt.tag.range_reader import in_parallel
from nxd_ckpt.tag.verification import (
    Entries,
    WrittenFiles,
    changed_tensors,
    check_bytes,
    check_extents,
    refuse_missing,
    refuse_unfinished,
    stub_of,
    verify_tensors,
)

if TYPE_CHECKING:
    import torch

    from nxd_ckpt.tag.reading import Leaf, LeafReader


class OpenTag:
    """One complete tag: its layout, with the facts of its manifest if it has one.

    ``opens_all`` is for loads that are not verified beforehand: every file that trees refer to is opened, to show that
    it belongs to this save, even if its index describes it.

    ``keeps_small`` is for loads: small files are read once, whole.

    ``is_one_save`` if ``done`` names the manifest's attempt: the manifest is no other save's, and all that is read
    after it has its digests in an index.

    ``is_renamed`` if `live_name` changes names.
    """

    opens_all = False
    keeps_small = False
    is_one_save = False
    is_renamed = False
    own: tuple[int, Collection[str]] | None = None
    """A rank of a mesh job of this size that loads, and the names of its model."""
    rank: int | None = None
    """The rank that loads, if it is one of those that saved: its trees have what it alone had."""

    def __init__(
        self,
        storage: Storage,
        tag: str,
        layout: TagLayout,
        manifest: Manifest | None,
        identity: Identity | None = None,
    ) -> None:
        self.storage: Storage = storage
        self.tag: str = tag
        self.manifest: Manifest | None = manifest
        self.identity: Identity | None = identity
        self._layout = layout
        self._indexes: dict[Coordinates, RankIndex] = {}
        self._verified: set[str] = set()
        self._rank_states: dict[int, OwnState] = {}
        self.entries: Entries = layout.files.entries
        self._trees = TreeCache()
        self._changed: dict[tuple[str, int], DigestMismatch] = {}

    @property
    def where(self) -> str:
        """Name of the tag in errors."""
        return f"{self.storage.url}/{self.tag}" if self.tag else self.storage.url

    @contextmanager
    def guarded(self, *, verified: bool = False) -> Iterator[list[str]]:
        """Context for reading the tag; its list is for the files that are read, if they are known.

        Raises TagReplaced, in place of other errors, if it is no longer the opened save.

        ``verified`` means that every read is compared with digests that were known before. Otherwise bytes may come
        from another save without any error, so the identity is checked at the end in any case.
        """
        files: list[str] = []
        with nullcontext() if self.identity is None else self.identity.guarded():
            yield files
        if not verified:
            self.require_unchanged(*files)

    @property
    def refused(self) -> type[CheckpointError]:
        """Class of the error for content that live objects do not take.

        The digests of our tags show that it was saved so. In others it may be damage.
        """
        return MalformedFile if self.manifest is None else IncompatibleState

    @property
    def save(self) -> str | None:
        """Fingerprint of the save, for others who open it (see `require_save`); None without a tag."""
        return None if self.identity is None else self.identity.fingerprint

    @property
    def save_name(self) -> str:
        """Name of the save for other ranks, independent of its place; without a manifest of ours, its place."""
        return self.where if self.manifest is None else f"{self.manifest.tag!r} of attempt {self.manifest.attempt}"

    @property
    def copy(self) -> str | None:
        """Identity of this copy of the save; None without a tag."""
        return None if self.identity is None else self.identity.copy

    def require_unchanged(self, *read: str) -> None:
        """Raise TagReplaced unless it is still the save that was opened; of safetensors files look at those ``read``.
        """
        self._layout.files.require_unchanged(*read)
        if self.identity is not None:
            self.identity.require()

    def require_save(self, save: str | None) -> None:
        """Raise TagReplaced unless it is the save that another reader opened."""
        if self.identity is not None:
            self.identity.must_be(save)

    @property
    def weights(self) -> HuggingFaceDirectory | None:
        """The files of a model in Hugging Face's form."""
        return self._layout.directory if isinstance(self._layout, WeightsLayout) else None

    @cached_property
    def topology(self) -> Topology:
        return self._layout.topology()

    @cached_property
    def parts(self) -> Parts:
        return self._layout.parts() if self.manifest is None else self.manifest.parts

    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        """Return the model's state dict at these coordinates, a TensorStub (or MissingTensor) for each tensor.

        It is cached for a while, like `optimizer_tree`: nobody may change it.
        """
        key = "model", self.topology.writer_of(at)
        return self._trees.get(key, lambda: with_own(self._model_tree(at), self._own_state))

    def _model_tree(self, at: Coordinates) -> dict[str, Any]:
        if self.mesh is not None:
            return self.mesh.model()
        file = names.model_file(self.topology, at)
        self._verify_state(file, self.topology.writer_of(at))
        left_out = not self.parts.lower_precision_weights
        read = partial(self._layout.model_tree, at)
        tree = self._verified_tree(file, read, WrittenFiles(names.MODEL_DIR, self._shared_indexes(at)), left_out)
        if not self._layout.files.is_of_index(file):
            refuse_unfinished(self.where, tree)
        return tree

    @cached_property
    def mesh(self) -> MeshTrees | None:
        """Its trees, if a mesh job saved it."""
        if self.manifest is None or self.manifest.leaders is None:
            return None
        at = self.topology.coordinates_of
        return MeshTrees(
            self.where,
            self._layout.files,
            self.manifest.leaders,
            index=lambda rank: self.index(at(rank)),
            verify=lambda file, rank: self._verify(file, at(rank)),
            verify_size=self._expect,
            entries=self.entries,
            own=self.own,
        )

    def model_names(self) -> set[str]:
        """Return the names of the model on all pipeline stages."""
        if self.manifest is not None:
            return {*self.manifest.parameters}
        return {name for stage in range(self.topology.pp) for name in self.model_tree(Coordinates(stage))}

    def live_name(self, name: str) -> str:
        """Return the name under which a parameter of the tag's files appears in the trees."""
        return name

    def is_digested(self, leaf: Leaf) -> bool:
        """Return whether a load compares digests of ``leaf``."""
        return True

    def experts(self) -> set[str] | None:
        """Return the expert parameters, as marked in neuronx_distributed's xser files; None if files mark none."""
        if self.manifest is not None or self.topology.ep == 1 or not self.parts.model:
            return None
        files = (names.model_file(self.topology, Coordinates(stage)) for stage in range(self.topology.pp))
        marked_by_stage = [self._layout.files.marked_experts(file) for file in files]
        return None if None in marked_by_stage else {name for marked in marked_by_stage for name in marked or ()}

    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the optimizer's state dict at these coordinates, a TensorStub for each tensor.

        ``param_names``, in order of their index, are needed only by layouts that store names instead.
        """
        key = "optimizer", at, None if param_names is None else tuple(param_names)
        return self._trees.get(key, partial(self._optimizer_tree, at, param_names))

    def _optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None) -> dict[str, Any]:
        kind = self.parts.optimizer
        own = self._own_state.values.get(OPTIMIZER)
        if own is not None:
            tree = checked_optimizer(own.value, self.where)
            return tree if self.mesh is None or self.rank is None else self.mesh.with_shards(tree, self.rank)
        if self.mesh is not None:
            return self.mesh.optimizer()
        if kind == "zero1_dcp" and self.manifest is not None:
            return self._dcp_tree(at)
        is_cut = kind == "zero1"
        file = ""
        if kind in ("plain", "zero1", "zero1_full"):
            file = names.optimizer_file(self.topology, at, kind)
            self._verify_state(file, at if is_cut else self.topology.writer_of(at))
        read = partial(self._layout.optimizer_tree, at, param_names)
        indexes = map(self.index, [at]) if is_cut else self._shared_indexes(at)
        tree = self._verified_tree(file, read, WrittenFiles(names.OPTIMIZER_DIR, indexes))
        if not self._layout.files.is_of_index(file):
            refuse_missing(self.where, tree)
        return tree

    def _dcp_tree(self, at: Coordinates) -> dict[str, Any]:
        """Return the optimizer's state dict from our torch DCP directory.

        Shared state is in the first rank's files per stage.
        """
        first = self.topology.coordinates_of(0)
        leader = Coordinates(at.pp_rank)
        self._verify(names.DCP_METADATA, first)
        shared = dict.fromkeys((Coordinates(), leader))
        for place in shared:
            self._verify(names.dcp_file(self.topology.rank_of(place), 0), place)
        read = partial(self._layout.optimizer_tree, at, self.optimizer_names(at))
        writers = dict.fromkeys((at, *shared))
        written = WrittenFiles(names.OPTIMIZER_DIR, map(self.index, writers))
        return self._verified_tree(names.DCP_METADATA, read, written)

    def _verified_tree(
        self, file: str, read: Callable[[], dict[str, Any]], written: WrittenFiles, left_out: bool = False
    ) -> dict[str, Any]:
        """Return the tree of ``file`` that ``read`` returns, compared with its index unless that is what was read."""
        if self.manifest is None:
            return read()

        def hint(file: str) -> TensorStub | None:
            """Return the tensor of a file by the index; a file of another size than there is not the same."""
            tensor = None if self.opens_all else written.tensor(file)
            if tensor is None:
                return None
            stub, nbytes = tensor
            self._expect(file, nbytes)
            return stub

        with self._layout.files.with_hint(hint):
            tree = read()
        if not self._layout.files.is_of_index(file):
            verify_tensors(self.where, tree, written, left_out=left_out)
            self.entries |= written.entries
        return tree

    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        """Return the parameter behind each index of the optimizer's state, or None if the tag does not record it."""
        if self.manifest is None:
            return self._layout.optimizer_names(at)
        if OPTIMIZER in self._own_state.values:
            return self._own_state.parameters or None
        if self.mesh is not None:
            return self.mesh.optimizer_names()
        recorded = self.index(replace(self.topology.writer_of(at), tp_rank=0)).optimizer_names
        return None if recorded is None else list(recorded)

    def scheduler(self) -> Any:
        with self._parsing(names.SCHEDULER, self.topology.coordinates_of(0)):
            return self._layout.scheduler()

    def user_content(self) -> Any:
        """Return the user content, or None if none was saved."""
        if not self.parts.user_content:
            return None
        with self._parsing(names.USER_CONTENT, self.topology.coordinates_of(0)):
            return self._layout.user_content()

    @cached_property
    def dcp_names(self) -> DcpNames | None:
        """Torch DCP's names of the tag's content, if DCP wrote it."""
        files = self._layout.files
        if self.mesh is None or not files.has(names.DCP_NAMES):
            return None
        self._verify(names.DCP_NAMES, self.topology.coordinates_of(0))
        return DcpNames.from_json(files.storage.read(files.key(names.DCP_NAMES)), files.where(names.DCP_NAMES))

    def rank_content(self, rank: int) -> Any:
        """Return the content that the global ``rank`` saved for itself. Raises PartNotFound if there is none."""
        with self._parsing(names.rank_content_file(rank), self.topology.coordinates_of(rank)):
            return self._layout.files.object(names.rank_content_file(rank))

    @property
    def per_rank(self) -> Sequence[str]:
        """Names of what ranks saved for themselves."""
        return () if self.manifest is None else self.manifest.per_rank

    @property
    def of_groups(self) -> Sequence[str]:
        """Names under which groups of a mesh job saved different things; none if a rank takes its own group's."""
        return () if self.mesh is None else self.mesh.differing

    def rank_state(self, rank: int) -> OwnState:
        """Return what the global ``rank`` saved for itself, with TensorStubs for tensors."""
        if rank not in self._rank_states:  # the trees have the same tensors
            at = self.topology.coordinates_of(rank)
            index = self.index(at)
            files = [file for file in index.files if file.startswith(f"{names.RANK_STATE_DIR}/")]
            state = OwnState()
            for file in files:
                with self._parsing(file, at):
                    state.add(self._layout.files.tree(file), f"{self.where}/{file}")
            self._rank_states[rank] = state
            self.entries |= {(entry.file, entry.offset): entry for entry in index.tensors if entry.file in files}
        return self._rank_states[rank]

    @property
    def _own_state(self) -> OwnState:
        """Values that the rank that loads saved for itself, by the names in the tag."""
        has_own = self.manifest is not None and bool(self.manifest.per_rank)
        return OwnState() if self.rank is None or not has_own else OpenTag.rank_state(self, self.rank)

    def index(self, at: Coordinates) -> RankIndex:
        """Return the index of the rank at these coordinates, verified against the manifest. Only for our tags."""
        if at not in self._indexes:
            self._indexes[at] = self._load_index(at)
        return self._indexes[at]

    def _load_index(self, at: Coordinates) -> RankIndex:
        if self.manifest is None:
            raise PartNotFound(f"{self.where} has no index: it was not written by nxd_ckpt")
        line = self.manifest.ranks[self.topology.rank_of(at)]
        key = f"{self.tag}/{names.index_file(at)}"
        where = f"{self.storage.url}/{key}"
        try:
            data = self.storage.read(key)
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{where} is missing: the tag lost files since it was saved") from error
        check_bytes(data, line, where)
        with as_written():
            return load_index(data, where)

    def read(self, leaf: Leaf) -> torch.Tensor:
        """Read one tensor to the CPU. Raises DigestMismatch if the bytes are not those that were written."""
        return self._layout.files.read(leaf) if isinstance(leaf, TensorStub) else self.put_together(leaf, "")

    def read_all(self, tree: Any) -> Any:
        """Return a copy of a tree with its tensors read, and their strides. Raises PartNotFound for one without a file.
        """
        from nxd_ckpt.formats.memory import strided

        def read(leaf: Leaf | MissingTensor) -> torch.Tensor:
            if isinstance(leaf, MissingTensor):
                raise PartNotFound(f"{self.where}: no file holds tensor {leaf.name!r} ({leaf.file} is missing)")
            return strided(self.read(leaf), stored_stride(leaf))

        return map_tensors(tree, read, (TensorStub, Assembly, MissingTensor))

    def put_together(self, leaf: Leaf, name: str) -> torch.Tensor:
        """Read one tensor to the CPU, comparing its parts with the indexes too; ``name`` names it in errors.

        Raises DigestMismatch if the bytes are not those that were written.
        """
        with self.reader() as reader:
            return reader.read(leaf, name)

    def reader(self) -> LeafReader:
        """Return a reader that verifies the leaves of the trees that have been made so far."""
        from nxd_ckpt.tag.reading import LeafReader

        return LeafReader(self._layout.files, self.entries)

    def _shared_indexes(self, at: Coordinates) -> Iterator[RankIndex]:
        """Yield the indexes of the ranks that share the writing of the state at these coordinates."""
        # With xser, ep rank 0's hold what is not an expert's.
        for place in dict.fromkeys((self.topology.writer_of(at), replace(at, dp_rank=0))):
            ranks = self.topology.replicas(place, expert=self.topology.ep > 1)
            first, *others = map(self.topology.coordinates_of, ranks)
            # Only the first is cached, because it is used again: with xser there may be one for each dp rank.
            yield self.index(first)
            together = 1
            while others:  # from a store ever more at once, but never twice as many as are needed
                yield from in_parallel(self.storage, others[:together], self._load_index)
                others = others[together:]
                together = 2 * together

    def _verify_state(self, file: str, writer: Coordinates) -> None:
        self._verify(file, writer)
        if self.parts.use_xser:
            self._verify(names.info_file(file), writer)

    def _verify(self, file: str, writer: Coordinates) -> None:
        """Check a file that is about to be read against its writer's index: its size, and small ones in full."""
        if self.manifest is None or file in self._verified:
            return
        index = self.index(writer)
        entry = index.files.get(file)
        if entry is None:
            saved_files = first_of(sorted(index.files))
            raise PartNotFound(f"{self.where}: no file {file!r} was saved; its rank saved {saved_files or 'nothing'}")
        is_compared = entry.nbytes <= _SMALL and self._is_compared(file, entry, index)
        if not is_compared:
            self._expect(file, entry.nbytes)
        self._record_tree(file, entry.nbytes, index, is_compared)
        self._verified.add(file)

    def _is_compared(self, file: str, entry: FileEntry, index: RankIndex) -> bool:
        """Compare a small file with its digest.

        Return False if it differs in tensors, which are compared as they are read, and its index has the rest.
        """
        data = self._small(file, entry.nbytes)
        try:
            check_bytes(data, entry, f"{self.where}/{file}")
        except DigestMismatch as error:
            tensors = [entry for entry in index.tensors if entry.file == file]
            changed = changed_tensors(tensors, lambda start, nbytes: crc32.crc32(data[start : start + nbytes]))
            mismatch = DigestMismatch(f"{error}{': ' if changed else ''}{first_of(sorted(changed))}")
            if not changed or file not in index.trees:
                raise mismatch from error
            self._changed |= {(file, entry.offset): mismatch for entry in tensors if entry.name in changed}
            return False
        if self._keeps:
            self._layout.files.keep(file, data)
        self._layout.files.record(file, entry.nbytes)
        return True

    def refuse_changed(self, leaves: Iterable[Leaf]) -> None:
        """Raise DigestMismatch if one of the leaves is made of a tensor that is known to be damaged."""
        for leaf in leaves if self._changed else ():
            for stub in (fragment.stub for fragment in Assembly.of(leaf).fragments):
                if (stub.file, stub.storage.offset) in self._changed:
                    raise self._changed[stub.file, stub.storage.offset]

    def _record_tree(self, file: str, nbytes: int, index: RankIndex, is_compared: bool) -> None:
        """Take the content of a file from its writer's index, if that has it: the digests there verify its tensors."""
        if file not in index.trees:
            return
        entries = [entry for entry in index.tensors if entry.file == file]
        check_extents(entries, nbytes, f"{self.where}/{file}")
        stubs = [stub_of(entry) for entry in entries]
        if self.opens_all and not is_compared and not self._layout.files.has_digests(file, nbytes, stubs):
            return  # which of them differ, its pickle tells
        self._layout.files.record_tree(file, index.trees[file], stubs)
        self.entries |= {(file, entry.offset): entry for entry in entries}

    def _parsing(self, file: str, writer: Coordinates) -> AbstractContextManager[None]:
        """Verify a file as `_verify` does; return the context in which it is parsed."""
        self._verify(file, writer)
        is_compared = self.manifest is not None and self.index(writer).files[file].nbytes <= _SMALL
        return as_written() if is_compared else nullcontext()

    @property
    def _keeps(self) -> bool:
        """True if small files are read once: in a store each read costs requests."""
        return self.keeps_small or not self.storage.renames

    def _small(self, file: str, nbytes: int) -> memoryview:
        if self.storage.renames:
            self._verify_size(file, nbytes)
            if self._keeps:
                return self._layout.files.whole(file, nbytes)
        with self._must_exist(file):
            return memoryview(self.storage.read(f"{self.tag}/{file}"))

    def _expect(self, file: str, nbytes: int) -> None:
        """Check a file's size, unless that costs a request to a store: a file of another size fails its digest anyway.
        """
        if self.storage.renames:
            self._verify_size(file, nbytes)
        self._layout.files.record(file, nbytes)

    def _verify_size(self, file: str, expected: int) -> None:
        with self._must_exist(file):
            nbytes = self.storage.size(f"{self.tag}/{file}")
        if nbytes != expected:
            raise MalformedFile(f"{self.where}/{file} has {nbytes} bytes, expected {expected}: truncated or replaced")

    @contextmanager
    def _must_exist(self, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise PartLost(f"{self.where}/{file} is missing: the tag lost files since it was saved") from error


_SMALL = 4 * 2**20
