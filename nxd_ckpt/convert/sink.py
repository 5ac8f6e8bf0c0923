"""Writing the ranks of a conversion's result, one after the other: plan, files, index, vote."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from nxd_ckpt.convert.carrying import Carried
from nxd_ckpt.convert.filling import Filling
from nxd_ckpt.convert.inputs import open_input
from nxd_ckpt.convert.job import Job
from nxd_ckpt.core.manifest import RankLine
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.layout import names
from nxd_ckpt.runtime.save.plan import SavePlan, plan_save
from nxd_ckpt.runtime.save.publication import Publication
from nxd_ckpt.runtime.save.writing import WRITERS, FileWriter, write_index

Progress = Callable[[int], None]
"""Called with the number of bytes that each step wrote; what it raises stops the writing."""


class Sink:
    """Writes any rank of the result of ``job``, in bounded memory. One to a process or thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._storage = job.target.open(job.durable)
        self._input = open_input(job, self._storage)
        self._filling = Filling(self._input)

    def survey(self, rank: int) -> int:
        """The bytes that the rank's files will have, but for those taken over. Writes nothing.

        Raises what makes the conversion impossible: sizes that do not divide a tensor, parameters without a name, ...
        """
        return sum(planned.image.nbytes for planned in self._plan(self._job.topology.at(rank)).files)

    def write(self, rank: int, publication: Publication, progress: Progress) -> Vote:
        """Write the rank's files and index, durably."""
        started = time.monotonic()
        topology, folder = self._job.topology.at(rank), publication.folder
        plan = self._plan(topology)
        writer = self._write_files(plan, folder, progress)
        carried = self._input.bring(topology, folder, progress)
        return Vote(
            rank,
            plan=plan.agreed(self._job.target.name, topology),
            replica=plan.replica,
            index=self._write_index(writer, plan, carried, topology, publication),
            replicated=writer.replicated_digest(),
            nbytes=writer.nbytes + carried.nbytes,
            seconds=round(time.monotonic() - started, 6),
        )

    def _plan(self, topology: Topology) -> SavePlan:
        plan = plan_save(self._input.state(topology), topology)
        return replace(plan, parts=self._job.parts)

    def _write_files(self, plan: SavePlan, folder: str, progress: Progress) -> FileWriter:
        reported = 0

        def report(nbytes: int) -> None:
            nonlocal reported
            progress(nbytes - reported)
            reported = nbytes

        with ThreadPoolExecutor(WRITERS, "nxd_ckpt-writer") as threads:
            writer = FileWriter(self._storage, folder, plan.files, report, threads)
            try:
                for wave, views in self._filling.waves(plan.files):
                    writer.write(wave, views)
                writer.finish()
            except BaseException:
                writer.abort()
                raise
        return writer

    def _write_index(
        self, writer: FileWriter, plan: SavePlan, carried: Carried, topology: Topology, publication: Publication
    ) -> RankLine:
        written = writer.index(plan, topology.coordinates)
        index = replace(
            written,
            files={**written.files, **carried.files},
            tensors=written.tensors + carried.tensors,
            parameters={**written.parameters, **carried.parameters},
        )
        return RankLine(*write_index(self._storage, publication, names.index_file(topology.coordinates), index))
