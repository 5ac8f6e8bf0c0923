"""What the jobs of these tests save, and how its content is recognised: one number tells which save it was."""

import os
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Checkpointer, PendingSave, Topology, load_checkpoint, open_checkpoint
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import Hook, HookedStorage
from tests.tag.equality import difference

PATIENCE = 600.0
"""Seconds of silence after which a rank counts as lost, in these tests: far more than a busy machine takes."""

SHORT = 3.0
"""The same where a test is about a rank that is lost."""


def weights(value: int, rank: int) -> dict[str, torch.Tensor]:
    """The model state of a rank in save number ``value``: no two ranks or saves have an equal tensor."""
    start = 1000.0 * value + 100.0 * rank
    return {"weight": torch.arange(start, start + 12).reshape(3, 4), "bias": torch.full((4,), start)}


def moments(value: int, rank: int) -> dict[str, Any]:
    """A ZeRO-1 optimizer's state of a rank in that save, and how to save it: as a torch DCP directory."""
    weight = weights(value, rank)["weight"]
    state = {
        "state": {},
        "param_groups": [{"lr": 0.5, "params": [0]}],
        "base_state": {0: {"step": value, "exp_avg": weight + 1}},
        "shape_info": {0: weight.shape},
    }
    return {"optimizer": state, "param_names": [["weight"]], "use_zero1_dcp": True}


def checkpointer(path: Path, rank: int, world: int, hook: Hook | None = None, **options: Any) -> Checkpointer:
    """Rank ``rank`` of ``world`` tensor-parallel ranks: each writes a model file of its own."""
    storage = LocalStorage(path)
    return Checkpointer(
        path,
        topology=Topology(tp=world, rank=rank),
        storage=storage if hook is None else HookedStorage(storage, hook),
        **{"timeout": PATIENCE, **options},
    )


def lose_patience(saver: Checkpointer, timeout: float = SHORT) -> None:
    """From the next save on, ``saver``, which has saved before, waits so long for the others."""
    assert saver._session is not None
    saver._session.timeout = timeout


def save(saver: Checkpointer, tag: str, value: int, **options: Any) -> PendingSave:
    """Save number ``value`` of this rank under ``tag``."""
    rank = saver.topology.rank
    return saver.save(
        tag,
        weights(value, rank),
        user_content={"value": value},
        rank_content={"value": value, "rank": rank},
        **options,
    )


def saved_value(path: str | os.PathLike[str], tag: str | None, world: int) -> int:
    """Which save ``tag`` (None: the latest) holds; verifies that every rank's part is of that save, bit for bit."""
    problems = verify_checkpoint(path, tag).problems
    assert () == problems
    values = set()
    for rank in range(world):
        model: dict[str, torch.Tensor] = {}
        own: dict[str, int] = {}
        optimizer: dict[str, Any] | None = {} if open_checkpoint(path, tag).parts.optimizer else None
        content = load_checkpoint(path, tag, model, optimizer, topology=Topology(tp=world, rank=rank), rank_content=own)
        value = int(content["value"])
        expected = weights(value, rank)
        if optimizer is not None:
            assert None is difference(moments(value, rank)["optimizer"], optimizer)
        assert expected.keys() == model.keys()
        assert all(torch.equal(expected[name], model[name]) for name in expected)
        assert {"value": value, "rank": rank} == own
        values.add(value)
    assert 1 == len(values)
    return values.pop()


def visible_tags(path: str | os.PathLike[str]) -> list[str]:
    """Every tag that a listing shows, complete or not, oldest first."""
    return [info.tag for info in sorted(list_tags(LocalStorage(path)), key=lambda info: info.order_time)]
