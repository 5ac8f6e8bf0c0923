"""What real runs save is examined without a finding."""

from pathlib import Path

import pytest

from nxd_ckpt import examine_checkpoint, open_checkpoint
from tests.examine.runs import OPTIMIZERS, SCHEDULERS, Run, ranks_of, save_ranks


def findings(directory: Path, before: str | None, after: str) -> list[str]:
    """What is found, in words."""
    earlier = None if before is None else open_checkpoint(directory, before)
    found = examine_checkpoint(open_checkpoint(directory, after), before=earlier)
    assert () == found.problems
    assert bool(found) or found.findings
    return [f"{one.severity} {one.kind} {one.what}: {one.message}" for one in found.findings]


SOME = ("adamw", "momentum", "rmsprop", "sgd")


@pytest.mark.parametrize(
    "optimizer", [pytest.param(name, marks=[] if name in SOME else pytest.mark.soak) for name in OPTIMIZERS]
)
def test_a_run_that_goes_on_is_well(tmp_path: Path, optimizer: str) -> None:
    """Whatever the optimizer: each tag by itself, and after the one before it, one and several steps apart."""
    run = Run(optimizer, list(SCHEDULERS)[len(optimizer) % len(SCHEDULERS)])
    for steps in (1, 5, 1):
        run.train(steps).save(tmp_path, str(run.step))
    assert [] == findings(tmp_path, None, "1")
    assert [] == findings(tmp_path, "1", "6")
    assert [] == findings(tmp_path, "6", "7")


def test_steps_that_are_settings_do_not_move(tmp_path: Path) -> None:
    """OneCycleLR holds the last step of each phase, 999, which is a multiple of the step of the earlier tag."""
    run = Run("sgd", "cycle")
    run.train(3).save(tmp_path, "3")
    for steps in (1, 2):
        run.train(steps).save(tmp_path, str(run.step))
        assert [] == findings(tmp_path, "3", str(run.step))


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_job_with_shards_is_well(tmp_path: Path, optimizer: str) -> None:
    """Weights in bf16 that are rounded master weights, cut over tp and dp; so is state that is not of their shape."""
    run = Run(optimizer).train(10)
    save_ranks(tmp_path, "10", ranks_of(run))
    save_ranks(tmp_path, "13", ranks_of(run.train(3)))
    assert [] == findings(tmp_path, None, "13")
    assert [] == findings(tmp_path, "10", "13")
