"""Conversions during which power is lost at every system call: each replaces an output that an earlier one made.

They run in one process, and do one file after the other: their threads do not interleave.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from nxd_ckpt import convert, copy_checkpoint
from nxd_ckpt.output.locations import location_of, settle
from nxd_ckpt.storage.base import Storage
from tests.simulation.crashes import Recording
from tests.simulation.job import TIMEOUT, Job, Save, run_to_end
from tests.simulation.stage import DiskStage
from tests.simulation.world import AtOnce, Disk, DiskStorage

OUTPUT = "out"
_INPUTS = (Save("a", 1), Save("b", 2), Save("c", 3))
"""Of the conversion before, of the one during which power is lost, and of the one after."""

def _reshard(source: str, output: str) -> None:
    convert(source, output, to="tag", tp=1, overwrite=True, timeout=TIMEOUT)


def _unshard(source: str, output: str) -> None:
    convert(source, output, to="files", overwrite=True)


def _copy(source: str, output: str) -> None:
    copy_checkpoint(source, output, overwrite=True, timeout=TIMEOUT)


@dataclass(frozen=True)
class Conversion:
    """``convert`` makes the second of the outputs from its input. With ``killed_before`` a first try ends before the
    system call whose name and path begin so."""

    name: str
    convert: Callable[[str, str], None]
    swaps: bool = True
    killed_before: str | None = None

    def prepare(self, recording: Recording) -> None:
        run_to_end(recording.world, recording.launch("first", ("one", "one"), list(_INPUTS)))
        self._make(recording, _INPUTS[0], "one")
        recording.disk.sync_all()
        if self.killed_before is not None:
            recording.killed_before = self.killed_before
            self._make(recording, _INPUTS[1], "one")
            assert recording.killed_before is None, f"there was no {self.killed_before}"

    def run(self, recording: Recording) -> None:
        self._make(recording, _INPUTS[1], "one")

    def look_at(self, stage: DiskStage) -> None:
        """A process opens the output, and then it is made once more."""
        stage.look()
        opener = stage.world.start_process("rebooted")
        place = location_of(_url(OUTPUT), "output", None)
        run_to_end(stage.world, [stage.world.spawn(opener, partial(settle, place, stage.storage(opener)))])
        stage.hold()
        self._make(stage, _INPUTS[2], "rebooted")
        stage.hold()
        stage.next_saves_work()

    def _make(self, stage: DiskStage, source: Save, machine: str) -> None:
        """Convert; what comes of it counts as that of a save under the output's name."""
        process = stage.world.start_process(machine)
        job = Job(stage.world, "conversion", [process], has_group=False)
        stage.jobs.append(job)
        save = Save(OUTPUT, source.value)

        convert = partial(self.convert, _url(source.tag), _url(OUTPUT))
        with _tools_on(stage):
            run_to_end(stage.world, [stage.world.spawn(process, partial(job.do, save, convert))])


CONVERSIONS = (
    Conversion("cp", _copy),
    Conversion("cp, by two renames", _copy, swaps=False),
    Conversion("cp that goes on", _copy, killed_before=f"fsync .nxd_ckpt/copies/{OUTPUT}/model"),
    Conversion("reshard", _reshard),
    Conversion("reshard, by two renames", _reshard, swaps=False),
    Conversion("unshard", _unshard),
    Conversion("unshard, by two renames", _unshard, swaps=False),
)


def _url(name: str) -> str:
    return f"simulated://disk/{name}"


@contextmanager
def _tools_on(stage: DiskStage) -> Iterator[None]:
    """Within, one conversion reads and writes the stage's disk, as the process whose task is running."""

    def open_storage(place: str, *_: Any) -> Storage:
        if place.rstrip("/") != _url("").rstrip("/"):  # a tag, which is looked into for tags
            return DiskStorage(Disk(lambda: 0.0))
        assert stage.world.current is not None
        return stage.storage(stage.world.current.process)

    def sync(storage: DiskStorage, key: str) -> None:
        storage.sync_file(key)

    name = SimpleNamespace(hex=f"{len(stage.jobs):012x}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_ckpt.output.locations.open_storage", open_storage)
        if stage.calls is None:
            patch.setattr("nxd_ckpt.output.cp_files.sync", sync)
        patch.setattr("nxd_ckpt.saving.save_attempt.versions", dict)
        patch.setattr("nxd_ckpt.commit.session.uuid", SimpleNamespace(uuid4=lambda: name))
        patch.setattr("concurrent.futures._base.threading", threading)  # nobody waits for what is done at once
        for module in ("conversion.cp", "conversion.tag_writer", "output.image_writer", "storage.transfer"):
            patch.setattr(f"nxd_ckpt.{module}.ThreadPoolExecutor", AtOnce)
        yield
