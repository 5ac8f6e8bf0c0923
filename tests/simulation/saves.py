"""The saves during which power is lost at every system call: two ranks, two saves, in the background."""

from dataclasses import dataclass, replace

from tests.simulation.crashes import Recording
from tests.simulation.job import Save, run_to_end
from tests.simulation.stage import Stage

_HERE = ("one", "one")
"""The machine of both ranks."""


@dataclass(frozen=True)
class Saves:
    """``saves`` of a job. With ``killed_before`` all of it ends before the first system call whose name and path begin
    so, and the work is what follows: another job that saves ``then``. The ``guest`` is a file of somebody else."""

    name: str
    saves: tuple[Save, ...]
    swaps: bool = True
    killed_before: str | None = None
    then: tuple[Save, ...] = ()
    guest: str | None = None

    def prepare(self, recording: Recording) -> None:
        if self.guest is not None:
            disk, folder = recording.outside(), self.guest.rpartition("/")[0]
            disk.make_dir(folder)
            disk.write(self.guest, b"theirs")
            disk.sync_dir(folder)
        if self.killed_before is not None:
            recording.killed_before = self.killed_before
            run_to_end(recording.world, recording.launch("first", _HERE, list(self.saves)))

    def run(self, recording: Recording) -> None:
        run_id, saves = ("first", self.saves) if self.killed_before is None else ("second", self.then)
        run_to_end(recording.world, recording.launch(run_id, _HERE, list(saves)))

    def look_at(self, stage: Stage) -> None:
        """A process lists the tags, and then another job saves."""
        stage.look()
        stage.hold()
        self._keeps_guests(stage)
        stage.finish("next", ("rebooted", "rebooted"))
        stage.hold()
        self._keeps_guests(stage)
        stage.next_saves_work()

    def _keeps_guests(self, stage: Stage) -> None:
        if self.guest is not None:
            assert b"theirs" == stage.outside().read(self.guest)


def _in_background(*saves: Save) -> tuple[Save, ...]:
    return tuple(replace(save, is_async=True) for save in saves)


SAVES = (
    Saves("new tags", _in_background(Save("a", 1), Save("b", 2))),
    Saves("a tag is replaced", _in_background(Save("a", 1), Save("a", 2))),
    Saves("a tag is replaced by two renames", _in_background(Save("a", 1), Save("a", 2)), swaps=False),
    Saves("a tag has guests", _in_background(Save("a", 1), Save("a", 2)), guest="a/folder/config.json"),
    Saves(
        "a tag has guests, by two renames",
        _in_background(Save("a", 1), Save("a", 2)),
        swaps=False,
        guest="a/model/notes.md",
    ),
    Saves("retention removes a tag", _in_background(Save("a", 1, num_kept=1), Save("b", 2, num_kept=1))),
    Saves("xser", _in_background(Save("a", 1, use_xser=True), Save("a", 2, use_xser=True))),
    Saves(
        "an interrupted replacement is finished",
        (Save("a", 1), Save("a", 2)),
        swaps=False,
        killed_before="rename .nxd_ckpt/staging/first-2 -> a",
        then=(Save("b", 3),),
    ),
)
