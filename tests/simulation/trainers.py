"""Tags with a trainer's files, as plug-ins save them, on a simulated disk: by system calls, from first to last.

A trainer is one process. It writes two files of its own, which it does not sync, and saves a tag that is given them,
and removes what is older than it keeps. All of it is read again without the code that is tested.
"""

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nxd_ckpt import Topology
from nxd_ckpt.coordination import at_exit
from nxd_ckpt.coordination.agreement import SingleProcessAgreement
from nxd_ckpt.integrations.trainer_tags import TrainerSaves
from nxd_ckpt.storage.base import Storage
from tests.simulation import oracle
from tests.simulation.crashes import Recording
from tests.simulation.job import TIMEOUT, Job, Save, run_to_end
from tests.simulation.stage import DiskStage

_FILES = ("weights", "rng/state")
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
        left = stage.outside().list(".nxd_ckpt/staging")
        assert not left, f"{left} is left where tags are written"
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
    options = {"topology": Topology(), "run_id": run_id, "timeout": TIMEOUT, "memory_cap": 2**20}
    agreement, saves = SingleProcessAgreement(), None
    try:
        saves = TrainerSaves(agreement, root, options, _NAMES, (), hidden=False)
        staged = saves.begin(agreement, save.tag)
        for name in _FILES:
            _write(os.path.join(staged, name), _content(save.value, name))
        weight = torch.tensor([10.0 * save.value, 10.0 * save.value + 1])
        content = {"value": save.value}
        saves.save(agreement, {"weight": weight}, None, None, content, limit=save.num_kept, async_save=save.is_async)
        saves.close()
    finally:
        if saves is not None:
            at_exit.forget(saves._checkpointer)


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
    """The number of the save that each visible tag holds. Raises AssertionError for one that is not whole."""
    return {entry.name: _value(storage, entry.name) for entry in storage.list() if entry.name[0] != "."}


def _value(storage: Storage, tag: str) -> int:
    assert storage.is_file(f"{tag}/done"), f"{tag} has only {storage.list(tag)}"
    given = json.loads(storage.read(f"{tag}/manifest.json"))["guests"]
    assert {*_FILES} == {*given}, f"{tag} was given {set(given)}"
    value = oracle.value_of(storage, tag)
    for name, digest in given.items():
        data = storage.read(f"{tag}/{name}")
        assert digest == [len(data), zlib.crc32(data)], f"{tag}/{name} is not what was saved"
        assert data == _content(value, name), f"{tag}: the tag is of save {value}, {name} is {data!r}"
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
