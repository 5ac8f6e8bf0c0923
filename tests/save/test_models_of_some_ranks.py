"""A model, and an optimizer, of which ranks that count as replicas hold other parts, come back to each of them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, Topology, convert, diff_checkpoints, load_keys, open_checkpoint
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal
from tests.support.stateful import Extra


class Net(nn.Module):
    """A layer of all ranks, beside ``more`` of one rank."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        for name, module in more.items():
            if isinstance(module, torch.Tensor):
                self.register_buffer(name, module)
            else:
                self.add_module(name, module)


class Clones(torch.optim.AdamW):
    """Steps on float32 clones of the parameters that this rank owns."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__([nn.Parameter(each.detach().clone()) for each in list(params)[rank % 2 :]], lr=0.1)


def _adam(model: nn.Module, rank: int) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _of_owned(model: nn.Module, rank: int) -> Any:
    return torch.optim.AdamW(list(model.parameters())[rank % 2 :: 2], lr=0.1)


def _of_rank_3(model: Any, rank: int) -> Any:
    return torch.optim.AdamW(list(model.first.parameters())[rank // 3 :], lr=0.1)


def _in_groups(model: nn.Module, rank: int) -> Any:
    first, *others = model.parameters()
    groups: Any = [{"params": [first]}, {"params": others, "lr": 0.2}]
    return torch.optim.AdamW(groups if rank % 2 else [{"params": [first, *others]}], lr=0.1)


def _either_way(one: Any, rank: int) -> dict[str, Any]:
    return {"a": [one] if rank % 2 else one, "b": one if rank % 2 else [one]}


def _layer_of(rank: int) -> dict[str, nn.Module]:
    return {f"layer_{rank}": nn.Linear(3, 3 + rank)}


def _experts(count: int, *, idle: bool = False) -> dict[str, nn.Module]:
    """Experts of an ep rank, before a layer of all ranks."""
    experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(count))
    for one in experts.parameters():
        vars(one).update(expert_model_parallel=True, idle=idle)
    return {"experts": experts, "head": nn.Linear(3, 3)}


KINDS: dict[str, tuple[Callable[[int], dict[str, Any]], Any]] = {
    "an adapter of rank 1": (lambda rank: {"adapter": nn.Linear(3, 2)} if rank == 1 else {}, _adam),
    "an adapter of rank 0": (lambda rank: {"adapter": nn.Linear(3, 2)} if rank == 0 else {}, _adam),
    "an adapter of rank 1, an optimizer of rank 3": (
        lambda rank: {"adapter": nn.Linear(3, 2)} if rank == 1 else {}, _of_rank_3
    ),
    "stages": (_layer_of, _adam),
    "rows": (lambda rank: {"expert": nn.Linear(3, 2 + rank)}, _adam),
    "shapes": (lambda rank: {"table": torch.zeros((2, 3) if rank % 2 else (3, 2))}, _adam),
    "dtypes": (lambda rank: {"table": torch.zeros(4, dtype=torch.int32 if rank else torch.float32)}, _adam),
    "extra state": (lambda rank: {"extra": Extra({"a": [torch.ones(2)] if rank == 1 else rank, "n": rank})}, _adam),
    "extra state of one": (lambda rank: {"extra": Extra({"a": [torch.ones(2), 5]})} if rank == 1 else {}, _adam),
    "extra state of other kinds": (lambda rank: {"extra": Extra(_either_way(torch.ones(rank + 1), rank))}, _adam),
    "clones": (lambda rank: {}, lambda model, rank: Clones(model.parameters(), rank)),
    "owned parameters": (lambda rank: {}, _of_owned),
    "param groups": (lambda rank: {}, _in_groups),
}
OF_EXPERTS: dict[str, tuple[Callable[[int], dict[str, Any]], Any]] = {
    "more experts": (lambda rank: _experts(1 + rank % 2), _adam),
    "an expert that never stepped": (lambda rank: _experts(1, idle=bool(rank % 2)), _adam),
}


def _made(kind: str, rank: int) -> tuple[Any, Any]:
    more, optimizer = {**KINDS, **OF_EXPERTS}[kind]
    model = Net(**more(rank))
    return model, optimizer(model, rank)


def _step(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = None if getattr(one, "idle", False) else torch.ones_like(one)
    optimizer.step()
    for one in model.buffers():
        one.add_(1)


def _facts(model: Any, optimizer: Any) -> str:
    """Everything that a run continues from."""
    extra = model.extra.state if hasattr(model, "extra") else None
    groups = [[(one, optimizer.state.get(one)) for one in group["params"]] for group in optimizer.param_groups]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return repr((sorted(model.state_dict().items()), extra, groups, options))


def saves(rank: int, directory: Path, kind: str, first: int, how: dict[str, Any], ep: int = 1) -> list[str]:
    """Saves, the first after ``first`` steps, that did not come back to fresh objects, or that failed."""
    live = _made(kind, rank)
    expected, wrong = {}, []
    with Checkpointer(directory, topology=Topology(dp=4, ep=ep, rank=rank)) as checkpointer:
        for number in range(3):
            if number >= first:
                _step(*live)
            expected[number] = _facts(*live)
            checkpointer.save(number, *live, **how)
            if how.get("async_save"):
                _step(*live)
                checkpointer.wait()
        for number, facts in expected.items():
            other, fresh = _made(kind, rank)
            for one in other.state_dict(keep_vars=True).values():
                if isinstance(one, torch.Tensor):
                    one.detach().zero_()
            checkpointer.load(number, other, fresh)
            wrong += [] if _facts(other, fresh) == facts else [f"{number}: {_facts(other, fresh)} {facts}"]
    return wrong


@pytest.mark.parametrize("how", [{}, {"use_xser": True, "async_save": True}], ids=["plain", "xser, async"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_its_own_back(
    gloo_ranks: RankPool, tmp_path: Path, kind: str, first: int, how: dict[str, Any]
) -> None:
    """Into fresh objects, also if no optimizer has stepped yet. The saves were refused."""
    assert [[]] * 4 == gloo_ranks.run(saves, tmp_path, kind, first, how)


@pytest.mark.parametrize("first", [0, 1])
def test_each_ep_rank_gets_its_own_back(gloo_ranks: RankPool, tmp_path: Path, first: int) -> None:
    """With use_xser, which keeps for all ep ranks what is no expert's: the tags did not load, or one save was refused.
    """
    for kind in (*KINDS, *OF_EXPERTS):
        assert [[]] * 4 == gloo_ranks.run(saves, tmp_path / kind, kind, first, {"use_xser": True}, 2), kind


def other_objects(rank: int, directory: Path) -> list[str]:
    """Errors of loads that no longer fit: of the others' model, and of a part under another name."""
    live = _made("an adapter of rank 1", rank)
    _step(*live)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, *live)
        said = [refusal(lambda: checkpointer.load(1, *_made("an adapter of rank 1", 0)))]
        renamed = Net(**({"another": nn.Linear(3, 2)} if rank == 1 else {}))
        names = {f"another.{each}": f"adapter.{each}" for each in ("weight", "bias")}
        if rank == 1:
            renamed.get_parameter("another.weight").detach().zero_()
        fresh = _adam(renamed, rank)
        said.append(refusal(lambda: checkpointer.load(1, renamed, fresh, key_mapping=names)))
        return [*said, "" if _facts(renamed, fresh).replace("another.", "adapter.") == _facts(*live) else "differs"]


def test_other_jobs_are_refused_by_name(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """And conversions; with what is to be left out, the rest loads. Tools show each rank's own."""
    for missing, *renamed in gloo_ranks.run(other_objects, tmp_path):
        assert "adapter" in missing
        assert ["", ""] == renamed
    model, optimizer = _made("an adapter of rank 1", 0)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=r"model/adapter\.bias.*nothing tells whose it takes"):
            checkpointer.load(1, model)
        with pytest.raises(CheckpointError, match=r": optim differed .* ignore_keys=\['optim'\]"):
            checkpointer.load(1, model, optimizer, ignore_keys=["model/adapter*"])
        checkpointer.load(1, model, optimizer, ignore_keys=["model/adapter*", "optim"])
    assert () == verify_checkpoint(tmp_path).problems
    checkpoint = open_checkpoint(tmp_path)
    assert [{"first.weight", "first.bias"}, {"first.weight", "first.bias", "adapter.weight", "adapter.bias"}] == [
        {*checkpoint.model_state(rank)} for rank in range(2)
    ]
    assert [2, 4] == [len(checkpoint.optimizer_state(rank)["state"]) for rank in range(2)]
    assert [(3, 3)] == [tuple(value.shape) for value in load_keys(tmp_path, ["model/first.weight"])]
    with pytest.raises(CheckpointError, match=r": optim differed .* optimizer_state\(rank\)"):
        checkpoint.read("optim/first.bias/exp_avg")
    with pytest.raises(CheckpointError, match=r"model/adapter\.bias"):
        convert(tmp_path, tmp_path / "files", to="files")


def of_one(rank: int, directory: Path) -> None:
    model = Net(**({"adapter": nn.Linear(3, 2)} if rank == 1 else {}))
    with Checkpointer(directory) as checkpointer:
        for step in range(3):
            checkpointer.save(step, model)
            if rank == 1 and step:
                model.get_parameter("adapter.bias").detach().add_(1)


def test_diff_tells_that_what_one_rank_alone_has_is_not_compared(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """It said that two tags are the same, of which a rank's adapter had changed."""
    gloo_ranks.run(of_one, tmp_path)
    assert not diff_checkpoints(tmp_path / "step_2", tmp_path / "step_2")
    assert {"model/adapter.bias is not compared: each rank's own was saved"} <= {
        *diff_checkpoints(tmp_path / "step_1", tmp_path / "step_2").problems
    }


def gone(rank: int, directory: Path, on: int, use_async: bool) -> None:
    """Save what a rank has twice, then without it."""
    model = Net(**({"adapter": nn.Linear(3, 2)} if rank == on else {}))
    with Checkpointer(directory) as checkpointer:
        for step in range(4):
            if step == 2:
                model = Net()
            checkpointer.save(step, model, async_save=use_async)


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("on", [0, 1])
def test_what_no_rank_has_any_more_is_not_listed(
    gloo_ranks: RankPool, tmp_path: Path, on: int, use_async: bool
) -> None:
    """Such a tag loads on any number of ranks. It was refused, by the name of an adapter that no rank had."""
    gloo_ranks.run(gone, tmp_path, on, use_async)
    listed = [json.loads((tmp_path / f"step_{step}/manifest.json").read_text()) for step in range(4)]
    assert ["per_rank" in each for each in listed] == [True, True, False, False]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(3, Net())
        assert "adapter.bias" in refusal(lambda: checkpointer.load(1, Net()))


def empty(rank: int, directory: Path, on: int, how: dict[str, Any]) -> str:
    model = {} if rank == on else {"weight": torch.ones(2)}
    with Checkpointer(directory) as checkpointer:
        return refusal(lambda: checkpointer.save(1, model, **how))


@pytest.mark.parametrize("how", [{}, {"use_xser": True}], ids=str)
@pytest.mark.parametrize("on", [0, 2])
def test_a_rank_without_any_of_it_is_refused(gloo_ranks: RankPool, tmp_path: Path, on: int, how: Any) -> None:
    """A state dict that was gathered on one rank is not this rank's own state: no other size could load it."""
    for message in gloo_ranks.run(empty, tmp_path, on, how):
        assert "on one rank (rank0_only=True) is not there on the others" in message


def more_on_rank_0(rank: int, directory: Path, kind: str) -> list[bool]:
    """True if saves come back after which rank 0 gets one more tensor, where all others are each rank's own."""
    right = []
    own, more = torch.ones(rank + 1), torch.ones(3)
    with Checkpointer(directory) as checkpointer:
        for step in range(4):
            has_more = rank == 0 and step > 1
            model = {"w": own, **({"late": more} if has_more and kind == "model" else {})}
            state: Any = {"state": {0: {"m": own}} if kind == "masters" else {}, "param_groups": [{"params": [0]}]}
            state |= {"sharded_master_weights": {0: more}} if has_more and kind != "model" else {}
            checkpointer.save(step, model, state)
            loaded: tuple[Any, Any] = ({}, {})
            checkpointer.load(step, *loaded)
            right.append(repr(loaded) == repr((model, state)))
    return right


@pytest.mark.parametrize("kind", ["model", "masters", "masters without state"])
def test_a_tensor_of_rank_0_beside_those_that_differ_goes_to_no_other(
    gloo_ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """The others had nothing left to compare, and got it without a word."""
    assert [[True] * 4] * 4 == gloo_ranks.run(more_on_rank_0, tmp_path, kind)


def on_mesh(rank: int, directory: Path, later: bool, on: tuple[int, ...]) -> list[str]:
    """The refusals of saves of DTensors beside plain tensors, and the saves that did not come back.

    With ``later``, ranks ``on`` get them after the first save, and a table of another form.
    """

    def made() -> Any:
        own = {"frozen": nn.Linear(3, 1 + rank).requires_grad_(False), **({"late": torch.ones(2)} if rank == 2 else {})}
        model = Net(**({} if later else own))
        fully_shard(model.first, mesh=init_device_mesh("cpu", (4,)))
        if later:
            for name, one in own.items():
                setattr(model, name, one)
        return model, torch.optim.AdamW(model.first.parameters())

    live = made()
    live[0].register_buffer("table", torch.ones(3, 1))
    said: list[str] = []
    weights: list[torch.Tensor] = []
    tables: list[torch.Tensor] = []
    own = live[0].frozen
    with Checkpointer(directory) as checkpointer:
        for step in range(4):
            if later and step == 0:
                del live[0].frozen
            elif later and rank in on:
                live[0].frozen = own
            own.weight.add_(1)
            if later and rank in on and step:
                live[0].table = torch.ones(step, rank)
            weights.append(own.weight.clone())
            tables.append(live[0].table)
            said.append(refusal(partial(checkpointer.save, step, *live, async_save=bool(step % 2))))
            checkpointer.wait()
        for step in range(1, 4):
            other = made()
            other[0].register_buffer("table", torch.zeros(tables[step].shape))
            if later and rank not in on:
                del other[0].frozen
                said.append(refusal(partial(checkpointer.load, step, *other)))
                said.append("" if torch.equal(other[0].table, tables[step]) else "table differs")
                continue
            other[0].frozen.weight.zero_()
            said.append(refusal(partial(checkpointer.load, step, *other)))
            same = torch.equal(other[0].frozen.weight, weights[step]) and torch.equal(other[0].table, tables[step])
            said.append("" if same else "differs")
    return [each for each in said if each]


@pytest.mark.parametrize(("later", "on"), [(False, ()), (True, (0, 1, 2, 3)), (True, (0,)), (True, (2,))])
def test_plain_tensors_of_some_ranks_of_a_mesh_come_back(
    gloo_ranks: RankPool, tmp_path: Path, later: bool, on: tuple[int, ...]
) -> None:
    """Of the first save, or of a later one, which was refused once."""
    assert [[]] * 4 == gloo_ranks.run(on_mesh, tmp_path, later, on)


def other_groups(rank: int, directory: Path) -> list[list[float]]:
    """Rates of live param groups after a load: in another order, one alone, cut in two, and beside a new one."""
    a, b, more = (nn.Linear(3, 3) for _ in range(3))
    models = nn.ModuleDict({"a": a, "b": b})

    def adam(*groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(group), "lr": 9.0} for group in groups])

    optimizer = adam(a.parameters(), b.parameters())
    for group, rate in zip(optimizer.param_groups, (1.0 + rank, 5.0), strict=True):
        group["lr"] = rate
    new = nn.ModuleDict({"more": more, "a": a, "b": b})
    loads: list[tuple[Any, Any, dict[str, Any]]] = [
        (models, adam(b.parameters(), a.parameters()), {}),
        (b, adam(b.parameters()), {"prefix": "b."}),
        (models, adam(b.parameters(), [a.weight], [a.bias]), {}),
        (new, adam(more.parameters(), b.parameters(), a.parameters()), {"strict": False}),
    ]
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, models, optimizer)
        for model, live, how in loads:
            checkpointer.load(1, model, live, **how)
    return [[group["lr"] for group in live.param_groups] for _, live, _ in loads]


def test_each_rank_gets_its_own_options_in_other_param_groups(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """They went to the live groups of the saved numbers, whose parameters are others."""
    assert [
        [[5.0, own], [5.0], [5.0, own, own], [9.0, 5.0, own]] for own in (1.0, 2.0, 3.0, 4.0)
    ] == gloo_ranks.run(other_groups, tmp_path)


def joined(rank: int, directory: Path) -> tuple[str, str]:
    """The refusal of one live group for two, whose rates differ on all ranks but the first; and with that left out."""
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.ModuleDict({"a": a, "b": b})
    groups: Any = [{"params": list(a.parameters())}, {"params": list(b.parameters()), "lr": 1.0 + rank}]
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model, torch.optim.AdamW(groups, lr=1.0))
        fresh = torch.optim.AdamW(model.parameters(), lr=9.0)
        said = refusal(lambda: checkpointer.load(1, model, fresh))
        return said, refusal(lambda: checkpointer.load(1, model, fresh, ignore_keys=["optim/param_groups"]))


def test_groups_with_other_options_on_a_rank_do_not_become_one(pair: RankPool, tmp_path: Path) -> None:
    """That of the second group was lost, without a word, as the first rank has equal ones."""
    for said, without in pair.run(joined, tmp_path):
        assert "optim/param_groups/1/lr differed between the ranks" in said
        assert not without
