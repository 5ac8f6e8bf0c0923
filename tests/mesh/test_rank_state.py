"""An optimizer's plain tensors of a rank's own shard come back to that rank, and to no other one."""

import json
import tarfile
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer
from nxd_ckpt.live.state_names import replaced
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal


def local_of(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter.to_local()
    return local


class LocalMoments(torch.optim.Optimizer):
    """Keeps codes of its shard, flat, and a scale for each of four of them, as low-bit optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, local, grad = self.state[parameter], parameter.to_local(), parameter.grad.to_local()
            if not state:
                state["codes"] = torch.zeros(local.numel(), dtype=torch.int8)
                state["scale"] = torch.zeros(-(-local.numel() // 4))
                state["step"] = torch.zeros(())
            state["step"] += 1
            state["codes"].add_((grad.reshape(-1) * 10).to(torch.int8))
            state["scale"].add_(grad.abs().sum() + dist.get_rank())
            local.sub_(0.01 * state["codes"].view_as(local))  # replicas of a shard stay alike


def made(shape: tuple[int, ...], rows: int = 8) -> tuple[torch.nn.Module, LocalMoments]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, rows, bias=False)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    fully_shard(model, mesh=mesh)
    return model, LocalMoments(model.parameters())


def train(model: torch.nn.Module, optimizer: LocalMoments, seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed + 100 * dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


def resumed(rank: int, directory: Path, shape: tuple[int, ...], use_async: bool) -> bool:
    """Whether a run that was resumed on this rank is the one that was not interrupted, for three steps."""
    model, optimizer = made(shape)
    train(model, optimizer, range(2))
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("t", model, optimizer, async_save=use_async)
        checkpointer.wait()
        other, fresh = made(shape)
        checkpointer.load("t", other, fresh)
    for pair in ((model, optimizer), (other, fresh)):
        train(*pair, range(2, 5))
    states = zip(optimizer.state.values(), fresh.state.values(), strict=True)
    same = all(one.keys() == its.keys() and all(torch.equal(one[k], its[k]) for k in one) for one, its in states)
    weights = zip(model.parameters(), other.parameters(), strict=True)
    return same and all(torch.equal(local_of(one), local_of(its)) for one, its in weights)


@pytest.mark.parametrize(("shape", "use_async"), [((4,), False), ((2, 2), True)], ids=["fsdp", "hsdp, async"])
def test_each_rank_has_its_own_back(
    gloo_ranks: RankPool, tmp_path: Path, shape: tuple[int, ...], use_async: bool
) -> None:
    """Bit for bit, into fresh objects; the numbers that all ranks share stay shared."""
    assert [True] * 4 == gloo_ranks.run(resumed, tmp_path, shape, use_async)
    (manifest,) = tmp_path.glob("*/manifest.json")
    assert ["optim/weight/codes", "optim/weight/scale"] == json.loads(manifest.read_text())["per_rank"]


def on_another_mesh(rank: int, directory: Path) -> tuple[str, bool]:
    model, optimizer = made((4,))
    train(model, optimizer, range(2))
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("t", model, optimizer)
        other, fresh = made((2, 2))
        before = [local_of(parameter).clone() for parameter in other.parameters()]
        said = refusal(lambda: checkpointer.load("t", other, fresh))
    same = zip(before, other.parameters(), strict=True)
    return said, all(torch.equal(one, local_of(its)) for one, its in same)


def test_another_mesh_is_refused_by_name(gloo_ranks: RankPool, tmp_path: Path) -> None:
    for message, unchanged in gloo_ranks.run(on_another_mesh, tmp_path):
        assert "optim/weight/codes" in message
        assert "each rank's own was saved; this job is on replicas=2 shards=2, and nothing tells whose" in message
        assert unchanged


def uneven(rank: int, directory: Path, rows: int, on: int | None) -> list[str]:
    """The saves of uneven shards, beside a number on one rank, that do not come back to fresh or to trained objects."""
    model, optimizer = made((4,), rows)
    states = {}
    wrong = []
    with Checkpointer(directory) as checkpointer:
        for number in range(2):
            train(model, optimizer, range(number, number + 1))
            for parameter, state in optimizer.state.items():
                state["shard"] = torch.full(local_of(parameter).shape, number)
                state |= {"norm": torch.tensor(float(number))} if rank == on else {}
            checkpointer.save(number, model, optimizer)
            states[number] = _sorted_state(optimizer)
        for number, state in states.items():
            for kind, (other, its) in {"fresh": made((4,), rows), "trained": (model, optimizer)}.items():
                checkpointer.load(number, other, its)
                wrong += [] if _sorted_state(its) == state else [f"{number}, {kind}"]
    return wrong


def _sorted_state(optimizer: Any) -> list[str]:
    return [repr(sorted(state.items())) for state in optimizer.state.values()]


@pytest.mark.parametrize("on", [None, 0, 1])
@pytest.mark.parametrize("rows", [6, 1])
def test_state_of_uneven_shards_comes_back(gloo_ranks: RankPool, tmp_path: Path, rows: int, on: int | None) -> None:
    """Ranks hold tensors of other lengths, or one of them all of it: others' was lost, as where one rank has more."""
    assert [[]] * 4 == gloo_ranks.run(uneven, tmp_path, rows, on)


def of_before(rank: int, directory: Path) -> tuple[bool, str]:
    """True if this rank's state comes back from a tag with rows of all ranks; the error of a load on another mesh."""
    model, optimizer = made((2, 2))
    content: dict[str, Any] = {}
    with Checkpointer(directory) as checkpointer:
        checkpointer.load("rows", model, optimizer, rank_content=content)
        said = refusal(lambda: checkpointer.load("rows", *made((4,))))
    return _sorted_state(optimizer) == [repr(sorted(state.items())) for state in content["state"]], said


def test_rows_of_tags_of_before_come_back(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """A tag of 0.1: each rank's plain tensors were rows of one tensor of the mesh."""
    with tarfile.open(Path(__file__).parent.parent / "golden" / "nxd_ckpt-0.1-rows.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for is_equal, said in gloo_ranks.run(of_before, tmp_path / "nxd_ckpt-0.1-rows"):
        assert is_equal
        assert "optim/weight/codes is a plain tensor that each rank keeps for its own shard" in said


NUMBERS: dict[str, Any] = {
    "a float of the state": lambda optimizer, value: next(iter(optimizer.state.values())).update(factor=value),
    "an int in a dict": lambda optimizer, value: next(iter(optimizer.state.values())).update(all={"k": int(value)}),
    "a tensor": lambda optimizer, value: next(iter(optimizer.state.values())).update(norm=torch.tensor(value)),
    "an option": lambda optimizer, value: optimizer.param_groups[0].update(lr=value),
    "a flag": lambda optimizer, value: optimizer.param_groups[0].update(warm=value == 1),
    "of the optimizer": lambda optimizer, value: optimizer.state.update(total=value),
}


def kept_numbers(rank: int, directory: Path, async_save: bool) -> list[str]:
    """Which of NUMBERS do not come back to their ranks where they differ on rank 2; in between equal ones are saved."""
    lost = []
    model, optimizer = made((4,))
    train(model, optimizer, range(1))
    with Checkpointer(directory) as checkpointer:
        for number, (name, put) in enumerate(NUMBERS.items()):
            for value, tag in ((3.0, "equal"), (float(rank == 2), "different")):
                put(optimizer, value)
                checkpointer.save(f"{tag}_{number}", model, optimizer, async_save=async_save)
                checkpointer.wait()
                other, fresh = made((4,))
                checkpointer.load(f"{tag}_{number}", other, fresh)
                if repr(_numbers_of(optimizer)) != repr(_numbers_of(fresh)):
                    lost.append(f"{name}, {tag}: {_numbers_of(fresh)}, expected {_numbers_of(optimizer)}")
            put(optimizer, 3.0)
    return lost


OWN: dict[str, Any] = {
    "model/seen": lambda model, optimizer, scheduler: model.get_buffer("seen").add_(1),
    "optim/param_groups/0/lr": lambda model, optimizer, scheduler: optimizer.param_groups[0].update(lr=0.5),
    "optim/state/total": lambda model, optimizer, scheduler: optimizer.state.update(total=2),
    "scheduler/last_epoch": lambda model, optimizer, scheduler: setattr(scheduler, "last_epoch", 7),
}
"""State of one rank alone, by its name; none of it lies on a mesh."""


def _scheduled(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 8)
    model.register_buffer("seen", torch.zeros(2))
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["total"] = 1  # type: ignore[index]
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def own_on_another_mesh(rank: int, directory: Path) -> list[tuple[str, str]]:
    """Answers of loads of OWN, which ranks 1 and 3 have, on the mesh of the save, and on others of as many ranks."""
    said = []
    for number, (name, change) in enumerate(OWN.items()):
        objects = _scheduled((2, 2), ("replicas", "shards"))
        if rank % 2:
            change(*objects)
        with Checkpointer(directory) as checkpointer:
            checkpointer.save(number, *objects)
            for shape, names in (
                ((2, 2), ("replicas", "shards")), ((2, 2), ("shards", "replicas")), ((4,), ("shards",)), ((), ())
            ):  # fmt: skip
                others = _scheduled(shape, names)
                said.append((name, refusal(partial(checkpointer.load, number, *others))))
            filtered = {"scheduler/last_epoch": "scheduler", "optim/param_groups/0/lr": "optim/param_groups"}
            checkpointer.load(number, *others, ignore_keys=[filtered.get(name, name)])
    return said


def test_what_one_rank_has_is_refused_on_another_mesh(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Of as many ranks: of a tensor-parallel group, or a stage, it is another's there."""
    for said in gloo_ranks.run(own_on_another_mesh, tmp_path):
        assert ["", *["refused"] * 3] * len(OWN) == [
            "refused" if f"{name} differed between the ranks that saved it on replicas=2 shards=2" in text else text
            for name, text in said
        ]


def _numbers_of(optimizer: LocalMoments) -> list[Any]:
    (state,) = (own for key, own in optimizer.state.items() if not isinstance(key, str))
    numbers = [state.get(name) for name in ("factor", "all", "norm")]
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return [*numbers, options, [value for key, value in optimizer.state.items() if isinstance(key, str)]]


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_numbers_that_differ_between_ranks_come_back_to_them(
    gloo_ranks: RankPool, tmp_path: Path, async_save: bool
) -> None:
    """In any save and not only the first."""
    assert [[]] * 4 == gloo_ranks.run(kept_numbers, tmp_path, async_save)


class Lists(torch.optim.SGD):
    """Keeps moments in a list, and the last two gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            if not state:
                state["moments"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
                state["last"] = deque(maxlen=2)
            state["last"].append(grad.clone())
            for moment, beta in zip(state["moments"], (0.5, 0.9), strict=True):
                parameter.sub_(moment.mul_(beta).add_(grad).add_(state["last"][0]), alpha=0.01)


def resumed_lists(rank: int, directory: Path, save: bool) -> list[Any]:
    """The whole weights after three steps from the save, on this mesh, and what the moments are."""
    model, _ = made((dist.get_world_size(),) if save else (2, 2))
    optimizer = Lists(model.parameters(), lr=0.1)
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]

    def train_on(some: list[torch.Tensor]) -> None:
        for batch in some:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    with Checkpointer(directory) as checkpointer:
        if save:
            train_on(batches[:2])
            checkpointer.save("t", model, optimizer)
        else:
            checkpointer.load("t", model, optimizer, prove=True)
    train_on(batches[2:])
    [parameter] = model.parameters()
    state = optimizer.state[parameter]
    kinds = [type(one).__name__ for one in (*state["moments"], *state["last"])]
    whole: Any = parameter
    return [whole.full_tensor().tolist(), kinds]


def test_dtensors_in_lists_of_a_parameters_state(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """They come back as DTensors, cut for the mesh: as whole tensors they stopped the next step."""
    saved = gloo_ranks.run(resumed_lists, tmp_path, True)
    assert {"DTensor"} == {kind for _, kinds in saved for kind in kinds}
    assert saved == gloo_ranks.run(resumed_lists, tmp_path, False)


class _Searched(list[Any]):
    def __contains__(self, item: object) -> bool:
        raise AssertionError("it is searched for each entry of the state")


def test_what_is_of_a_rank_is_left_out_of_a_state_without_a_search_for_each_entry() -> None:
    """A save with 2,400 such tensors kept its caller 130 ms longer, and one with more the square of that."""
    paths = _Searched(("state", index, "codes") for index in range(3))
    tree = {"state": {index: {"codes": 1, "step": index} for index in range(3)}}
    assert {"state": {index: {"step": index} for index in range(3)}} == replaced(tree, {}, paths)
