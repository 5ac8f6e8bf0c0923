"""LBFGS keeps lists of tensors: they are saved and loaded in each form; what NxD makes of them in xser form is said."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, convert, load_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.testing import check_resume
from tests.training.registry import Inner, step


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Inner(torch.nn.Linear(6, 6))
    return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)


def test_histories_go_to_torch_dcp_and_back(tmp_path: Path) -> None:
    """Lists of tensors lie there under names of their own, which were taken for parameters'."""
    model, optimizer = made()
    step(model, optimizer)
    step(model, optimizer)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, model, optimizer)
    convert(tmp_path / "run" / "step_1", tmp_path / "dcp", to="dcp", durable=False)
    convert(tmp_path / "dcp", tmp_path / "again" / "step_1", to="tag", durable=False)
    for source in (tmp_path / "dcp", tmp_path / "again"):
        _, other = objects = made()
        load_checkpoint(source, None, *objects)
        expected, actual = (each.state_dict()["state"][0] for each in (optimizer, other))
        assert len(expected["old_dirs"]) > 1
        assert {key: repr(value) for key, value in expected.items()} == {key: repr(actual[key]) for key in expected}


@pytest.mark.parametrize("xser", [False, True], ids=["plain", "xser"])
def test_histories_come_back(xser: bool) -> None:
    """Bit for bit, with the tensors in their lists."""

    def save(directory: str, tag: str, *objects: Any) -> None:
        with Checkpointer(directory) as checkpointer:
            checkpointer.save(tag, *objects, use_xser=xser)

    check_resume(made, step, save=save, new_process=False)


def unfinished(tree: Any, kind: type, in_list: bool = False) -> Any:
    """The state dict as NxD writes it: ``kind`` in place of each tensor in a list."""
    if isinstance(tree, dict):
        return {key: unfinished(value, kind) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [unfinished(value, kind, in_list=True) for value in tree]
    return kind(tree) if in_list and isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize("trust", [False, True])
def test_what_nxd_wrote_with_xser_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool
) -> None:
    """Before anything changes; without the optimizer the tag loads."""
    model, optimizer = made()
    step(model, optimizer)

    class _InternalTensorReference:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tid, self.shape, self.dtype = 0, tensor.shape, tensor.dtype

    home = "neuronx_distributed.trainer.checkpoint"
    _InternalTensorReference.__module__, _InternalTensorReference.__qualname__ = home, "_InternalTensorReference"
    stand_in = ModuleType(home)
    stand_in._InternalTensorReference = _InternalTensorReference  # type: ignore[attr-defined]
    state = unfinished(optimizer.state_dict(), _InternalTensorReference)
    with monkeypatch.context() as patched:
        for name in ("neuronx_distributed", "neuronx_distributed.trainer", home):
            patched.setitem(sys.modules, name, stand_in)
        for folder, content in (("model", model.state_dict()), ("optim", state)):
            (tmp_path / "t" / folder).mkdir(parents=True)
            torch.save(content, tmp_path / "t" / folder / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    for marker in ("checkpoint", "done"):
        (tmp_path / "t" / marker).write_text("1")
    other, fresh = made()
    before = [one.clone() for one in other.parameters()]
    with pytest.raises(UnsupportedState, match=r"tensor 'state\.0\..*lies in nested lists"):
        load_checkpoint(tmp_path, "t", other, fresh, trust_pickle=trust)
    assert all(torch.equal(one, now) for one, now in zip(before, other.parameters(), strict=True))
    load_checkpoint(tmp_path, "t", other)
    assert all(torch.equal(one, now) for one, now in zip(model.parameters(), other.parameters(), strict=True))
    close_checkpointers()
