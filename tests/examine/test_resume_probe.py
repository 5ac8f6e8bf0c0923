"""ResumeProbe: silent after a right load, on any sizes; what was not loaded, or changed after it, is named."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import ResumeProbe, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.core.findings import Finding
from tests.examine.runs import Run
from tests.reshard.ranks import fresh, save_job
from tests.reshard.transformer import layout_of, weights_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with its losses."""
    found = tmp_path_factory.mktemp("run")
    run = Run().train(3)
    losses = {"losses": [2.0, 1.9, 2.1, 2.0]}
    save_checkpoint(found, "t", run.model, run.optimizer, run.scheduler, losses)
    return found


def _resumed(directory: Path) -> tuple[Run, dict[str, Any]]:
    run = Run(seed=1)
    return run, load_checkpoint(directory, "t", run.model, run.optimizer, run.scheduler)


def _found(directory: Path, run: Run) -> list[tuple[str, str]]:
    found = ResumeProbe().check(open_checkpoint(directory), run.model, run.optimizer, run.scheduler)
    assert bool(found) == (not found.findings)
    return [(one.kind, one.what) for one in found.findings]


def test_a_right_load_is_proved(directory: Path) -> None:
    """Every bit of model, optimizer and scheduler is compared, and nothing is found."""
    run, _ = _resumed(directory)
    found = ResumeProbe().check(open_checkpoint(directory), run.model, run.optimizer, run.scheduler)
    assert ((), True) == (found.findings, found.nbytes > 4000)


def test_what_is_not_what_was_saved_is_named(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bit of a weight, moments that were not loaded, a rate that was set otherwise, a scheduler that began anew; all
    of them in a run that was not loaded at all."""
    run, _ = _resumed(directory)
    weight = run.model.state_dict()["0.weight"].view(torch.int32)
    weight[3, 5] ^= 1
    assert [("weights", "model/0.weight")] == _found(directory, run)
    assert "model/0.weight" in caplog.text
    weight[3, 5] ^= 1

    run.optimizer.param_groups[0]["lr"] *= 2
    assert [("groups", "optim/param_groups.0.lr")] == _found(directory, run)

    fresh = Run()
    load_checkpoint(directory, "t", fresh.model)
    kinds = {kind for kind, _ in _found(directory, fresh)}
    assert {"moments", "scheduler", "groups"} == kinds
    assert {"weights", "moments", "scheduler", "groups"} == {kind for kind, _ in _found(directory, Run(seed=1))}


def test_what_a_load_left_out_is_not_compared(directory: Path) -> None:
    run = Run(seed=1)
    options: dict[str, Any] = {"ignore_keys": ["model/4.*", "optim/*"]}
    load_checkpoint(directory, "t", run.model, run.optimizer, **options)
    assert ResumeProbe().check(open_checkpoint(directory), run.model, run.optimizer, **options)


@pytest.mark.parametrize("sizes", ["dp2tp2", "dp4", "tp2pp2"])
def test_on_other_sizes_the_bytes_are_compared(tmp_path: Path, sizes: str) -> None:
    """ZeRO-1 shards of dp=2 tp=2, on every rank of the same job or another; then one moment is off by a bit."""
    weights = weights_of()
    save_job(tmp_path, weights, layout_of("dp2tp2", weights))
    tag, layout = open_checkpoint(tmp_path, "step_1"), layout_of(sizes, weights)
    for at in layout.ranks:
        live = fresh(weights, layout, at)
        options: dict[str, Any] = {"topology": at, "partitions": layout.partitions}
        load_checkpoint(tmp_path, "step_1", live.model, live.optimizer, **options)
        assert () == ResumeProbe().check(tag, live.model, live.optimizer, **options).findings

        state = next(iter(live.optimizer.base_optimizer.state.values()))
        state["exp_avg"].view(torch.int32)[0] ^= 1
        (found,) = ResumeProbe().check(tag, live.model, live.optimizer, **options).findings
        assert ("moments", True) == (found.kind, found.what.endswith("/exp_avg"))


def test_a_number_that_is_a_tensor_now_is_the_same(tmp_path: Path) -> None:
    """Steps that were counted in Python, and a rate that is a tensor; another rate is found."""
    run = Run().train(1)
    for state in run.optimizer.state.values():
        state["step"] = int(state["step"])
    save_checkpoint(tmp_path, "t", run.model, run.optimizer, run.scheduler)
    live, _ = _resumed(tmp_path)
    group = live.optimizer.param_groups[0]
    group["lr"] = torch.tensor(group["lr"])
    for state in live.optimizer.state.values():
        state["step"] = torch.tensor(float(state["step"]))
    assert [] == _found(tmp_path, live)
    group["lr"] *= 2
    assert [("groups", "optim/param_groups.0.lr")] == _found(tmp_path, live)


def test_master_weights_that_are_not_told_are_not_missed(tmp_path: Path) -> None:
    """Those that an optimizer with save_master_weights=False loads."""
    weights = weights_of()
    layout = layout_of("dp2tp2", weights)
    save_job(tmp_path, weights, layout)
    at = layout.ranks[0]
    live = fresh(weights, layout_of("dp2tp2", weights, master_weights=False), at)
    options: dict[str, Any] = {"topology": at, "partitions": layout.partitions}
    load_checkpoint(tmp_path, "step_1", live.model, live.optimizer, **options)
    tag = open_checkpoint(tmp_path, "step_1")
    assert () == ResumeProbe().check(tag, live.model, live.optimizer, **options).findings


def test_the_first_loss_is_compared_with_those_before(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That of a run that goes on is not remarkable; that of a fresh model is; later ones are the run's own affair."""
    for loss, expected in ((1.95, None), (6.0, "doubt"), (float("nan"), "problem")):
        run, content = _resumed(directory)
        probe = ResumeProbe()
        assert probe.check(open_checkpoint(directory), run.model, losses=content["losses"])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = probe.saw(loss)
        assert expected == (None if found is None else found.severity)
        assert (expected is not None) == ("the first loss after the load" in caplog.text)
        assert probe.saw(100.0) is None
        assert [2.0, 1.9, 2.1, 2.0] == probe.losses[:4]
        assert found is None or isinstance(found, Finding)
