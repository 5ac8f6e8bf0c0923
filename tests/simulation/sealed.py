"""Sealed directories, as trainers' plug-ins save them, on a simulated disk: by system calls, from first to last.

A trainer is one process. It writes two files of its own, which it does not sync, and a tag, and removes what is older
than it keeps. All of it is read again without the code that is tested.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.coordination import at_exit
from nxd_ckpt.coordination.agreement import SingleProcessAgreement
from nxd_ckpt.integrations.sealed import SealedDirectory
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from tests.simulation import oracle
from tests.simulation.crashes import Recording
from tests.simulation.job import TIMEOUT, Job, Save, run_to_end
from tests.simulation.stage import DiskStage

_TAG = "state"
_NAMES = r"checkpoint-(\d+)"


@dataclass(frozen=True)
class Trainer:
    """What it saves is ``checkpoint-N``, under the name of the save's tag, of which it keeps so many as that says."""

    name: str
    before: tuple[Save, ...]
    """What is there before anything happens."""
    first: tuple[Save, ...]
    second: Save
    """Of a job that comes meanwhile, or afterwards."""
    swaps: bool = True

    def job(self, stage: DiskStage, machine: str, saves: Sequence[Save]) -> tuple[Job, Callable[[], None]]:
        """One launch, and what its process does."""
        process = stage.world.start_process(machine)
        job = Job(stage.world, f"trainer-{machine}-{process.pid}", [process], has_group=False)
        stage.jobs.append(job)
        root = stage.storage(process).url

        def work() -> None:
            for save in saves:
                job.do(save, partial(_save, root, save, job.run_id))

        return job, work

    def hold(self, stage: DiskStage) -> None:
        """Raises AssertionError where a promise is broken."""
        found = visible(stage.outside())
        outcomes = [told for job in stage.jobs for told in job.outcomes]
        stage.promises.nothing_good_is_lost(found, stage.jobs)
        stage.promises.every_rank_tells_the_same(found, outcomes)
        begun = {save.value for job in stage.jobs for _, save in job.begun}
        assert set(found.values()) <= begun, f"{found} is of none of the saves {begun}"

    def finish(self, stage: DiskStage) -> None:
        """Another launch saves, and leaves nothing but what is visible. Raises AssertionError."""
        job, work = self.job(stage, "rebooted", [Save("checkpoint-9", 9, num_kept=2)])
        run_to_end(stage.world, [stage.world.spawn(job.processes[0], work)])
        assert ["saved"] == [told.word for told in job.outcomes], [told.error for told in job.outcomes]
        left = [entry.name for entry in stage.outside().list(".incomplete")]
        assert left == ["tags"], f"{left} is left where directories are written"
        self.hold(stage)

    def prepare(self, recording: Recording) -> None:
        self._alone(recording, self.before)

    def run(self, recording: Recording) -> None:
        self._alone(recording, self.first)

    def look_at(self, stage: DiskStage) -> None:
        self.hold(stage)
        self.finish(stage)

    def _alone(self, stage: DiskStage, saves: Sequence[Save]) -> None:
        job, work = self.job(stage, "one", saves)
        run_to_end(stage.world, [stage.world.spawn(job.processes[0], work)])


def _save(root: str, save: Save, run_id: str) -> None:
    directory = SealedDirectory(root, save.tag)
    saver = None
    try:
        directory.begin()
        for name in ("weights", "rng/state"):
            _write(os.path.join(directory.staged, name), _content(save.value, name))
        directory.record(required=("weights",))
        saver = Checkpointer(
            directory.tags, storage=LocalStorage(directory.tags), topology=Topology(), run_id=run_id, timeout=TIMEOUT,
            memory_cap=2**20,
        )
        with directory.publishing(is_rank_0=True) as saves:
            weight = torch.tensor([10.0 * save.value, 10.0 * save.value + 1])
            content = {"value": save.value}
            saves.append(saver.save(_TAG, {"weight": weight}, user_content=content, async_save=save.is_async))
        directory.wait(SingleProcessAgreement(), partial(directory.retire, _NAMES, _TAG, save.num_kept))
        saver.close()
    finally:
        at_exit.forget(directory)
        if saver is not None:
            at_exit.forget(saver)


def _write(path: str, data: bytes) -> None:
    """As a library does: nothing is synced."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        while data:
            data = data[os.pwrite(fd, data, os.fstat(fd).st_size) :]
    finally:
        os.close(fd)


def _content(value: int, name: str) -> bytes:
    return f"{name} of save {value}".encode() * 5


def visible(storage: Storage) -> dict[str, int]:
    """The number of the save that each visible directory holds. Raises AssertionError for one that is not whole."""
    return {entry.name: _value(storage, entry.name) for entry in storage.list() if entry.name[0] != "."}


def _value(storage: Storage, folder: str) -> int:
    assert storage.is_file(f"{folder}/digests.json"), f"{folder} has only {storage.list(folder)}"
    digests = json.loads(storage.read(f"{folder}/digests.json"))
    assert {"weights", "rng/state", f"{_TAG}/manifest.json"} == set(digests), f"{folder} lists {set(digests)}"
    for name, sealed in digests.items():
        data = storage.read(f"{folder}/{name}")
        assert sealed == [len(data), zlib.crc32(data)], f"{folder}/{name} is not what was sealed"
    value = oracle.value_of(storage, f"{folder}/{_TAG}")
    for name in ("weights", "rng/state"):
        found = storage.read(f"{folder}/{name}")
        assert found == _content(value, name), f"{folder}: the tag is of save {value}, {name} is {found!r}"
    return value


_OLD = Save("checkpoint-1", 1, num_kept=1)

TRAINERS = (
    Trainer("a new directory", (), (Save("checkpoint-1", 1, is_async=True),), Save("checkpoint-2", 2)),
    Trainer(
        "a directory takes the place of an older one", (_OLD,), (Save("checkpoint-2", 2, num_kept=1),),
        Save("checkpoint-3", 3),
    ),
    Trainer(
        "a directory is replaced", (_OLD,), (Save("checkpoint-1", 2, is_async=True),), Save("checkpoint-1", 3),
    ),
    Trainer(
        "a directory is replaced by two renames", (_OLD,), (Save("checkpoint-1", 2),), Save("checkpoint-1", 3),
        swaps=False,
    ),
)
