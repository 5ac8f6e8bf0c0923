"""A load proves what it did: live objects are captured again and compared with what it meant to put there."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, close_checkpointers, finalize_checkpoint, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import ResumeDiffers
from nxd_ckpt.loading import overwriting
from tests.examine.runs import Run
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import live, local_state, write_model
from tests.live.doubles import ShardedOptimizer
from tests.tag.equality import difference


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    run = Run().train(3)
    save_checkpoint(place, "t", run.model, run.optimizer, run.scheduler)
    return place


def _load(directory: Path, run: Run, **options: Any) -> None:
    load_checkpoint(directory, "t", run.model, run.optimizer, run.scheduler, **options)


def _zero(model: torch.nn.Module, keys: Any) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").zero_()


def test_what_a_hook_changed_is_told(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names a tensor that a hook of the user has zeroed; prove=True makes it an error; False is silent."""
    run = Run(seed=1)
    run.model.register_load_state_dict_post_hook(_zero)
    _load(directory, run)
    assert ("model/0.weight" in caplog.text, "prove=True" in caplog.text) == (True, True)
    with pytest.raises(ResumeDiffers, match=r"model/0\.weight: the live tensor is not the one that was saved"):
        _load(directory, run, prove=True)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        _load(directory, run, prove=False)
    assert caplog.text == ""


class _Forgetful(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "last_epoch": 0})


def test_a_scheduler_that_forgets_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A class of the user's whose load_state_dict loses the epoch: a warning that names expected and found value."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = _Forgetful(optimizer, 2)
    optimizer.step()
    scheduler.step()
    save_checkpoint(tmp_path, "t", model, optimizer, scheduler)
    load_checkpoint(tmp_path, "t", model, optimizer, scheduler)
    assert "scheduler/last_epoch: expected 1, as it was saved, found 0" in caplog.text


class _Rounding(torch.optim.SGD):
    """Loads as torch does, which casts state to the dtype of its parameter."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)


def test_a_number_that_was_rounded_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A float32 number in the state of a bfloat16 parameter: a warning that names what was saved, and what is live."""
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = _Rounding([parameter])
    optimizer.state[parameter]["scale"] = torch.tensor(1.001953125)
    save_checkpoint(tmp_path, "t", {"w": parameter}, optimizer)
    load_checkpoint(tmp_path, "t", {"w": parameter}, optimizer)
    assert "scale: expected 1.001953125, as it was saved, found 1.0" in caplog.text


def _skips(fill_model: Callable[..., None]) -> Callable[..., None]:
    def without_the_first(model: Any, names: list[str], *rest: Any) -> None:
        fill_model(model, names[1:], *rest)

    return without_the_first


def test_a_fault_of_the_load_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that our own code does not fill, in place of a fault that nobody knows yet."""
    monkeypatch.setattr("nxd_ckpt.loading.load_attempt.fill_model", _skips(overwriting.fill_model))
    with pytest.raises(ResumeDiffers, match=r"model/0\.weight: .* Do not train on from this state"):
        _load(directory, Run(seed=1))


def test_a_hugging_face_directory_is_proved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its files have no digests: what was put together counts. A hook's change is a warning; prove=True refuses it."""
    job = Job(Model())
    model = live(local_state(job, write_model(tmp_path, job.model), Topology()))
    load_checkpoint(tmp_path, model=model, prove=True)
    name = next(iter(model.state_dict()))

    def zero(module: torch.nn.Module, keys: Any) -> None:
        with torch.no_grad():
            module.get_parameter(name).zero_()

    model.register_load_state_dict_post_hook(zero)
    load_checkpoint(tmp_path, model=model)
    assert f"model/{name}" in caplog.text
    with pytest.raises(ResumeDiffers, match="the live tensor is not the one that was saved"):
        load_checkpoint(tmp_path, model=model, prove=True)


def _sharded(rank: int, seed: int, masters: bool = True) -> tuple[torch.nn.Module, ShardedOptimizer]:
    """A model of an odd number of rows, with half of its ZeRO-1 state, after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 7)
    groups = [[0, 1]] if masters else [[0]]
    optimizer = ShardedOptimizer(list(model.parameters()), rank, groups, lr=0.1, save_master_weights=masters)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_padded_shards_that_were_saved_as_dicts_are_in_place(tmp_path: Path) -> None:
    """Their names are not in the dicts; the zeros at the end of the last shard belong nowhere."""
    saved = [_sharded(rank, 0) for rank in range(2)]
    for rank, (model, optimizer) in enumerate(saved):
        at: Any = {"topology": Topology(dp=2, rank=rank), "run_id": "both", "async_save": True}
        save_checkpoint(tmp_path, "t", model.state_dict(), optimizer.state_dict(), **at)
    finalize_checkpoint()
    close_checkpointers()
    for rank, (_, optimizer) in enumerate(saved):
        live = _sharded(rank, 1)
        load_checkpoint(tmp_path, "t", *live, topology=Topology(dp=2, rank=rank))
        assert difference(optimizer.state_dict(), live[1].state_dict()) is None


def test_shards_cut_from_weights_that_are_not_loaded_yet_are_an_error(tmp_path: Path) -> None:
    """Without master weights: the next step would put the old weights over those of a later load of the model."""
    saved = _sharded(0, 0, masters=False)
    save_checkpoint(tmp_path, "t", *saved)
    model, optimizer = _sharded(0, 1, masters=False)
    with pytest.raises(ResumeDiffers, match=r"model/weight, .*load the model first.*: the live tensor is not"):
        load_checkpoint(tmp_path, "t", None, optimizer)
    load_checkpoint(tmp_path, "t", model)
    load_checkpoint(tmp_path, "t", None, optimizer)
    assert difference(saved[1].state_dict(), optimizer.state_dict()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_of_weights_that_differ_on_purpose_are_no_error(tmp_path: Path, dtype: torch.dtype) -> None:
    """Left out by name, or of another dtype, they cannot be undone by a later load of the model."""
    saved = _sharded(0, 0, masters=False)
    save_checkpoint(tmp_path, "t", *saved)
    model, optimizer = _sharded(0, 1, masters=False)
    left_out: Any = {"ignore_keys": ["model/*"]} if model.to(dtype).weight.dtype == torch.float32 else {}
    load_checkpoint(tmp_path, "t", None, optimizer, **left_out)
    assert difference(saved[1].state_dict()["base_state"], optimizer.state_dict()["base_state"]) is None


def test_shards_of_weights_without_digests_are_no_error(tmp_path: Path) -> None:
    """NxD's files have a digest for each record of a zip file: none for a view of a part of one."""
    model, optimizer = _sharded(0, 0, masters=False)
    flat = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    views = {"weight": flat[:42].view(7, 6), "bias": flat[42:]}
    for part, state in (("model", views), ("optim", optimizer.state_dict())):
        (tmp_path / "t" / part).mkdir(parents=True)
        torch.save(state, tmp_path / "t" / part / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    for marker in ("checkpoint", "done"):
        (tmp_path / "t" / marker).write_text("1")
    live = _sharded(0, 1, masters=False)[1]
    load_checkpoint(tmp_path, "t", None, live, param_names=[["weight", "bias"]])
    assert difference(optimizer.state_dict()["base_state"], live.state_dict()["base_state"]) is None
