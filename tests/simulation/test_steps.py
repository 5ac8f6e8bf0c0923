"""Tags with trainers' files, and drains: kills, errors and other jobs at every step, and states that crashes leave."""

import pytest

from tests.simulation.crashes import Recording, enumerated
from tests.simulation.drains import DRAINS
from tests.simulation.steps import EVENTS, Scene, all_steps
from tests.simulation.trainers import TRAINERS, Trainer, visible
from tests.simulation.world import DiskStorage

SCENES: list[Scene] = [*TRAINERS, *(drains for drains in DRAINS if drains.killed_before is None)]
EVERY = 41
"""`make test` lets something happen at one in so many steps; `make soak` at each."""
MOMENTS, MOST = 23, 6


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
@pytest.mark.one_in(3)
def test_the_promises_hold_whatever_happens_at_a_step(scene: Scene, event: str) -> None:
    """A failure names the scene, what happened, and at which system call."""
    assert EVERY < all_steps(scene, event, EVERY)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_the_promises_hold_whatever_happens_at_any_step(scene: Scene, event: str) -> None:
    assert 0 < all_steps(scene, event)


@pytest.mark.parametrize("trainer", TRAINERS[1:3], ids=lambda trainer: trainer.name)
def test_a_tag_with_files_is_whole_in_states_that_a_crash_leaves(trainer: Trainer) -> None:
    """At some of the moments at which power may be lost while it is saved, or an older one removed."""
    count = enumerated(trainer, every=MOMENTS, most=MOST, local=True)
    assert [] == count.failures
    assert 1 < count.looked_at


def test_a_removed_directory_comes_back_from_no_power_cut_without_its_files() -> None:
    """Its name is gone for good before the first file is: at each moment all lasts but the rename that took it away."""
    recording = Recording(TRAINERS[1], 0, local=True)
    recording.go()
    for moment in recording.moments:
        disk = moment.disk
        disk.crash(lambda change: not change.what.startswith("rename checkpoint-1"), lambda file: bytes(file.data))
        visible(DiskStorage(disk))


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_a_tag_with_files_is_whole_in_every_state_that_a_crash_leaves(trainer: Trainer) -> None:
    assert [] == enumerated(trainer, local=True).failures
