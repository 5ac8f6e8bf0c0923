"""Our own tags load from their indexes, and no pickle in them is read; a tree that contradicts its index is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.errors import CheckpointError, DigestMismatch
from nxd_ckpt.formats import torch_zip
from tests.bad_input.live import Net
from tests.tag.rewriting import Fields, rewrite_index

MODEL = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"


def trained() -> tuple[Net, torch.optim.Optimizer, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    scheduler.step()
    return net, optimizer, scheduler


def parse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"parsed {args[2]}")

    monkeypatch.setattr(torch_zip, "read_tree", refuse)


@pytest.mark.parametrize("use_xser", [False, True])
def test_a_load_parses_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_xser: bool) -> None:
    net, optimizer, scheduler = trained()
    fresh, other, its_scheduler = trained()
    with Checkpointer(tmp_path) as checkpointer:
        content = {"steps": 3, "seen": (1, 2.5), "raw": b"\0"}
        checkpointer.save(3, net, optimizer, scheduler, user_content=content, use_xser=use_xser)
        parse_nothing(monkeypatch)
        loaded = checkpointer.load(model=fresh, optimizer=other, scheduler=its_scheduler)
    assert loaded == content
    assert its_scheduler.state_dict() == scheduler.state_dict()
    for one, another in zip(net.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, another)
        assert torch.equal(optimizer.state[one]["exp_avg"], other.state[another]["exp_avg"])


@pytest.mark.parametrize("count", [6, 3 * 2**20], ids=["small", "large"])
@pytest.mark.parametrize("verify", [False, "reading"])
def test_a_load_without_a_first_pass_looks_at_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Literal[False, "reading"], count: int
) -> None:
    """No pickle is parsed; and a file of another save, of equal size, is found before anything changes."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.full((count,), float(step)), "b": torch.ones(3)})
        live = {"w": torch.zeros(count), "b": torch.zeros(3)}
        with monkeypatch.context() as patched:
            parse_nothing(patched)
            checkpointer.load(1, live, verify=verify)
        assert (1.0, 1.0) == (live["w"][-1].item(), live["b"][-1].item())
        shutil.copyfile(tmp_path / "step_2" / MODEL, tmp_path / "step_1" / MODEL)
        with pytest.raises(DigestMismatch, match=r"\bw\b"):
            checkpointer.load(1, {name: value.zero_() for name, value in live.items()}, verify=verify)
    assert (0.0, 0.0) == (live["w"][-1].item(), live["b"][-1].item())


def with_tree(change: Callable[[Any], Any]) -> Callable[[Fields], None]:
    def changed(fields: Fields) -> None:
        fields["trees"][MODEL] = change(fields["trees"][MODEL])

    return changed


def with_form(*form: Any) -> Callable[[Fields], None]:
    """``form``: number of bytes, dtype, shape and pieces."""
    return lambda fields: fields["tensors"]["forms"].__setitem__(0, form)


@pytest.mark.parametrize(
    "change",
    [
        with_tree(lambda tree: {**tree, "more": []}),
        with_tree(lambda tree: dict(list(tree.items())[1:])),
        with_tree(lambda tree: {**tree, "more": ["set", 1]}),
        with_tree(lambda tree: {name: ["tensor", [1, 1, 1, 1, 1, 1], False] for name in tree}),
        with_tree(lambda tree: dict.fromkeys(tree, 1)),
        with_tree(lambda tree: []),
        with_form(24, "float32", [1000], None),
        with_form(24, "float64", [6], None),
        lambda fields: fields["tensors"]["offset"].__setitem__(0, 2**40),
        lambda fields: fields.update(trees=[1]),
        lambda fields: fields.update(trees={"../elsewhere": {}}),
    ],
    ids=["more", "fewer", "kind", "stride", "values", "tensor", "shape", "dtype", "offset", "list", "name"],
)
def test_a_tree_that_contradicts_is_refused(tmp_path: Path, change: Callable[[Fields], None]) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, Net())
    rewrite_index(tmp_path / "step_1", change)
    live = Net()
    before = {name: value.clone() for name, value in live.state_dict().items()}
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError):
        checkpointer.load(model=live)
    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
