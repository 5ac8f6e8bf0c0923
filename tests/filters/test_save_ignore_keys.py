"""What a save leaves out: named as for a load, and of all kinds of tags."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import Checkpointer, Topology, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.errors import InvalidArgument, KeyMismatch, OptimizerMismatch, RanksDisagree
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.interop.saving import save_as_every_rank
from tests.live.doubles import ShardedOptimizer


def net(value: float) -> torch.nn.ModuleDict:
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def stepped(model: torch.nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def save(directory: Path, ignore_keys: Any, **options: Any) -> None:
    model = net(1.0)
    content = {"random": nxd_ckpt.capture_random_state(), "epoch": 3}
    others = {"scheduler": {"last": 7}, "user_content": {"steps": 1, "loss": 0.5}, "rank_content": content}
    save_checkpoint(
        directory, "t", model, stepped(model), ignore_keys=ignore_keys, durable=False, **{**others, **options}
    )


def held(directory: Path) -> dict[str, Any]:
    """What the tag has."""
    opened = open_checkpoint(directory, "t")
    content: Any = opened.user_content()
    return {
        "tensors": sorted(opened.metadata),
        "content": sorted(content or ()),
        "own": sorted(opened.rank_content(0)) if opened.parts.rank_content else None,
        "scheduler": opened.parts.scheduler,
    }


MODEL = ["model/body.bias", "model/body.weight", "model/head.bias", "model/head.weight"]
STATE = sorted(
    f"optim/{name.removeprefix('model/')}/{entry}" for name in MODEL for entry in ("exp_avg", "exp_avg_sq", "step")
)
ALL = {"tensors": MODEL + STATE, "content": ["loss", "steps"], "own": ["epoch", "random"], "scheduler": True}


def biases(names: list[str]) -> list[str]:
    return [name for name in names if ".bias" in name]


@pytest.mark.parametrize("use_xser", [False, True])
@pytest.mark.parametrize(
    ("ignore_keys", "expected"),
    [
        (["model/head.*"], {"tensors": MODEL[:2] + STATE}),
        (["optim/head.*"], {"tensors": MODEL + STATE[:6]}),
        ("optim/*", {"tensors": MODEL}),
        (biases, {"tensors": [name for name in MODEL + STATE if ".bias" not in name]}),
        (["user_content/loss", "rng", "scheduler"], {"content": ["steps"], "own": ["epoch"], "scheduler": False}),
        (["user_content/*", "rank_content/*"], {"content": [], "own": None}),
    ],
)
def test_what_is_left_out_is_not_in_the_tag(
    tmp_path: Path, ignore_keys: Any, expected: dict[str, Any], use_xser: bool
) -> None:
    """Tensors, keys of dicts and whole parts; all else is, and verifies."""
    save(tmp_path, ignore_keys, use_xser=use_xser)
    assert {**ALL, **expected} == held(tmp_path)
    assert () == verify_checkpoint(tmp_path, "t").problems


def test_the_rest_is_loaded_with_the_same_keys(tmp_path: Path) -> None:
    """A load under strict asks for all that is not ignored."""
    keys = ["model/head.*", "optim/head.*"]
    save(tmp_path, keys)
    model = net(2.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    with pytest.raises(KeyMismatch, match=r"missing from the checkpoint: 'head\.weight'"):
        load_checkpoint(tmp_path, "t", model, optimizer)
    load_checkpoint(tmp_path, "t", model, optimizer, ignore_keys=["model/head.*"])
    assert (0.5, 2) == (optimizer.param_groups[0]["lr"], len(optimizer.state))
    untouched = {name for name, value in model.named_parameters() if bool(torch.all(value == 2.0))}
    assert {"head.weight", "head.bias"} == untouched


def test_options_that_were_left_out_are_not_taken_for_the_live_ones(tmp_path: Path) -> None:
    """A learning rate that is not in the tag is missed, unless the load leaves it out as well."""
    save(tmp_path, ["optim/param_groups"])
    model = net(2.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    with pytest.raises(OptimizerMismatch, match=r"without the options .* ignore_keys=\['optim/param_groups'\]"):
        load_checkpoint(tmp_path, "t", model, optimizer)
    load_checkpoint(tmp_path, "t", model, optimizer, ignore_keys=["optim/param_groups"])
    assert (9.0, 4) == (optimizer.param_groups[0]["lr"], len(optimizer.state))


def test_content_that_is_left_out_need_not_be_data(tmp_path: Path) -> None:
    """Only what is saved is asked whether it can be read back."""
    save(tmp_path, ["user_content/loss"], user_content={"steps": 1, "loss": object()})
    assert ["steps"] == held(tmp_path)["content"]


def test_what_matches_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is no error: too much is saved. What is no glob, or no name, is."""
    with caplog.at_level(logging.WARNING):
        save(tmp_path, ["model/haed.*"])
    assert "ignore_keys= matches nothing that is saved with 'model/haed.*'" in caplog.text
    assert ALL == held(tmp_path)
    refused: list[tuple[Any, Any]] = [(7, InvalidArgument), (lambda names: ["x"], KeyMismatch)]
    for keys, error in refused:
        with pytest.raises(error, match="ignore_keys"):
            save(tmp_path, keys)


def test_one_checkpointer_may_leave_out_other_things_each_time(tmp_path: Path) -> None:
    """Plans of earlier saves are for what those left out."""
    model = net(1.0)
    optimizer = stepped(model)
    with Checkpointer(tmp_path, durable=False) as checkpointer:
        for tag, keys in (("a", None), ("b", ["optim"]), ("c", ["model/head.*"]), ("d", None)):
            checkpointer.save(tag, model, optimizer, ignore_keys=keys)
    counts = [len(open_checkpoint(tmp_path, tag).metadata) for tag in "abcd"]
    assert [len(MODEL + STATE), len(MODEL), len(MODEL + STATE) - 2, len(MODEL + STATE)] == counts


@pytest.mark.parametrize("options", [{}, {"use_xser": True}, {"use_zero1_dcp": True}])
def test_shards_are_left_out_on_all_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of a ZeRO-1 optimizer, on two ranks; what is there loads."""
    topologies = [Topology(dp=2).at(rank) for rank in range(2)]

    def made(rank: int, value: float) -> tuple[Any, Any]:
        model = net(value)
        return model, ShardedOptimizer(model.parameters(), rank, [[0, 1]], save_master_weights=True, lr=0.5)

    def what(rank: int) -> dict[str, Any]:
        model, optimizer = made(rank, 1.0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    keys = ["optim/head.*", "optim/body.bias"]
    save_as_every_rank(tmp_path, "t", topologies, what, ignore_keys=keys, durable=False, **options)
    names = {name.split("/")[1] for name in open_checkpoint(tmp_path, "t").metadata if name.startswith("optim/")}
    assert {"body.weight"} == names
    model, optimizer = made(0, 2.0)
    load_checkpoint(tmp_path, "t", model, optimizer, topology=topologies[0], ignore_keys=keys)
    assert 1 == len(optimizer.base_optimizer.state)


def test_ranks_that_leave_out_different_things_are_refused(tmp_path: Path) -> None:
    """Their files would not be of one checkpoint."""
    topologies = [Topology(tp=2).at(rank) for rank in range(2)]
    with pytest.raises(RanksDisagree, match="ignore_keys"):
        save_differently(tmp_path, topologies)


def save_differently(directory: Path, topologies: list[Topology]) -> None:
    for topology in topologies:
        save_checkpoint(
            directory, "t", net(1.0), topology=topology, run_id="one", async_save=True, timeout=600.0, durable=False,
            ignore_keys=["model/head.*"] if topology.rank else ["model/body.*"],
        )  # fmt: skip
    nxd_ckpt.finalize_checkpoint()
