"""State of a parameter that only some replicas have, as of optimizers that step each parameter on one rank."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, convert
from nxd_ckpt.adapters.dcp import StorageReader
from nxd_ckpt.errors import IncompatibleState
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal
from tests.training import imitations

KINDS: dict[str, Any] = {
    "by owner": imitations.by_owner(imitations.Soap),
    "other shapes": imitations.Blocks,
}
MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


def _made(kind: str, names: tuple[str, ...] = ("a", "b", "c")) -> tuple[Any, Any]:
    torch.manual_seed(1)
    layers = {name: nn.Linear(3, 3) for name in ("a", "b", "c")}
    model = nn.ModuleDict({name: layers[name] for name in names})
    return model, {"momentum": MOMENTUM, **KINDS}[kind](model.parameters())


def _step(model: Any, optimizer: Any) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum(layer(torch.arange(6.0).reshape(2, 3)).square().mean() for layer in model.values())
        loss.backward()
        return loss

    optimizer.step(closure)


def _state(model: Any, optimizer: Any) -> dict[str, str]:
    """Everything that a run continues from, by the parameter's name."""
    return {name: repr((one.tolist(), optimizer.state.get(one))) for name, one in model.named_parameters()}


def saves(rank: int, directory: Path, kind: str, first: int, how: dict[str, Any]) -> list[int]:
    """The saves, the first after ``first`` steps, that did not come back, to parameters in two orders."""
    model, optimizer = _made(kind)
    expected = {}
    with Checkpointer(directory) as checkpointer:
        for number in range(4):
            if number >= first:
                _step(model, optimizer)
            checkpointer.save(number, model, optimizer, **how)
            expected[number] = _state(model, optimizer)
        wrong = []
        for number, state in expected.items():
            for names in (("a", "b", "c"), ("c", "a", "b")):
                others = _made(kind, names)
                checkpointer.load(number, *others)
                wrong += [number] if _state(*others) != state else []
    return wrong


@pytest.mark.parametrize("how", [{}, {"use_xser": True}, {"use_xser": True, "async_save": True}], ids=str)
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_its_own_state_back(
    gloo_ranks: RankPool, tmp_path: Path, kind: str, first: int, how: dict[str, Any]
) -> None:
    """Also if a save before had no state yet. The save was refused, or one rank's state was all there was."""
    assert [[]] * 4 == gloo_ranks.run(saves, tmp_path, kind, first, how)


def later(rank: int, directory: Path, on: int, size: int) -> tuple[list[str], bool]:
    """Errors of saves of ranks that share the writing, one of which differs later, and True if the last comes back."""
    model, optimizer = _made("momentum")
    said = []
    with Checkpointer(directory) as checkpointer:
        for number in range(3):
            _step(model, optimizer)
            for state in optimizer.state.values() if rank == on and number else ():
                state["more"] = torch.full((size,), number)
            said.append(refusal(partial(checkpointer.save, number, model, optimizer, use_xser=True)))
        others = _made("momentum")
        checkpointer.load(2, *others)
    return said, _state(*others) == _state(model, optimizer)


@pytest.mark.parametrize(("on", "size"), [(1, 2), (0, 2), (1, 500_000), (0, 500_000)])
def test_state_that_differs_later_fails_one_save_of_shared_writing(
    gloo_ranks: RankPool, tmp_path: Path, on: int, size: int
) -> None:
    """With use_xser. All later ones failed, too: by the files of others, if these were now another rank's to write."""
    for said, is_equal in gloo_ranks.run(later, tmp_path, on, size):
        assert ["", ""] == [said[0], said[2]]
        assert "weight/more is" in said[1]
        assert "the next save keeps each rank's own" in said[1]
        assert is_equal


def chosen(rank: int, directory: Path) -> Any:
    """Parameters with state after a load without an entry, and which of them have the entry."""
    model, optimizer = _made("by owner")
    _step(model, optimizer)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model, optimizer)
        other, fresh = _made("by owner")
        checkpointer.load(1, other, fresh, ignore_keys=["optim/*/GG", "optim/b.bias"])
    by_name = {name: fresh.state.get(one, {}) for name, one in other.named_parameters()}
    return [name for name, state in by_name.items() if state], ["GG" in state for state in by_name.values() if state]


def test_filters_and_other_jobs(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """A load leaves out state of single ranks, too; other ranks and conversions refuse it, by name."""
    owned = [["a.weight", "c.weight"], ["a.bias", "c.bias"], ["b.weight"], []]
    assert [(names, [False] * len(names)) for names in owned] == gloo_ranks.run(chosen, tmp_path)
    model, optimizer = _made("other shapes")
    with Checkpointer(tmp_path) as checkpointer:
        said = refusal(lambda: checkpointer.load(1, model, optimizer))
        checkpointer.load(1, model)
    assert "optim/a.bias" in said
    assert "nothing tells whose it takes" in said
    reader = StorageReader(tmp_path / "step_1")
    for one in (weights := model.state_dict()).values():
        one.zero_()
    load({"model": weights}, storage_reader=reader)
    assert all(one.any() for one in weights.values())
    wanted = {"optim": {"state": {"a.weight": {"step": torch.zeros(())}}}}
    with pytest.raises(CheckpointException, match=r"optim/a\.weight differed between the ranks that saved it"):
        load(wanted, storage_reader=reader)
    for form in ("files", "dcp", "tag"):
        with pytest.raises(IncompatibleState, match=r"optim/a\.bias.* leave out the optimizer: optimizer=False"):
            convert(tmp_path, tmp_path / form, to=form)
        convert(tmp_path, tmp_path / form, to=form, optimizer=False)


def masters(rank: int, directory: Path, on: tuple[int, ...], own: bool, use_xser: bool) -> list[bool]:
    """True if master weights that some ranks keep come back, beside state that differs if it is ``own``."""
    right = []
    with Checkpointer(directory) as checkpointer:
        for step in range(3):
            moments = torch.ones(2 + rank * own)
            state: dict[str, Any] = {"state": {0: {"m": moments}}, "param_groups": [{"params": [0]}]}
            state |= {"sharded_master_weights": {0: torch.full((2,), float(rank + step))}} if rank in on else {}
            checkpointer.save(step, None, state, use_xser=use_xser)
            loaded: dict[str, Any] = {}
            checkpointer.load(step, None, loaded)
            right.append(repr(loaded) == repr(state))
    return right


@pytest.mark.parametrize("use_xser", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("on", [(2,), (0, 1), (0, 1, 2, 3)])
def test_master_weights_of_some_ranks_come_back(
    gloo_ranks: RankPool, tmp_path: Path, on: tuple[int, ...], own: bool, use_xser: bool
) -> None:
    """The save was refused; beside state that differs, rank 0's came back to all without a word."""
    assert [[True] * 3] * 4 == gloo_ranks.run(masters, tmp_path, on, own, use_xser)


def whole(rank: int, directory: Path, first: int) -> tuple[list[int], str]:
    """The saves of DTensors beside plain tensors that did not come back, and what a load on another mesh says."""

    def made(*shape: int) -> tuple[Any, Any]:
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)]))
        return model, imitations.Whole(model.parameters(), owned=True)

    def whole_state(model: Any, optimizer: Any) -> str:
        state = optimizer.state_dict()["state"]
        return repr((model.state_dict(), [(index, sorted(state[index].items())) for index in sorted(state)]))

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()

    live = made(4)
    expected = {}
    with Checkpointer(directory) as checkpointer:
        for number in range(3):
            if number >= first:
                step(*live)
            checkpointer.save(number, *live)
            expected[number] = whole_state(*live)
        wrong = []
        for number, state in expected.items():
            other = made(4)
            checkpointer.load(number, *other)
            wrong += [number] if whole_state(*other) != state else []
        return wrong, refusal(lambda: checkpointer.load(2, *made(2, 2)))


@pytest.mark.parametrize("first", [0, 1])
def test_plain_tensors_of_some_ranks_beside_dtensors_come_back(
    gloo_ranks: RankPool, tmp_path: Path, first: int
) -> None:
    """Of any shape: of an uneven shard, or the parameter's own, which stayed no plain tensor."""
    for wrong, said in gloo_ranks.run(whole, tmp_path, first):
        assert [] == wrong
        assert "nothing tells whose it takes" in said
