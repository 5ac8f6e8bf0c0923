"""Two trainers in one output directory: the second is refused before it touches anything of the first."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.errors import DirectoryInUse, SaveFailed, UnsupportedState
from nxd_ckpt.integrations.trainer_tags import TrainerSaves, require_one_writer
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations import accelerate_run, transformers_run
from tests.support.ranks import on_ranks

TRAINERS = {
    "transformers": ("rng_state.pth", "trainer_state.json", "model.safetensors"),
    "accelerate": ("random_states_0.pkl", "scheduler.bin"),
}


def train(trainer: str, root: Path, then: Callable[[Path], object], first: int = 0) -> None:
    """Two saves of a real trainer; ``then`` is called in each, with the directory in which its files are written, and
    nothing is saved yet. accelerate numbers them from ``first`` on. Another rank finishes ``late.json`` last."""
    taken = TrainerSaves.save

    def disturbed(saves: TrainerSaves, agreement: Agreement, *objects: Any, **options: Any) -> None:
        staged = Path(saves._staged)
        (staged / ".unfinished").touch()
        finish = partial((staged / ".unfinished").rename, staged / "late.json")
        begun = Telling(agreement, finish, lambda: then(staged))
        taken(saves, begun, *objects, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerSaves, "save", disturbed)
        if trainer == "transformers":
            transformers_run.trained(root)
        else:
            job = accelerate_run.Job(root)
            job.accelerator.project_configuration.iteration = first
            job.run(2)


class Telling:
    """An agreement that calls one thing when all ranks are there, another once they have told which files they wrote.
    """

    def __init__(self, agreement: Any, met: Callable[[], object], told: Callable[[], object]) -> None:
        self._agreement, self._met, self._told = agreement, met, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agreement, name)

    def gather(self, value: Any) -> Any:
        gathered = self._agreement.gather(value)
        (self._met if value is None else self._told)()
        return gathered


def checkpoints(root: Path) -> list[Path]:
    return [path for path in [*root.glob("checkpoint*-*"), *root.glob("checkpoints/*")] if path.is_dir()]


@pytest.mark.parametrize(("trainer", "file"), [(trainer, file) for trainer in TRAINERS for file in TRAINERS[trainer]])
def test_a_file_of_a_trainer_that_vanishes_is_missed(trainer: str, file: str, tmp_path: Path) -> None:
    """By name, and nothing becomes visible."""
    with pytest.raises(SaveFailed, match=f"{file} was given to this save, and vanished"):
        train(trainer, tmp_path, lambda staged: (staged / file).unlink())
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_files_of_a_save_are_those_of_ranks_that_have_finished(trainer: str, tmp_path: Path) -> None:
    """Not the temporary ones of a rank that still writes when another has finished."""
    train(trainer, tmp_path, lambda staged: None)
    found = [path.name for place in checkpoints(tmp_path) for path in place.iterdir()]
    assert (0, 2) == (found.count(".unfinished"), found.count("late.json"))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_second_trainer_is_refused_while_the_first_one_saves(trainer: str, tmp_path: Path) -> None:
    """Before its first tag and later; what the first one saved is whole, and goes on."""
    root = tmp_path / "run"

    def second(staged: Path) -> None:
        before = sorted(staged.rglob("*"))
        pid = os.fork()
        if pid == 0:
            try:
                train(trainer, root, lambda staged: None, first=5)
            except DirectoryInUse:
                os._exit(7)
            finally:
                os._exit(1)
        assert 7 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert before == sorted(staged.rglob("*"))

    train(trainer, root, second)
    assert 2 == len(checkpoints(root))
    for directory in checkpoints(root):
        assert ((), ()) == ((found := verify_checkpoint(directory)).problems, found.guests)
    assert [] == [*tmp_path.rglob("*staging/*")]


def test_one_rank_alone_writes_for_all() -> None:
    """``save_on_each_node`` on several nodes is refused on every rank; on one node it has no effect."""
    for writers, refused in [({0, 2}, True), ({0}, False)]:

        def require(agreement: Agreement, of: set[int] = writers) -> None:
            require_one_writer(agreement, agreement.rank in of)

        outcomes = on_ranks(4, require)
        assert [refused] * 4 == [isinstance(outcome, UnsupportedState) for outcome in outcomes]
        assert refused == ("save_on_each_node=True writes a checkpoint on the disk of each" in str(outcomes[0]))
