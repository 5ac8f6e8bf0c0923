"""The four functions, called as neuronx-distributed's callers call them, with the types that they pass."""

import gc
import logging
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import nxd_ckpt
from nxd_ckpt.errors import (
    CheckpointNotFound,
    InvalidTag,
    KeyMismatch,
    MalformedFile,
    OptimizerMismatch,
    SaveFailed,
    ShapeMismatch,
)
from tests.tag.equality import difference

pytestmark = pytest.mark.usefixtures("nxd")


@pytest.fixture
def library() -> Any:
    """The library with our functions, as a script has it under the name ``nxd``."""
    nxd_ckpt.install()
    return import_module("neuronx_distributed")


class Anything:
    """Neither plain data nor picklable as such."""


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def states(objects: tuple[Any, ...]) -> list[Any]:
    return [dict(one.state_dict()) for one in objects]


FLAGS: list[Callable[[bool], Any]] = [int, np.bool_, np.int64, torch.tensor, lambda value: value or None]


@pytest.mark.parametrize("flag", FLAGS, ids=["int", "numpy.bool", "numpy.int64", "tensor", "None"])
def test_flags_are_what_they_mean(tmp_path: Path, library: Any, flag: Callable[[bool], Any]):
    """argparse's ints, NumPy's booleans, tensors and None: a run that is saved with them loads, and continues."""
    saved, fresh = trained(), trained(1)
    for use_xser in (True, False):
        library.save_checkpoint(
            str(tmp_path), f"step_{int(use_xser)}", *saved, {"step": 3}, use_xser=flag(use_xser),
            num_kept_ckpts=-1, async_save=flag(True), zero1_optimizer=flag(False), use_zero1_dcp=flag(False),
            avoid_saving_lower_precision_weights=flag(False),
        )  # fmt: skip
        library.finalize_checkpoint()
        assert use_xser is any((tmp_path / f"step_{int(use_xser)}" / "model").glob("*.tensors"))
        assert {"step": 3} == library.load_checkpoint(str(tmp_path), None, *fresh, strict=flag(True))
        assert None is difference(states(saved), states(fresh))


def test_what_was_saved_is_freed(tmp_path: Path, library: Any):
    """A directory for each save, of tensors made for it: none is held on to."""
    made = []
    for step in range(2):
        state = {"weight": torch.zeros(3)}
        made.append(weakref.ref(state["weight"]))
        library.save_checkpoint(str(tmp_path / f"checkpoint-{step}"), "shards", state, async_save=True)
        library.finalize_checkpoint()
    del state
    deadline = time.monotonic() + 60
    while any(one() is not None for one in made) and time.monotonic() < deadline:
        gc.collect()  # a thread that has just written them may be about to let go
        time.sleep(0.1)
    assert [None, None] == [one() for one in made]


def test_workers_do_not_count_with_xser(tmp_path: Path, library: Any):
    library.save_checkpoint(str(tmp_path), "shards", torch.nn.Linear(2, 2), num_workers=-1, use_xser=True)
    assert library.has_checkpoint(str(tmp_path))


def test_a_tag_with_a_slash_lies_where_nxd_puts_it(tmp_path: Path, library: Any):
    """And is loaded from there; one that leads out of the directory is refused."""
    saved, fresh = trained(), trained(1)
    for step in (1, 2, 3):
        library.save_checkpoint(str(tmp_path), f"exp/run_step_{step}", *saved, None, 8, True, 2)
    library.load_checkpoint(str(tmp_path), "exp/run_step_3/", *fresh)
    assert difference(states(saved), states(fresh)) is None
    there = [path.name for path in sorted((tmp_path / "exp").iterdir()) if path.name[0] != "."]
    assert ["run_step_2", "run_step_3"] == there
    for tag in ("../out", "exp/", "/out"):
        with pytest.raises(InvalidTag):
            library.save_checkpoint(str(tmp_path / "in"), tag, *saved)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ending", ["", "/"], ids=["DIR", "DIR/"])
def test_the_empty_tag_is_the_directory_itself(tmp_path: Path, library: Any, ending: str):
    """A path that ends with a slash, split into directory and name, gives an empty tag: the directory is meant."""
    saved, fresh = trained(), trained(1)
    library.save_checkpoint(str(tmp_path), "pretrained_weight", *saved, {"step": 3})
    assert {"step": 3} == library.load_checkpoint(f"{tmp_path}/pretrained_weight{ending}", "", *fresh)
    assert None is difference(states(saved), states(fresh))


def test_dicts_are_updated(tmp_path: Path, library: Any):
    """A load into a dict that has entries replaces those of the checkpoint and leaves the rest."""
    model, optimizer, _ = trained()
    library.save_checkpoint(str(tmp_path), "step_1", dict(model.state_dict()), optimizer.state_dict())
    into, state = {"0.weight": "old", "mine": 1}, dict[str, Any]({"mine": 2})
    library.load_checkpoint(str(tmp_path), "step_1", model=into, optimizer=state)
    assert 1 == into.pop("mine")
    assert 2 == state.pop("mine")
    assert None is difference([dict(model.state_dict()), optimizer.state_dict()], [into, state])


def test_the_result_can_be_changed_and_is_of_the_same_types(tmp_path: Path, library: Any):
    """User content comes back as a dict of its own, in which OrderedDicts are OrderedDicts."""
    content = {"loops": OrderedDict(fit=OrderedDict(step=1)), "size": (1, 2)}
    library.save_checkpoint(str(tmp_path), "step_1", torch.nn.Linear(2, 2), user_content=content)
    loaded = library.load_checkpoint(str(tmp_path))
    assert (OrderedDict, OrderedDict, tuple) == (*map(type, (loaded["loops"], loaded["loops"]["fit"], loaded["size"])),)
    loaded["state_dict"] = {}


def test_what_no_load_could_read_is_left_out(tmp_path: Path, library: Any, caplog: pytest.LogCaptureFixture):
    """Classes and other objects in user content do not make the save fail: a warning names them."""
    content = {"step": 1, "hparams_type": Anything, "callbacks": {"mine": Anything(), "loss": torch.ones(2)}}
    library.save_checkpoint(str(tmp_path), "step_1", torch.nn.Linear(2, 2), user_content=content)
    assert None is difference({"step": 1, "callbacks": {"loss": torch.ones(2)}}, library.load_checkpoint(str(tmp_path)))
    (warning,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "user_content['hparams_type']" in warning
    assert "user_content['callbacks']['mine']" in warning
    assert {"hparams_type", "callbacks"} < content.keys()


def test_omegaconf_containers_become_plain(tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch):
    """A configuration in user content is not left out: it comes back as the dicts and lists that it is."""
    omegaconf: Any = ModuleType("omegaconf")
    omegaconf.DictConfig, omegaconf.ListConfig = type("DictConfig", (), {}), type("ListConfig", (), {})
    omegaconf.OmegaConf = SimpleNamespace(to_container=vars)
    monkeypatch.setitem(sys.modules, "omegaconf", omegaconf)
    config = omegaconf.DictConfig()
    config.lr = 0.1
    library.save_checkpoint(str(tmp_path), "step_1", torch.nn.Linear(2, 2), user_content={"cfg": config})
    assert {"cfg": {"lr": 0.1}} == library.load_checkpoint(str(tmp_path))


def test_trusted_content_is_kept(tmp_path: Path):
    """install(trust_pickle=True) keeps everything, as NxD does."""
    nxd_ckpt.install(trust_pickle=True)
    nxd: Any = import_module("neuronx_distributed")
    nxd.save_checkpoint(str(tmp_path), "step_1", torch.nn.Linear(2, 2), user_content={"kind": OrderedDict.fromkeys})
    assert {"kind"} == nxd.load_checkpoint(str(tmp_path)).keys()


def test_except_clauses_written_for_nxd_and_torch(tmp_path: Path, library: Any):
    """Scripts that start anew, or go on, after an error of NxD or torch do so: each of ours is of its class, too."""

    def kinds(expected: type[Exception], call: Callable[..., Any], **objects: Any) -> type[Exception]:
        with pytest.raises(expected) as raised:
            call(str(tmp_path), **objects)
        return raised.type

    load, model = library.load_checkpoint, torch.nn.Linear(2, 2)
    none = kinds(RuntimeError, load)
    library.save_checkpoint(str(tmp_path), "step_1", model, torch.optim.AdamW(model.parameters()))
    names = kinds(RuntimeError, load, model=torch.nn.LSTM(2, 2))
    shapes = kinds(RuntimeError, load, model=torch.nn.Linear(2, 3))
    groups = kinds(ValueError, load, optimizer=torch.optim.SGD([model.weight]))
    (tmp_path / "step_2").touch()
    failed = kinds(RuntimeError, library.save_checkpoint, tag="step_2", model=model)
    (tmp_path / "step_1/model/dp_rank_00_tp_rank_00_pp_rank_00.pt").write_bytes(b"PK")
    truncated = kinds(RuntimeError, load, model=model)
    expected = [CheckpointNotFound, KeyMismatch, ShapeMismatch, OptimizerMismatch, SaveFailed, MalformedFile]
    assert expected == [none, names, shapes, groups, failed, truncated]


class OnlyForSaving(torch.nn.Module):
    """A module of nothing, whose state_dict(self) is what is to be saved."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._state = state

    def state_dict(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self._state


def test_a_module_made_for_one_save(tmp_path: Path, library: Any):
    """A module without parameters whose state_dict takes no argument is saved as what that returns."""
    adapter = {"q.lora_A": torch.ones(2, 2), "q.lora_B": torch.zeros(2, 2)}
    library.save_checkpoint(str(tmp_path), "adapter_shards", model=OnlyForSaving(adapter), use_xser=True)
    loaded: dict[str, Any] = {}
    library.load_checkpoint(str(tmp_path), "adapter_shards", model=loaded)
    assert None is difference(adapter, loaded)


def test_nothing_is_saved_while_graphs_are_extracted(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A run that only compiles has no trained weights: no tag of it may be resumed from. The log says so once."""
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    for step in (1, 2):
        library.save_checkpoint(str(tmp_path / "run"), f"step_{step}", torch.nn.Linear(2, 2))
    library.parallel_layers.save({"model": {}}, str(tmp_path / "other"))
    library.finalize_checkpoint()
    assert not any(tmp_path.iterdir())
    assert 1 == sum("NEURON_EXTRACT_GRAPHS_ONLY" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("async_save", [True, False])
def test_the_lines_that_programs_look_for(
    tmp_path: Path, library: Any, caplog: pytest.LogCaptureFixture, async_save: bool
):
    """NxD's log says when a save began, and when it was complete."""
    caplog.set_level(logging.INFO, "neuronx_distributed[0]")
    library.save_checkpoint(str(tmp_path), "step_1", torch.nn.Linear(2, 2), async_save=async_save)
    nxd_ckpt.close_checkpointers()
    method = "async" if async_save else "synced"
    lines = [record.getMessage() for record in caplog.records if record.name == "neuronx_distributed[0]"]
    assert [f"{method} saving of checkpoint step_1 {done}" for done in ("began", "completed")] == lines
