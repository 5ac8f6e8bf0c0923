"""What ranks hold alike is compared at every save; what differs comes back to the rank that had it."""

import ast
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, Topology, list_checkpoints, load_keys, open_checkpoint
from nxd_ckpt.core.votes import SAMPLES, WHOLE
from nxd_ckpt.errors import CheckpointError, IncompatibleState
from nxd_ckpt.saving.replicas import Replica, Replicas, Values
from nxd_ckpt.tag.per_rank import Gone
from nxd_ckpt.testing.storage import MemoryStorage
from tests.support.logged import logged
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal
from tests.support.stateful import Object

KINDS: dict[str, Any] = {
    "bytes": lambda n: bytes([n]),
    "BytesIO": lambda n: io.BytesIO(bytes([n])),
    "array": lambda n: np.arange(3) + n,
    "number of an array": np.float32,
    "set": lambda n: {n, n + 1, "a"},
    "complex": lambda n: complex(0, n),
    "None": lambda n: None if n else 0,
    "text": str,
    "tuple": lambda n: (n, ["x", float(n)]),
    "dict": lambda n: {"of rank": n, **({"only": 1} if n == 1 else {})},
}
"""A value of each kind, for a number."""


class Net(torch.nn.Module):
    """A small and a large parameter, a buffer, and extra state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small = torch.nn.Parameter(torch.randn(5))
        self.large = torch.nn.Parameter(torch.randn(600, 600))
        self.register_buffer("seen", torch.zeros(2))
        self.extra = {kind: make(0) for kind, make in KINDS.items()}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def _made() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    one = Object({"count": 0, "average": torch.zeros(3), "values": [0]})
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "object": one}


def _step(model: Net, optimizer: Any) -> None:
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()


def _differ(of: dict[str, Any], number: int) -> None:
    """Give each object values of its own, for a ``number`` that is not 0."""
    model, optimizer, scheduler, one = of.values()
    with torch.no_grad():
        for tensor in (model.small, model.large, model.seen):
            tensor.add_(number)
        for state in optimizer.state.values():
            state["exp_avg"].add_(number)
            state["step"] += number
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"] = 0.1 + number
    model.extra = {kind: make(number) for kind, make in KINDS.items()}
    scheduler.base_lrs = [0.1 + number]
    one.state = {"count": number, "average": torch.full((3,), float(number)), "values": [0] * (number + 1)}


def _facts(of: dict[str, Any]) -> dict[str, str]:
    """Everything that a load must give back, as text by name."""
    model, optimizer, scheduler, one = of.values()
    named = (*model.named_parameters(), *model.named_buffers())
    texts = {name: repr(tensor.double().sum().item()) for name, tensor in named}
    for name, value in model.extra.items():
        texts[name] = _text(value)
    for number, state in enumerate(optimizer.state.values()):
        texts |= {f"{number}.{entry}": repr(value.double().sum().item()) for entry, value in state.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states = {"scheduler": repr(scheduler.state_dict()), "object": repr(one.state_dict())}
    return {**texts, "groups": repr(groups), **states}


def _text(value: Any) -> str:
    if isinstance(value, set):
        return repr(sorted(value, key=repr))
    return repr(value.getvalue() if isinstance(value, io.BytesIO) else value)


def _saved(of: dict[str, Any]) -> dict[str, Any]:
    model, optimizer, scheduler, one = of.values()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "state": {"object": one}}


def run(rank: int, directory: Path, first: int, how: dict[str, Any]) -> tuple[list[str], int]:
    """What does not come back, where ranks differ from the save number ``first`` on; and the number of warnings."""
    live, problems = _made(), []
    with logged() as messages, Checkpointer(directory) as checkpointer:
        for step in range(first + 3):
            _step(live["model"], live["optimizer"])
            if step >= first:
                _differ(live, rank + step - first)
            if step == 0 and first > 3:
                live["optimizer"].state.clear()
            checkpointer.save(step, **_saved(live), **how)
            if step >= first:
                facts = _facts(live)
                checkpointer.wait()
                other = _made()
                checkpointer.load(step, **_saved(other))
                actual = _facts(other)
                problems += [f"{step}: {name}" for name in facts if facts[name] != actual.get(name)]
    return problems, sum("count as replicas" in message for message in messages)


@pytest.mark.parametrize(("first", "how"), [(0, {}), (1, {"async_save": True}), (4, {"use_xser": True})], ids=str)
def test_what_differs_comes_back_to_its_rank(gloo_ranks: RankPool, tmp_path: Path, first: int, how: Any) -> None:
    """Tensors and values of every kind, from any save on; one warning names them."""
    answers = gloo_ranks.run(run, tmp_path, first, how)
    assert [[]] * 4 == [problems for problems, _ in answers]
    assert [1, 0, 0, 0] == [warnings for _, warnings in answers]


def late(rank: int, directory: Path, asynchronous: bool) -> list[str]:
    """What comes of a large parameter that differs from the fourth save on: said at the save, or loaded from it."""
    model = torch.nn.Linear(700, 700)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    said = []
    with Checkpointer(directory) as checkpointer:
        for step in range(5):
            if step == 3:
                model.weight.data.add_(rank)
            checkpointer.save(step, model, async_save=asynchronous)
            if told := refusal(checkpointer.wait):
                said.append(told)
        tags = sorted(each.tag for each in list_checkpoints(directory))
        for tag in tags:
            other = torch.nn.Linear(700, 700)
            checkpointer.load(tag, other)
            said.append(f"{tag}: {other.weight[0, 0].item()}")
    return said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_large_tensor_that_differs_late_is_never_lost_unsaid(
    gloo_ranks: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    """Samples notice it. An async save has no copy of it then, and fails; the next one has it."""
    for rank, said in enumerate(gloo_ranks.run(late, tmp_path, asynchronous)):
        if asynchronous:
            assert "rank 1 and the rank that writes for it differ in model/weight since this save" in said.pop(0)
        own = f"{1 + rank}.0"
        third = [] if asynchronous else [f"step_3: {own}"]
        assert ["step_0: 1.0", "step_1: 1.0", "step_2: 1.0", *third, f"step_4: {own}"] == said


def elsewhere(rank: int, directory: Path) -> None:
    model, optimizer, scheduler, one = (live := _made()).values()
    _step(model, optimizer)
    _differ(live, rank)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model, optimizer, scheduler, state={"object": one})


def test_other_sizes_are_refused_by_name(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """With what to leave out; the rest then loads."""
    gloo_ranks.run(elsewhere, tmp_path)
    live = _made()
    with Checkpointer(tmp_path, topology=Topology()) as checkpointer:
        with pytest.raises(CheckpointError, match=r"model/_extra_state.* and each rank's own was saved.*\(dp=1"):
            checkpointer.load(1, **_saved(live))
        with pytest.raises(CheckpointError, match=r"optim/large/exp_avg.* ignore_keys=\[.*\]") as refused:
            checkpointer.load(1, live["model"], live["optimizer"], ignore_keys=["model/*", "scheduler"])
        advised = ast.literal_eval(str(refused.value).partition("ignore_keys=")[2])
        checkpointer.load(1, live["model"], live["optimizer"], ignore_keys=["model/*", "scheduler", *advised])
        checkpointer.load(1, live["model"], ignore_keys=["model/large", "model/small", "model/seen", "model/_extra*"])
    rates = "scheduler/objects/scheduler/base_lrs"
    assert rates in open_checkpoint(tmp_path, "step_1").manifest.per_rank  # type: ignore[union-attr]
    with pytest.raises(IncompatibleState, match="each its own"):
        load_keys(tmp_path, [f"{rates}/0"], "step_1")
    saved = torch.load(tmp_path / "step_1" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=False)
    assert torch.allclose(Net().small, saved["small"] + 0.1, atol=0.01)  # readable as before: rank 0's, after one step


def test_a_store_without_renames_keeps_them_too() -> None:
    """There a file takes the place of no other one: the index is written again all the same."""
    store = MemoryStorage()

    def save_and_load(rank: int) -> list[float]:
        model = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(model.weight, rank)
        place, values = Topology(dp=2, rank=rank), []
        with Checkpointer("run", storage=store, topology=place, run_id="run") as checkpointer:
            for step in range(2):
                checkpointer.save(step, model)
                other = torch.nn.Linear(3, 3)
                checkpointer.load(step, other)
                values.append(other.weight[0, 0].item())
        return values

    with ThreadPoolExecutor(2) as threads:
        assert [[0.0, 0.0], [1.0, 1.0]] == list(threads.map(save_and_load, range(2)))


def averaged(rank: int, directory: Path) -> list[str]:
    """Warnings of two saves of a model of DTensors whose ranks agree."""
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters())
    with logged() as messages, Checkpointer(directory) as checkpointer:
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            checkpointer.save(step, model, optimizer)
    manifest = open_checkpoint(directory, "step_2").manifest
    return [*messages, *(manifest.per_rank if manifest is not None else ())]


def test_what_is_alike_is_saved_once(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Without a word, and without files of single ranks."""
    assert [[]] * 4 == gloo_ranks.run(averaged, tmp_path)
    assert not (tmp_path / "step_2" / "rank_state").exists()
    assert dist.is_available()


def _ones(count: int) -> list[torch.Tensor]:
    return [torch.full((3,), float(number)) for number in range(count)]


FORMS: dict[str, Any] = {
    "keys": lambda rank: {f"of_{rank}": 1},
    "keys below": lambda rank: {"all": {rank + 5: 7}},
    "kinds of containers": lambda rank: {"a": [1, 2] if rank % 2 else (1, 2), "b": {} if rank % 2 else []},
    "keys that are no text": lambda rank: {(rank, None): 1, 0.5: rank, None: rank, b"k": rank, True: rank},
    "values at such keys": lambda rank: {(1, None): rank, 0.5: rank, None: rank, b"k": rank, True: rank},
    "a tensor on some": lambda rank: {"a": 1, **({"t": torch.ones(3)} if rank % 2 else {})},
    "a tensor on others": lambda rank: {"a": 1, **({} if rank % 2 else {"t": torch.ones(3)})},
    "tensors or none": lambda rank: {"a": {"t": torch.ones(3), "n": 1} if rank % 2 else None},
    "a tensor or a number": lambda rank: {"a": torch.ones(3) if rank % 2 else 5},
    "shapes": lambda rank: {"a": torch.ones(3 + rank), "b": torch.ones(6).view((2, 3) if rank % 2 else (3, 2))},
    "more tensors": lambda rank: {"a": _ones(2 + rank)},
    "fewer tensors": lambda rank: {"a": _ones(5 - rank)},
    "a list": lambda rank: [rank, {"a": rank}],
}
"""State of an object whose form is not that of other ranks."""


def formed(rank: int, directory: Path, asynchronous: bool) -> list[str]:
    """Which objects of FORMS do not come back, of a save whose live state is changed right after; one is on rank 1."""

    def made(of: Any) -> dict[str, Any]:
        state: dict[str, Any] = {name.replace(" ", "_"): Object() for name in FORMS}
        for each, form in zip(state.values(), FORMS.values(), strict=True):
            each.state = of(form)
        return state | ({"of_rank_1": Object({"count": 0})} if rank == 1 else {})

    model, live = torch.nn.Linear(2, 2), made(lambda form: {"a": 0})
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model, state=live)
        checkpointer.wait()
        for step in (2, 3):
            for one, form in zip(live.values(), FORMS.values(), strict=False):
                one.state = form(rank)
            expected = {name: repr(one.state) for name, one in live.items()}
            checkpointer.save(step, model, state=live, async_save=asynchronous)
            for one in live.values() if asynchronous else ():
                one.state.clear()
            checkpointer.wait()
            other = made(lambda form: {})
            checkpointer.load(step, model, state=other)
            lost = [name for name, one in other.items() if repr(one.state) != expected[name]]
            if lost:
                return lost
    return []


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_state_of_another_form_comes_back_to_its_rank(gloo_ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    """As it was at the call, also an object that one rank alone has."""
    assert [[]] * 4 == gloo_ranks.run(formed, tmp_path, asynchronous)


def alone(rank: int, directory: Path) -> str:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if rank == 1 else None
    with Checkpointer(directory) as checkpointer:
        return refusal(lambda: checkpointer.save(1, model, optimizer, scheduler))


def test_a_scheduler_without_one_on_the_rank_that_writes_it_is_refused(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """At the save, on all ranks."""
    for message in gloo_ranks.run(alone, tmp_path):
        assert message.startswith("RanksDisagree: ")
        assert "rank 1 saves a scheduler, or objects in state=, and rank 0, which writes that for all, has" in message


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()


class Renamed(Net):
    """The same under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.small
        del self.small


def renamed(rank: int, directory: Path) -> list[bool]:
    """Whether a load under other names gives this rank's own."""
    live = Outer()
    optimizer = torch.optim.AdamW(live.parameters())
    live.inner.extra = {kind: make(rank) for kind, make in KINDS.items()}
    with torch.no_grad():
        live.inner.small.add_(rank)
    for one in live.parameters():
        one.grad = torch.full_like(one, rank + 1.0)
    optimizer.step()
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, live, optimizer)
        right = []
        for other, mapping in ((Net(), None), (Renamed(), {"other": "inner.small"})):
            fresh = torch.optim.AdamW(other.parameters())
            checkpointer.load(1, other, fresh, prefix="inner.", key_mapping=mapping)
            small = other.get_parameter("other" if mapping else "small")
            extra = all(_text(value) == _text(other.extra[kind]) for kind, value in live.inner.extra.items())
            right += [torch.equal(live.inner.small, small), extra]
            right.append(torch.equal(optimizer.state[live.inner.small]["exp_avg"], fresh.state[small]["exp_avg"]))
    return right


def test_other_names_at_the_load_find_what_is_a_ranks_own(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """With prefix= and key_mapping=: tensors, values and moments."""
    assert [[True] * 6] * 4 == gloo_ranks.run(renamed, tmp_path)


def of_expert_ranks(rank: int, directory: Path, use_xser: bool, on: int | None) -> list[bool]:
    """True if weights and moments of a rank come back, of which NxD keeps one copy for all expert-parallel ranks.

    One rank has a moment more.
    """

    def made() -> Any:
        model = torch.nn.Module()
        expert: Any = torch.nn.Parameter(torch.ones(3))
        expert.expert_model_parallel = True
        model.expert = expert
        model.norm = torch.nn.Parameter(torch.ones(4))
        return model, torch.optim.AdamW(model.parameters())

    live, optimizer = made()
    right = []
    with Checkpointer(directory, topology=Topology(dp=4, ep=2, rank=rank)) as checkpointer:
        for step in range(3):
            for one in live.parameters():
                one.grad = torch.full_like(one, 1.0 + (rank if step else 0))
                one.data.add_(rank if step else 0)
            optimizer.step()
            optimizer.state[live.norm] |= {"more": torch.ones(step + 1)} if rank == on else {}
            checkpointer.save(step, live, optimizer, use_xser=use_xser)
            other, fresh = made()
            checkpointer.load(step, other, fresh)
            into: dict[str, Any] = {}
            checkpointer.load(step, {}, into)
            right += [torch.equal(one, its) for one, its in zip(live.parameters(), other.parameters(), strict=True)]
            for number, state in enumerate(optimizer.state.values()):
                loaded = list(fresh.state.values())[number], into["state"][number]
                for its in loaded:
                    right.append(all(_text(state.get(entry)) == _text(its.get(entry)) for entry in ("exp_avg", "more")))
    return right


@pytest.mark.parametrize(("use_xser", "on"), [(False, None), (True, None), (True, 0), (True, 1)])
def test_copies_of_expert_ranks_are_compared_too(
    gloo_ranks: RankPool, tmp_path: Path, use_xser: bool, on: int | None
) -> None:
    """Into live objects, and into dicts; a tag in which expert-parallel ranks had other tensors did not load."""
    assert [[True] * 18] * 4 == gloo_ranks.run(of_expert_ranks, tmp_path, use_xser, on)


class _OfDevice:
    """Stands for a tensor on a device, which training changes: whoever asks it may get an error of torch-xla."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for its {name}")


@pytest.mark.parametrize("whole", [True, False])
def test_the_writers_thread_asks_no_live_tensor(whole: bool) -> None:
    """Neither of one that this rank writes, nor of one that it compares: what is needed is known from the call."""
    form, nbytes = ("float32", (600, 600)), 4 * 600 * 600
    written = Replica("model", 0, "model/written", form, nbytes, 0, "model", (0, 0))
    other = Replica("model", 1, "model/other", form, nbytes, 1, "model")
    tensors: Any = {"model": [_OfDevice(), _OfDevice()]}
    replicas = Replicas(0, [written, other], [other], tensors, [], set(), whole)
    replicas.look([], [], [])
    assert replicas.summary(lambda place: [1])
    theirs = {other.claim(WHOLE if whole else SAMPLES): {"model/other": 7}}
    assert ["model/other"] == replicas.differing(theirs).names_of(Gone.LOST)


class _OfDeviceInside(torch.Tensor):
    """A tensor that nobody may ask, inside of a list."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"asked for its {func}")


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "of this rank already"])
def test_the_writers_thread_asks_no_tensor_in_a_list(is_known: bool) -> None:
    """The forms of tensors in a list or object are recorded at the call, too."""
    form, name = ("float32", (3,)), "scheduler/averages/0"
    averages = torch.zeros(3).as_subclass(_OfDeviceInside), torch.zeros(3).as_subclass(_OfDeviceInside)
    own_names = {name} if is_known else set()
    copies = [Replica("scheduler", 0, name, form, 12, 1, "scheduler")]
    copies += [Replica("scheduler", 1, "scheduler/averages/1", form, 12, 1, "scheduler")]
    tree = {"averages": list(averages)}
    values = Values("scheduler", 1, tree, None, own_names, averages, copies)
    compared = copies[1:] if is_known else copies
    replicas = Replicas(0, copies, compared, {"scheduler": averages}, [values], own_names, True)
    assert values.digest != Values("scheduler", 1, tree, None, own_names).digest
    own = replicas.differing({values.claim: {}})
    assert [None, None] == own.values["scheduler"].value["averages"]
    assert [copy.name for copy in copies] == own.names_of(Gone.LOST)  # each once
