"""nxd_ckpt.dcp: scripts of torch.distributed.checkpoint switch by one import."""

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from nxd_ckpt import dcp, errors, list_checkpoints, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.torch_dcp.storage_writer import StorageWriter
from tests.bad_input.live import Net
from tests.support.rank_pool import RankPool
from tests.torch_dcp import switched
from tests.torch_dcp.coded import Coded, Doubled, blank, coded
from tests.torch_dcp.ranks import gathered, picture, training


def job(lr: float = 0.1, seed: int = 3) -> switched.Application:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    training(model, optimizer)
    return switched.Application(model, optimizer)


def zeroed(value: Any) -> Any:
    """A state dict of the same form without its content."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeroed(child) for key, child in value.items()}
    return [zeroed(child) for child in value] if isinstance(value, list) else None


def refusal(state: dict[str, Any], place: Path) -> str:
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, checkpoint_id=place)
    return switched.told(raised.value)


def test_the_signatures_are_torchs() -> None:
    """Names, order and defaults; ``load`` has ``strict`` besides; all else is torch's own."""
    for name in ("save", "async_save", "load"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (dcp, torch_dcp))
        own = {key: (told.kind, told.default) for key, told in ours.items() if key != "strict"}
        assert own == {key: (told.kind, told.default) for key, told in theirs.items()}
    assert dcp.DefaultLoadPlanner is torch_dcp.DefaultLoadPlanner  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        dcp.no_such_name  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("how", ["save", "thread", "process"])
def test_two_ranks_save_and_resume_under_fsdp2(how: str, tmp_path: Path, pair: RankPool) -> None:
    """A Stateful object below any key, sync and async; the tag is one that load_checkpoint reads too."""
    assert [True] * 2 == pair.run(switched.resumed, tmp_path, how, timeout=240)
    assert [] == list((tmp_path / ".nxd_ckpt" / "staging").glob("*"))
    app = job(lr=9.0)
    assert {"step": 7} == load_checkpoint(tmp_path, how, app.model, app.optimizer)
    assert not verify_checkpoint(tmp_path, how).problems


def test_tags_of_others_load_under_any_keys(tmp_path: Path) -> None:
    """Of save_checkpoint; tests/mesh/test_simple_fsdp.py has a Checkpointer's on several ranks."""
    first, second = job(), job(lr=9.0, seed=4)
    save_checkpoint(tmp_path, "step_1", first.model, first.optimizer)
    dcp.load({"any": second}, checkpoint_id=tmp_path / "step_1")
    assert picture(first.model, first.optimizer) == picture(second.model, second.optimizer)


def test_a_process_group_saves_alone(tmp_path: Path, pair: RankPool) -> None:
    """Two groups at a time, each to a directory of its own."""
    assert [[0.0] * 3, [1.0] * 3] == pair.run(switched.halves, tmp_path)


def test_a_model_that_was_on_the_meta_device_loads(tmp_path: Path, pair: RankPool) -> None:
    """Sharded, into memory that holds anything."""
    assert [True] * 2 == pair.run(switched.onto_meta, tmp_path)
    state = {"model": {name: torch.empty_like(value, device="meta") for name, value in Net().state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "full")
    assert {"cpu"} == {value.device.type for value in state["model"].values()}
    dcp.save(Net().state_dict(), checkpoint_id=tmp_path / "root")
    root = {name: torch.empty_like(value, device="meta") for name, value in Net().state_dict().items()}
    dcp.load(root, checkpoint_id=tmp_path / "root")
    assert {"cpu"} == {value.device.type for value in root.values()}


def test_any_state_dict_comes_back(tmp_path: Path) -> None:
    """Raw optimizers, several models, lists, tuples, bytes, objects of numbers: large or small."""
    for count in (3, 2**24 + 1):  # of 4 bytes each: more than what rank 0 alone would write
        app = job()
        state: dict[str, Any] = {
            "generator": {"w": torch.arange(float(count))},
            "critic": app.model.state_dict(),
            "layer._extra_state": {"scale": torch.tensor(2.0), "kind": "fp8"},
            "optim": app.optimizer.state_dict(),
            "lists": [torch.ones(2), {"deep": [torch.zeros(1), 3]}, (1, "a")],
            "bytes": b"\x00",
            "none": None,
            "step": 7,
        }
        dcp.save(state, checkpoint_id=tmp_path / "any")
        found = zeroed(state)
        dcp.load(found, checkpoint_id=tmp_path / "any")
        assert torch.equal(state["generator"].pop("w"), found["generator"].pop("w"))
        assert gathered(state) == gathered(found)
        assert not verify_checkpoint(tmp_path, "any").problems


@pytest.mark.parametrize("keys", [("model", "optimizer"), ("", "optim"), ("model_state_dict", "opt"), ("a.b", "a.c")])
@pytest.mark.parametrize("flat", [False, True])
def test_model_and_optimizer_are_found(keys: tuple[str, str], flat: bool, tmp_path: Path) -> None:
    """Whatever their keys, beside an average of the same names: then load_checkpoint reads the tag."""
    app = job()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(app.model, app.optimizer, options=options)
    state: dict[str, Any] = {"ema": {name: torch.zeros(1) for name in model}}
    parts: list[dict[str, Any]] = [dict(model), dict(optim)]
    for key, part in zip(keys, parts, strict=True):
        *above, last = key.split(".")
        node = state
        for name in above:
            node = node.setdefault(name, {})
        node.update({last: part} if last else part)
    dcp.save(state, checkpoint_id=tmp_path / "step_1")
    told = json.loads((tmp_path / "step_1" / "dcp_names.json").read_bytes())
    assert (1, "dcp_names", *keys) == tuple(told[name] for name in ("format_version", "kind", "model", "optim"))
    other = job(lr=9.0, seed=4)
    load_checkpoint(tmp_path, "step_1", other.model, other.optimizer)
    assert picture(app.model, app.optimizer) == picture(other.model, other.optimizer)


def test_what_torch_saved_is_resumed(tmp_path: Path) -> None:
    """A directory of torch's own ``save`` loads by the same call: a run that changes its import goes on."""
    app, other = job(), job(lr=9.0, seed=4)
    save({"app": app, "step": 3, "large": torch.ones(2)}, checkpoint_id=tmp_path / "theirs")
    state: dict[str, Any] = {"app": other, "step": 0, "large": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path / "theirs")
    assert picture(app.model, app.optimizer) == picture(other.model, other.optimizer)
    assert (3, [1.0, 1.0]) == (state["step"], state["large"].tolist())


def test_missing_names_are_an_error_or_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By ``strict``, with torch's planner or a caller's; other shapes are an error always."""
    dcp.save({"model": {"w": torch.ones(2)}, "n": 1}, checkpoint_id=tmp_path / "step_1")

    def asked() -> dict[str, Any]:
        return {"model": {"w": torch.zeros(2), "new": torch.full((1,), 5.0)}, "n": 0, "m": 7}

    assert "Missing key" in refusal(asked(), tmp_path / "step_1")
    for planner in (None, DefaultLoadPlanner()):
        found = asked()
        with caplog.at_level(logging.WARNING, "nxd_ckpt"):
            dcp.load(found, checkpoint_id=tmp_path / "step_1", strict=False, planner=planner)
        assert {"model": {"w": [1.0, 1.0], "new": [5.0]}, "n": 1, "m": 7} == gathered(found)
    assert "the checkpoint has no m, model.new" in caplog.text
    wrong = {"model": {"w": torch.zeros(3)}}
    with pytest.raises(CheckpointException, match="mismatch"):
        dcp.load(wrong, checkpoint_id=tmp_path / "step_1", strict=False)


def test_a_missing_place_is_named(tmp_path: Path) -> None:
    """Neither checkpoint_id nor writer or reader; a tag that is not there."""
    for call in (dcp.save, dcp.async_save, dcp.load):
        with pytest.raises(errors.InvalidArgument, match="checkpoint_id is missing"):
            call({"model": {}})
    assert str(tmp_path / "absent") in refusal({"x": 1}, tmp_path / "absent")


def test_saves_are_tags_in_order(tmp_path: Path) -> None:
    """Several saves to one directory; a writer with options of its own; one tag saved twice."""
    for number in range(3):
        dcp.save({"step": number}, checkpoint_id=f"{tmp_path}/step_{number}/", storage_writer=None)
    assert ["step_0", "step_1", "step_2"] == [info.tag for info in list_checkpoints(tmp_path)]
    keeping = StorageWriter(num_kept_ckpts=1, model_key=None, optim_key=None)
    for number in (5, 6):
        dcp.save({"model": {"w": torch.ones(1)}, "step": number}, checkpoint_id=tmp_path / "x", storage_writer=keeping)
    state = {"step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "x")
    assert (6, ["x"]) == (state["step"], [info.tag for info in list_checkpoints(tmp_path)])


def test_subclasses_come_back_as_what_they_were(tmp_path: Path) -> None:
    """In model, optimizer, lists and below other subclasses: into their like, in place."""
    state: dict[str, Any] = {
        "model": {"w": coded(4), "plain": torch.ones(2), "deep": {"twice": Doubled(coded(3)), "n": 5}},
        "optim": {"state": {"w": {"exp_avg": coded(4, "log"), "step": torch.tensor(2.0)}}},
        "lists": [coded(2), 3],
    }
    state["optim"]["param_groups"] = [{"lr": 0.1, "params": ["w"]}]
    dcp.save(state, checkpoint_id=tmp_path / "step_1")
    target = blank(4)
    found: dict[str, Any] = {
        "model": {"w": target, "plain": torch.zeros(2), "deep": {"twice": Doubled(blank(3)), "n": 0}},
        "optim": {"state": {"w": {"exp_avg": blank(4, "log"), "step": torch.tensor(0.0)}}},
        "lists": [blank(2), 0],
    }
    found["optim"]["param_groups"] = [{"lr": 0.0, "params": []}]
    deep = found["model"]["deep"]
    dcp.load(found, checkpoint_id=tmp_path / "step_1")
    assert found["model"]["w"] is target
    assert found["model"]["deep"] is deep
    assert ([1, 2, 3, 4], 0.5) == (target.codes.tolist(), float(target.scale))
    twice, moment, listed = deep["twice"], found["optim"]["state"]["w"]["exp_avg"], found["lists"][0]
    assert isinstance(twice, Doubled)
    assert isinstance(twice.single, Coded)
    assert ([1, 2, 3], 5) == (twice.single.codes.tolist(), deep["n"])
    assert isinstance(moment, Coded)
    assert ([1, 2, 3, 4], "log") == (moment.codes.tolist(), moment.kind)
    assert ([1, 2], 3) == (listed.codes.tolist(), found["lists"][1])
    assert ([1.0, 1.0], 2.0) == (found["model"]["plain"].tolist(), float(found["optim"]["state"]["w"]["step"]))
    assert 0.1 == found["optim"]["param_groups"][0]["lr"]
    assert [1, 2, 3, 4] == open_checkpoint(tmp_path).read("model/w|codes").tolist()


def test_other_subclasses_than_saved_are_refused(tmp_path: Path) -> None:
    """By name, and nothing is changed: another kind or shape, plain for coded and coded for plain."""
    dcp.save({"model": {"w": coded(4), "plain": torch.ones(2)}}, checkpoint_id=tmp_path / "step_1")
    for name, there in (("w", blank(4, "log")), ("w", blank(5)), ("plain", blank(2)), ("w", torch.zeros(4))):
        other = torch.zeros(2)
        state = {"model": {"plain": other, name: there}}
        assert f"model.{name} was saved as" in refusal(state, tmp_path / "step_1")
        assert not other.any()
    like = blank(4)
    dcp.load({"model": {"w": like}}, checkpoint_id=tmp_path / "step_1")
    assert [1, 2, 3, 4] == like.codes.tolist()


def test_a_bare_writer_refuses_subclasses(tmp_path: Path) -> None:
    """torch's ``save`` gives it no more than their values, which used to be saved as if they were all."""
    with pytest.raises(CheckpointException, match=r"model.w is a .*Coded.*nxd_ckpt.dcp.save"):
        save({"model": {"w": coded()}}, storage_writer=StorageWriter(tmp_path, "step_1"))
    assert [] == [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]


def test_subclasses_of_shards_are_each_ranks_own(tmp_path: Path, pair: RankPool) -> None:
    """Uneven shards, back in place on the same mesh; what is no shard is told the mesh."""
    first, second = pair.run(switched.sharded_codes, tmp_path)
    assert ([1, 2, 3], 0.5, [11, 12], 0.5) == (*first[:2], *second[:2])
    assert all(
        "optim.state.w.exp_avg was saved as" in found[2] and "mesh of [2]" in found[2] for found in (first, second)
    )


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.ones(2, 2).to_sparse()], ids=["meta", "sparse"])
def test_a_tensor_that_torch_cannot_copy_is_named(tmp_path: Path, tensor: torch.Tensor) -> None:
    """By a save in the background, which copies first."""
    state = {"model": {"w": torch.ones(2)}, "x": [{"b": tensor}]}
    with pytest.raises(CheckpointException, match=r"x.0.b is .*, expected a plain dense tensor"):
        dcp.async_save(state, checkpoint_id=tmp_path / "step_1").result()
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, torch.sparse_coo], ids=str)
def test_a_save_names_a_tensor_that_no_tag_holds(tmp_path: Path, layout: torch.layout) -> None:
    """torch's planner, or a copy, said something of sizes."""
    tensor = torch.ones(2, 2).to_sparse()
    if layout is not torch.sparse_coo:
        tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(CheckpointException, match=r"model.w is .*, expected a plain dense tensor"):
        dcp.save({"model": {"w": tensor}}, checkpoint_id=tmp_path / "step_1")
    assert not (tmp_path / "step_1").exists()


def test_what_one_rank_refuses_all_hear(tmp_path: Path, pair: RankPool) -> None:
    """A class that differs on one rank ends the load on both."""
    assert all("model.w was saved as" in words for words in pair.run(switched.refused_on_one, tmp_path))


def test_ranks_that_read_two_saves_are_refused(tmp_path: Path, pair: RankPool) -> None:
    """As of a directory that one of them sees late; nothing is loaded."""
    for words, loaded in pair.run(switched.of_two_saves, tmp_path):
        assert "rank 0 loads 'step_1' of attempt" in words
        assert "rank 1 'step_0' of attempt" in words
        assert [7.0] * 3 == loaded
