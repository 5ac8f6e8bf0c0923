"""Optimizers whose state dict has a form of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, load_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import OptimizerMismatch
from tests.training.imitations import Chained, ChainedInList
from tests.training.registry import Inner, step


def _made(kind: Any, seed: int, rows: int = 6) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Inner(torch.nn.Linear(6, rows), torch.nn.Linear(rows, 3))
    return model, kind(model.parameters())


def _stepped(model: Any, *optimizers: Any, seed: int) -> list[torch.Tensor]:
    """The weights after a step of each of the optimizers."""
    for optimizer in optimizers:
        torch.manual_seed(seed)
        step(model, optimizer)
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("kind", [Chained, ChainedInList])
@pytest.mark.parametrize("where", ["optimizer", "state", "among others"])
def test_the_state_dict_comes_back_as_with_torch(tmp_path: Path, kind: Any, where: str) -> None:
    """The next step is the uninterrupted run's, however the optimizer is passed."""

    def passed(model: Any, optimizer: Any, other: Any) -> dict[str, Any]:
        if where == "state":
            return {"model": model, "state": {"own": optimizer}}
        both = {"own": optimizer, "plain": other}
        return {"model": model, "optimizer": optimizer if where == "optimizer" else both}

    runs = []
    for seed in (0, 1):
        model, optimizer = _made(kind, seed)
        frozen = torch.nn.Parameter(torch.ones(2))
        runs.append((model, optimizer, torch.optim.AdamW([frozen])))
    _stepped(*runs[0][:2], seed=5)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, **passed(*runs[0]))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load_latest(**passed(*runs[1]))
    expected, actual = (_stepped(model, optimizer, seed=6) for model, optimizer, _ in runs)
    assert all(map(torch.equal, expected, actual))


def test_another_form_is_refused_by_name(tmp_path: Path) -> None:
    """Torch's form in place of the own one, and the reverse."""
    model, optimizer = _made(Chained, 0)
    wide, rest = ([one for one in model.parameters() if (one.dim() > 1) is is_wide] for is_wide in (True, False))
    plain = torch.optim.AdamW([{"params": wide}, {"params": rest}])
    save_checkpoint(tmp_path, "own", model, optimizer)
    save_checkpoint(tmp_path, "torch", model, plain)
    with pytest.raises(OptimizerMismatch, match=r"that of the live AdamW has torch's"):
        load_checkpoint(tmp_path, "own", model, plain)
    with pytest.raises(OptimizerMismatch, match="live Chained"):
        load_checkpoint(tmp_path, "torch", model, optimizer)
    close_checkpointers()
