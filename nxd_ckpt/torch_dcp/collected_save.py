"""A save in which others say what each rank writes, and collect for rank 0 what it has to know of that: torch DCP.

No rank votes: whoever collects raises on all ranks what failed on one. The tag is that of a mesh job (core.mesh_record)
whose tensors list the ranks that wrote parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.commit.commit import Commit, clean_up, commit
from nxd_ckpt.commit.publication import publication_of
from nxd_ckpt.commit.session import Session
from nxd_ckpt.coordination import intents
from nxd_ckpt.coordination.environment import versions
from nxd_ckpt.coordination.paths import staging_dir
from nxd_ckpt.core import names
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import ParameterSpec, Parts, RankIndex, RankLine
from nxd_ckpt.core.mesh_groups import MeshGroup
from nxd_ckpt.core.mesh_record import MeshRecord, WholeTensor
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.core.retention import Metrics, Rule
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.formats.tensors import Assembly, itemsize
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.live import torch_xla
from nxd_ckpt.save.background import Helpers
from nxd_ckpt.save.plan import SavePlan
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.save.staging import Stager
from nxd_ckpt.save.waves import plan_waves
from nxd_ckpt.save.writing import WRITERS, FileWriter, write_index, write_small
from nxd_ckpt.storage.arena import Arena

_STAGED = 128 * 2**20
"""Bytes that are staged at a time. The caller waits for the whole save, so more would gain nothing."""


@dataclass(frozen=True)
class Chunk:
    """A ``box`` of the tensor ``name`` ("model/embed.weight"), of ``dtype``; ``read`` gives it when it is staged."""

    name: str
    dtype: str
    box: Box
    read: Callable[[], Any]

    @property
    def nbytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)


@dataclass(frozen=True)
class Share:
    """What a rank tells rank 0 of its part."""

    rank: int
    line: RankLine | None  # None of rank 0, whose index comes last
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Contents:
    """All that rank 0 has to know to complete the tag: what its small files hold, by key, ``objects`` in torch files
    and ``documents`` as they are; whole tensors, in the order of the trees' references; what else its index says."""

    objects: Mapping[str, Any]
    documents: Mapping[str, bytes]
    tensors: Sequence[WholeTensor]
    parts: Parts
    parameters: dict[str, ParameterSpec]
    optimizer_names: tuple[str, ...] | None


class CollectedSave:
    """One attempt, as each rank makes it: :meth:`begin` on rank 0, :meth:`write` on all, then on rank 0
    :meth:`complete` or :meth:`discard`. It is over with :meth:`close`, which gives the directory back."""

    def __init__(
        self,
        session: Session,
        tag: str,
        overwrite: bool | None,
        rules: Sequence[Rule] | None,
        metrics: Metrics,
    ) -> None:
        session.counter += 1
        self._session, self._rules, self._metrics = session, rules, metrics
        self._publication = publication_of(session, session.counter, tag, overwrite)
        self._index = RankIndex(session.topology.coordinates, {}, ())
        self._started = effects.monotonic()
        self._thread = effects.current_thread()

    @property
    def is_left(self) -> bool:
        """Whether nobody will end it: the thread that would has ended, or has begun something else."""
        return self._thread is effects.current_thread() or not self._thread.is_alive()

    def begin(self) -> None:
        """Rank 0: make room, before any rank writes."""
        self._publication.begin(self._session)

    def write(self, chunks: Sequence[Chunk]) -> Share:
        """Write what is this rank's, durably."""
        started, rank = effects.monotonic(), self._session.topology.rank
        files = [
            _shard_file(names.shard_file(directory, rank), own)
            for directory, prefix in ((names.MODEL_DIR, "model/"), (names.OPTIMIZER_DIR, "optim/"))
            if (own := [chunk for chunk in chunks if chunk.name.startswith(prefix)])
        ]
        self._session.storage.make_dir(self._publication.folder)
        self._index = self._written(files)
        nbytes = sum(entry.nbytes for entry in self._index.files.values())
        line = None if rank == 0 else self._write_index()
        return Share(rank, line, nbytes, effects.monotonic() - started)

    def complete(self, contents: Contents, shares: Sequence[Share]) -> None:
        """Rank 0: write what is left, and make the tag visible; then apply retention.

        Raises what commit.commit raises, with nothing visible.
        """
        session = self._session
        files = [PlannedFile(key, image_of(value)) for key, value in contents.objects.items()]
        objects = self._written(files).files
        documents = {
            key: write_small(session.storage, self._publication, key, data) for key, data in contents.documents.items()
        }
        self._index = replace(
            self._index,
            files={**self._index.files, **objects, **documents},
            parameters=contents.parameters,
            optimizer_names=contents.optimizer_names,
            mesh=MeshRecord((), tuple(contents.tensors)),
        )
        line = self._write_index()
        votes = [
            Vote(share.rank, plan={}, replica="", index=share.line or line, nbytes=share.nbytes, seconds=share.seconds)
            for share in sorted(shares, key=lambda share: share.rank)
        ]
        request = Commit(
            self._publication,
            contents.parts,
            self._rules,
            {"stage_seconds": round(effects.monotonic() - self._started, 6)},
            versions(),
            contents.parameters,
            [MeshGroup(tuple(range(session.topology.world_size)))],
            self._metrics,
        )
        commit(session, session.topology, votes, request)
        clean_up(session, session.counter)
        self.discard()

    def discard(self) -> None:
        """Rank 0: remove what is left of the attempt. A tag that is visible stays."""
        with suppress(OSError, CheckpointError):  # else the next job sweeps it
            session = self._session
            intents.clear(session.storage, staging_dir(self._publication.attempt), session.confirm)

    def close(self) -> None:
        self._session.close()

    def _written(self, files: Sequence[PlannedFile]) -> RankIndex:
        """Stage and write the files, a wave after the other; what was written."""
        storage, folder = self._session.storage, self._publication.folder
        threads = Helpers(WRITERS, "nxd_ckpt-helper")
        stager = Stager(Arena(_STAGED))
        writer = FileWriter(storage, folder, files, lambda nbytes: None, threads)
        try:
            torch_xla.sync()
            for wave in plan_waves(files, stager.arena.cap):
                writer.write(wave, stager.stage(files, wave))
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        finally:
            threads.shutdown()
            stager.release()
        return writer.index(SavePlan((), (), Parts(), ""), self._session.topology.coordinates)

    def _write_index(self) -> RankLine:
        at = self._session.topology.coordinates
        return RankLine(*write_index(self._session.storage, self._publication, names.index_file(at), self._index))


class _Deferred(Sequence[Any]):
    """Tensors that are made when they are staged: a planner may allocate memory for each."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        return (
            [chunk.read() for chunk in self._chunks[index]] if isinstance(index, slice) else self._chunks[index].read()
        )


def _shard_file(key: str, chunks: Sequence[Chunk]) -> PlannedFile:
    tree: dict[str, Assembly] = {}
    tensors = []
    for storage, chunk in enumerate(chunks):
        name = chunk.name.partition("/")[2]
        label = name if name not in tree else f"{name}#{storage}"  # of several parts of a tensor
        tree[label] = Assembly(chunk.dtype, chunk.box.size, ())
        pieces = (Piece(Box.whole(chunk.box.size), chunk.box),)
        tensors.append(NamedTensor(chunk.name, storage, chunk.dtype, chunk.box.size, pieces))
    return PlannedFile(key, image_of(tree).holding(_Deferred(chunks)), tuple(tensors))
