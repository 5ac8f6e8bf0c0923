"""Writer of the ranks of a conversion's result, in order: plan, files, index, vote."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from nxd_ckpt.commit.publication import Publication
from nxd_ckpt.conversion.file_passthrough import PassedFiles
from nxd_ckpt.conversion.inputs import open_input
from nxd_ckpt.conversion.job import Job
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import RankLine
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.output.image_writer import write_images
from nxd_ckpt.save.plan import SavePlan, plan_save
from nxd_ckpt.save.writing import FileWriter, write_index

Progress = Callable[[int], None]
"""A function that is called with the bytes that each step wrote; an error that it raises stops the writing."""


class RankWriter:
    """A writer of any rank of the result of ``job``, in bounded memory. Each process or thread has its own."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._storage = job.target.open(job.durable)
        self._input = open_input(job, self._storage)

    def survey(self, rank: int) -> int:
        """Return the bytes of the rank's new files. Writes nothing.

        Raises errors that make the conversion impossible: sizes that do not divide a tensor, parameters without a
        name, ...
        """
        with self._input.guarded():
            return sum(planned.image.nbytes for planned in self._plan(self._job.topology.at(rank)).files)

    def write(self, ranks: Sequence[int], publication: Publication, progress: Progress) -> list[Vote]:
        """Write the files and indexes of these ranks, durably, side by side; at most `TOGETHER` ranks.

        Raises TagReplaced if the input was replaced by another save.
        """
        with self._input.guarded():
            return self._write(ranks, publication, progress)

    def _write(self, ranks: Sequence[int], publication: Publication, progress: Progress) -> list[Vote]:
        started = time.monotonic()
        topologies = [self._job.topology.at(rank) for rank in ranks]
        plans = [self._plan(topology) for topology in topologies]
        with self._input.reader() as reader:
            sets = [plan.files for plan in plans]
            writers = write_images(reader, self._storage, publication.folder, sets, progress)
        votes = []
        for topology, plan, writer in zip(topologies, plans, writers, strict=True):
            passed = self._input.pass_files(topology, publication.folder, progress)
            vote = Vote(
                topology.rank,
                plan=plan.agreed(self._job.target.name, topology),
                replica=plan.replica,
                index=self._write_index(writer, plan, passed, topology, publication),
                replicated=writer.replicated_digest(),
                nbytes=writer.nbytes + passed.nbytes,
                seconds=round(time.monotonic() - started, 6),
            )
            votes.append(vote)
        return votes

    def _plan(self, topology: Topology) -> SavePlan:
        plan = plan_save(self._input.state(topology), topology)
        return replace(plan, parts=self._job.parts)

    def _write_index(
        self, writer: FileWriter, plan: SavePlan, passed: PassedFiles, topology: Topology, publication: Publication
    ) -> RankLine:
        written = writer.index(plan, topology.coordinates)
        index = replace(
            written,
            files={**written.files, **passed.files},
            tensors=written.tensors + passed.tensors,
            parameters={**written.parameters, **passed.parameters},
        )
        return RankLine(*write_index(self._storage, publication, names.index_file(topology.coordinates), index))
