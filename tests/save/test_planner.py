"""Plan reuse: whatever changed since the last save, a Checkpointer writes what a fresh one would, byte for byte."""

import gc
import io
import json
import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from nxd_ckpt import Checkpointer, Partition, Topology, open_checkpoint
from nxd_ckpt.errors import SaveFailed, UnsupportedState
from nxd_ckpt.formats.state import SaveState
from nxd_ckpt.saving.plan import SavePlan, plan_save
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import Hook, HookedStorage, Operation
from tests.live.doubles import ExpertShardedOptimizer, ShardedOptimizer

MIB = 2**20


class Net(torch.nn.Module):
    """Parameters of equal shapes, a buffer of no dimensions, an empty one, and extra state of all kinds of values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, 4, bias=False)
        self.middle = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.extra: dict[Any, Any] = {"amax": [1.0, 2.0], "seen": 0, "history": torch.arange(3.0), "pair": (1, "a")}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@dataclass
class Job:
    """What a rank passes to ``save``; the steps of a test change it, or what it holds."""

    model: Any = None
    optimizer: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def save(self, saver: Checkpointer, tag: str) -> Any:
        return saver.save(tag, self.model, self.optimizer, async_save=True, **self.arguments)


Step = Callable[[Job], object]


def job() -> Job:
    """A model and its optimizer in two param groups, before the first training step."""
    torch.manual_seed(0)
    net = Net()
    groups: list[dict[str, Any]] = [
        {"params": [net.embed.weight, net.head.weight]},
        {"params": list(net.middle.parameters()), "note": "b"},
    ]
    return Job(net, torch.optim.AdamW(groups, lr=0.1))


def trained() -> Job:
    found = job()
    train(found)
    return found


def train(found: Job) -> None:
    """Gradients for all parameters that are trained; another value for each tensor, and for numbers beside them."""
    parameters = [parameter for group in found.optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0) if parameter.requires_grad else None
    found.optimizer.step()
    for group in found.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5 if isinstance(group["lr"], float) else group["lr"]
    if isinstance(found.model, Net) and isinstance(found.model.extra.get("seen"), int):
        found.model.extra["seen"] += 200  # one byte of the pickle, then three


def same_as_fresh(path: Path, jobs: Sequence[Job], steps: Sequence[Step], **options: Any) -> None:
    """Save the ranks' ``jobs`` with one Checkpointer each, and again after every step; compare with fresh ones."""
    with ExitStack() as stack:
        savers = [stack.enter_context(saver) for saver in _savers(path / "reused", len(jobs), options)]
        for number, step in enumerate([lambda _: None, *steps]):
            for each in jobs:
                step(each)
            tag, fresh = f"step_{number}", path / f"fresh_{number}"
            with ExitStack() as others:
                written = [others.enter_context(saver) for saver in _savers(fresh, len(jobs), options)]
                _save(jobs, written, tag)
            _save(jobs, savers, tag)
            assert contents(fresh / tag) == contents(path / "reused" / tag), f"after step {number}"
            assert () == verify_checkpoint(path / "reused", tag).problems


def contents(tag: Path) -> dict[str, Any]:
    """Every file of a tag but `done`; of the manifest, what does not name the attempt."""
    files: dict[str, Any] = {str(file.relative_to(tag)): file.read_bytes() for file in tag.rglob("*") if file.is_file()}
    del files["done"]
    manifest = json.loads(files["manifest.json"])
    files["manifest.json"] = {key: manifest[key] for key in ("parts", "parameters", "ranks", "topology")}
    return files


def _savers(path: Path, world: int, options: dict[str, Any]) -> list[Checkpointer]:
    given = {"durable": False, "run_id": None if world == 1 else "run", "timeout": 20.0, **options}
    return [Checkpointer(path, topology=Topology(dp=world, rank=rank), **given) for rank in range(world)]


def _save(jobs: Sequence[Job], savers: Sequence[Checkpointer], tag: str) -> None:
    pending = [each.save(saver, tag) for each, saver in zip(jobs, savers, strict=True)]
    for save in pending:
        save.wait()


# Steps. Each can be taken in any state that the others leave.


def values(found: Job) -> None:
    with torch.no_grad():
        for parameter in found.model.parameters():
            if 0 not in parameter.stride():  # expanded: several elements are one
                parameter.add_(1.0)
        found.model.scale.fill_(torch.randint(9, ()).item())
        found.model.extra["history"] = torch.rand(3)


def option(name: str, value: Any) -> Step:
    def step(found: Job) -> None:
        found.optimizer.param_groups[0][name] = value

    step.__name__ = f"{name}={value!r}"
    return step


def extra(name: Any, value: Any) -> Step:
    def step(found: Job) -> None:
        found.model.extra[name] = value() if callable(value) else value

    # Not as repr: the same in every process, where several share the tests.
    step.__name__ = f"extra {name!r}={'tensors' if callable(value) else repr(value)}"
    return step


def argument(name: str, value: Any) -> Step:
    def step(found: Job) -> None:
        found.arguments.pop(name, None)
        if value is not None:
            found.arguments[name] = value

    step.__name__ = f"{name}={value!r}"
    return step


def attributes(**wanted: Any) -> Step:
    def step(found: Job) -> None:
        for name, value in wanted.items():
            setattr(found.model.embed.weight, name, value)

    step.__name__ = f"attributes {wanted}"
    return step


def mutated_ordering(found: Job) -> None:
    weight = found.model.embed.weight
    weight.tensor_model_parallel, weight.partition_dim, weight.num_partitions = True, 0, 2
    weight.rank_ordering = getattr(weight, "rank_ordering", None) or [0, 1]
    weight.rank_ordering.reverse()


def attributes_gone(found: Job) -> None:
    vars(found.model.embed.weight).clear()


def another_group(found: Job) -> None:
    found.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def frozen(found: Job) -> None:
    found.model.head.weight.requires_grad_(not found.model.head.weight.requires_grad)


def entry_added(found: Job) -> None:
    found.optimizer.state[found.model.embed.weight]["added"] = torch.ones(4, 3)


def entry_removed(found: Job) -> None:
    found.optimizer.state[found.model.embed.weight].pop("exp_avg", None)


def state_dropped(found: Job) -> None:
    found.optimizer.state.pop(found.model.head.weight, None)


def same_form(found: Job) -> None:
    found.model.middle.bias.data = torch.rand(3).to(found.model.middle.bias.dtype)
    found.optimizer.state[found.model.head.weight]["exp_avg"] = torch.rand(4, 3)


def number_for_tensor(found: Job) -> None:
    state = found.optimizer.state[found.model.middle.bias]
    state["seen"] = 4.0 if isinstance(state.get("seen"), torch.Tensor) else torch.tensor(4.0)


def data(make: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    def step(found: Job) -> None:
        found.model.embed.weight.data = make(found.model.embed.weight.data)

    return step


def all_bfloat16(found: Job) -> None:
    found.model.bfloat16()


def tied_data(found: Job) -> None:
    found.model.head.weight.data = found.model.embed.weight.data


def untied_data(found: Job) -> None:
    found.model.head.weight.data = found.model.embed.weight.data.clone() + 1


def tied_module(found: Job) -> None:
    found.model.head.weight = found.model.embed.weight


def untied_module(found: Job) -> None:
    found.model.head.weight = torch.nn.Parameter(torch.rand(4, 3))


def reordered(found: Job) -> None:
    found.optimizer.param_groups[0]["params"].reverse()


def renamed(found: Job) -> None:
    modules = found.model._modules
    old, new = ("head", "tail") if "head" in modules else ("tail", "head")
    modules[new] = modules.pop(old)
    found.model.__dict__["head"] = modules[new]  # for the other steps


def modules_reordered(found: Job) -> None:
    found.model._modules["embed"] = found.model._modules.pop("embed")


def module_added(found: Job) -> None:
    found.model.add_module(f"more{len(found.model._modules)}", torch.nn.Linear(2, 2))


def buffer(make: Callable[[], torch.Tensor]) -> Step:
    def step(found: Job) -> None:
        found.model.scale = make()

    return step


def shared_entry(found: Job) -> None:
    states = [found.optimizer.state[found.model.embed.weight], found.optimizer.state[found.model.head.weight]]
    states[0]["shared"] = states[1]["shared"] = torch.rand(4, 3)


def unshared_entry(found: Job) -> None:
    for parameter in (found.model.embed.weight, found.model.head.weight):
        found.optimizer.state[parameter]["shared"] = torch.rand(4, 3)


def same_list_twice(found: Job) -> None:
    found.model.extra["amax"] = found.model.extra["again"] = [1.0, len(found.model.extra)]


def equal_lists(found: Job) -> None:
    found.model.extra["amax"], found.model.extra["again"] = [*found.model.extra["amax"]], [*found.model.extra["amax"]]


def new_optimizer(found: Job) -> None:
    found.optimizer = torch.optim.SGD(found.model.parameters(), lr=0.1, momentum=0.9)


def key_of_another_type(found: Job) -> None:
    found.model.extra = {True if key == 1 else key: value for key, value in found.model.extra.items()}


COUNTED = io.BytesIO()
"""Extra state that changes where nobody sees it."""

PART = torch.arange(24.0).reshape(4, 6)


def counted(found: Job) -> None:
    COUNTED.write(b"1")
    found.model.extra["counted"] = COUNTED


def changed_within(found: Job) -> None:
    """Objects that stay the same, and hold something else."""
    values: dict[str, Any] = found.model.extra
    numbers = values.setdefault("set", set())
    numbers.add(len(numbers))
    values.setdefault("bytes", bytearray()).append(1)
    values.setdefault("array", np.zeros(2))[0] += 1
    values.setdefault("number", np.float64(1.0))
    values.setdefault("counts", defaultdict(int))["a"] += 1


CHAINS: dict[str, list[Step]] = {
    "lr": [
        option("lr", value)
        for value in (
            *(255, 256, 65535, 65536, 0.0, -0.0, 0, False, 1, True, None, 1.0, 1.0 + 2**-52, float("nan")),
            *(torch.tensor(0.1), "x"),
        )
    ],
    "betas": [option("betas", value) for value in ((0.8, 0.9), [0.8, 0.9], (0.8, 0.9, 0.7), (0.8, (0.9,)), None)],
    "containers": [
        extra(1, "int"),
        extra("amax", lambda: OrderedDict(a=torch.ones(2))),
        extra("amax", lambda: {"a": torch.ones(2)}),
        extra("amax", lambda: {"b": torch.ones(2)}),
        extra("amax", lambda: (torch.ones(2), 1)),
        extra("amax", lambda: [torch.ones(2), 1]),
        extra("amax", lambda: [[torch.ones(2)], 1]),
        extra("amax", lambda: [[torch.ones(2), 1]]),
        extra("amax", lambda: [1, torch.ones(2)]),
        extra("amax", lambda: [1, 1.0]),
        key_of_another_type,
        extra("amax", [1, (2,)]),
        extra("amax", [1, torch.Size([2])]),
        extra("amax", [[1], 2]),
        extra("amax", {0.0: 1}),
        extra("amax", {-0.0: 1}),
        extra("amax", {(1, (0.0,)): 1}),
        extra("amax", {(True, (-0.0,)): 1}),
        extra("amax", {"a": 1, "b": 1}),
        extra("amax", {"b": 1, "a": 1}),
        same_list_twice,
        equal_lists,
        same_list_twice,
        changed_within,
        changed_within,
    ],
    "notes": [
        option("note", value)
        for value in ("a", "b", "é" * 300, b"a", b"b", 1j, torch.float16, torch.int8, torch.Size([2]), torch.Size([3]))
    ],
    "data": [
        data(lambda old: torch.rand(3, 4).T),
        data(lambda old: torch.rand(8, 3)[::2]),
        data(lambda old: torch.rand(1, 3).expand(4, 3)),
        data(lambda old: PART[:, 1:4]),
        data(lambda old: PART[:, 2:5]),
        data(lambda old: torch.rand(4, 3, dtype=torch.float64)),
        data(lambda old: torch.rand(4, 3, dtype=torch.bfloat16)),
        data(lambda old: torch.rand(3, 4)),
        data(lambda old: torch.rand(12)),
        data(lambda old: torch.zeros(0)),
        data(lambda old: torch.zeros(4, 3)),
    ],
    "buffers": [
        buffer(lambda: torch.tensor([1 + 2j, 3 - 1j]).conj()),
        buffer(lambda: torch.tensor([1 + 2j, 3 - 1j])),
        buffer(lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag),
        buffer(lambda: torch.tensor([1.0, 2.0])),
        buffer(lambda: torch.tensor(1.0)),
        buffer(lambda: torch.tensor([1.0])),
        buffer(lambda: torch.tensor(True)),
        buffer(lambda: torch.tensor(3, dtype=torch.int8)),
    ],
    "arguments": [
        argument("use_xser", True),
        train,
        argument("use_xser", None),
        argument("partitions", {"middle.weight": Partition(0, num_partitions=1)}),
        argument("partitions", {"middle.weight": Partition(expert=True)}),
        train,
        argument("partitions", None),
        argument("user_content", {"epoch": 1}),
        argument("user_content", {"epoch": 2}),
        argument("user_content", None),
        argument("scheduler", {"last_epoch": 3}),
        argument("rank_content", {"position": torch.ones(2)}),
    ],
    "ties": [tied_data, values, untied_data, values, tied_module, values, untied_module, tied_data, tied_module],
    "optimizer": [new_optimizer, train, train, another_group, train, reordered, train, state_dropped, train],
    "attributes": [
        attributes(tensor_model_parallel=True, partition_dim=0, num_partitions=2),
        mutated_ordering,
        mutated_ordering,
        attributes(partition_dim=1),
        attributes(partition_stride=3),
        attributes(expert_model_parallel=True),
        attributes_gone,
    ],
    "model": [
        all_bfloat16,
        renamed,
        modules_reordered,
        module_added,
        frozen,
        values,
        counted,
        counted,
        same_list_twice,
    ],
    "entries": [
        entry_added,
        entry_removed,
        same_form,
        shared_entry,
        shared_entry,
        unshared_entry,
        shared_entry,
        number_for_tensor,
        number_for_tensor,
    ],
}


def _name(step: Any) -> str:
    return getattr(step, "__name__", "step").replace("<lambda>", "lambda")


@pytest.mark.parametrize(("kind", "use_xser"), [(kind, number % 4 < 2) for number, kind in enumerate(CHAINS)])
@pytest.mark.one_in(2)
def test_a_reused_plan_follows_one_change_after_the_other(tmp_path: Path, kind: str, use_xser: bool) -> None:
    """Each differs from the one before it by as little as can be."""
    found = trained()
    found.arguments["use_xser"] = use_xser
    same_as_fresh(tmp_path, [found], CHAINS[kind])


ANY = st.sampled_from([*chain(*CHAINS.values())])


@settings(max_examples=6, deadline=None)
@given(st.booleans(), st.lists(ANY, min_size=2, max_size=8))
@example(True, [argument("partitions", {"middle.weight": Partition(expert=True)}), entry_added])
def test_many_changes_in_any_order(tmp_path_factory: pytest.TempPathFactory, use_xser: bool, steps: list[Step]) -> None:
    """Changes that undo, hide or add to each other."""
    found = trained()
    found.arguments["use_xser"] = use_xser
    same_as_fresh(tmp_path_factory.mktemp("sequence"), [found], [_as_far_as_it_goes(step) for step in steps])


def _as_far_as_it_goes(step: Step) -> Step:
    def partial(found: Job) -> None:
        with suppress(RuntimeError, LookupError, TypeError, ValueError):  # it may have changed something
            step(found)
        if isinstance(found.optimizer, torch.optim.Optimizer):
            try:
                found.optimizer.state_dict()
            except KeyError:  # nobody can save an optimizer that keeps state of a parameter in none of its groups
                reject()

    return partial


def test_a_plan_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests are about does happen: values and numbers change, and nothing is planned again."""
    planned: list[SaveState] = []

    def counted_plan(state: SaveState, *where: Any, **how: Any) -> SavePlan:
        planned.append(state)
        return plan_save(state, *where, **how)

    monkeypatch.setattr("nxd_ckpt.saving.save_planner.plan_save", counted_plan)
    found = trained()
    with Checkpointer(tmp_path, durable=False) as saver:
        for number in range(4):
            train(found)
            found.save(saver, f"{number}")
    assert 1 == len(planned)


@pytest.mark.parametrize("kind", ["values", "tuples", "nested"])
def test_a_tuple_in_two_places_of_an_optimizers_state(tmp_path: Path, kind: str) -> None:
    """Its tensors are where they are, in every file; later tensors are not taken for others."""
    pair = {
        "values": lambda: (1, 2),
        "tuples": lambda: (torch.full((3,), 1.0),),
        "nested": lambda: ((torch.full((3,), 1.0), 4), 5),
    }[kind]()
    state = {"first": pair, "again": pair, "more": torch.full((3,), 2.0), "last": torch.full((3,), 3.0)}
    found = Job(None, {"state": {0: state}, "param_groups": [{"params": [0], "lr": 0.1}]})

    def another_rate(found: Job) -> None:
        found.optimizer["param_groups"][0]["lr"] += 1.0

    same_as_fresh(tmp_path, [found], [another_rate, another_rate])


def test_conjugates_are_not_ties(tmp_path: Path) -> None:
    """Two views of one memory that read it differently are two tensors."""
    values = torch.tensor([1 + 2j, 3 - 1j])
    model = {"plain": values, "conjugate": values.conj(), "imag": values.imag, "negative": values.conj().imag}
    with Checkpointer(tmp_path, durable=False) as saver:
        saver.save("t", model)
    found = open_checkpoint(tmp_path, "t").model_state()
    assert {name: value.tolist() for name, value in model.items()} == {k: v.tolist() for k, v in found.items()}


def test_what_becomes_unsupported_is_refused(tmp_path: Path) -> None:
    """As at a first save: a sparse entry is named as such, and the next good save succeeds."""
    entries = {"square_avg": torch.eye(3)}
    optimizer = {"state": {0: entries}, "param_groups": [{"params": [0]}]}
    with Checkpointer(tmp_path, durable=False) as saver:
        saver.save("dense", None, optimizer)
        entries["square_avg"] = torch.eye(3).to_sparse()
        with pytest.raises(UnsupportedState, match=r"layout torch\.sparse_coo"):
            saver.save("sparse", None, optimizer)
        entries["square_avg"] = torch.eye(3) * 2
        saver.save("good", None, optimizer)
    assert torch.equal(torch.eye(3) * 2, open_checkpoint(tmp_path, "good").optimizer_state()["state"][0]["square_avg"])


# ZeRO-1


def _zero1_jobs(**options: Any) -> list[Job]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
    groups = [{"params": [net[0].weight, net[1].bias]}, {"params": [net[1].weight, net[0].bias], "weight_decay": 0.0}]
    return [Job(net, ShardedOptimizer(groups, rank, [[0, 1]], lr=0.1, **options)) for rank in (0, 1)]


def _zero1_train(found: Job) -> None:
    for number, parameter in enumerate(found.model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    found.optimizer.step()


def _first_only(found: Job) -> None:
    found.model.zero_grad()
    found.model[0].weight.grad = torch.ones(5, 3)
    found.optimizer.step()


def _in_bfloat16(found: Job) -> None:
    found.model.bfloat16()


def _masters(found: Job) -> None:
    found.optimizer.save_master_weights = not found.optimizer.save_master_weights


def _cut(found: Job) -> None:
    found.model[0].weight.tensor_model_parallel, found.model[0].weight.partition_dim = True, 0


@pytest.mark.parametrize("use_xser", [False, True])
def test_a_reused_plan_follows_a_zero1_optimizer(tmp_path: Path, use_xser: bool) -> None:
    """Two ranks: state appears parameter by parameter, master weights come and go, weights change their dtype."""
    jobs = _zero1_jobs()
    for each in jobs:
        each.arguments["use_xser"] = use_xser
    steps = [_first_only, _first_only, _zero1_train, _masters, _cut, _in_bfloat16, _zero1_train, _masters]
    same_as_fresh(tmp_path, jobs, steps)


def test_a_reused_plan_follows_weights_that_are_left_out(tmp_path: Path) -> None:
    """They are left out, and back again."""
    jobs = _zero1_jobs(save_master_weights=True)
    for each in jobs:
        each.arguments["use_xser"] = True
    left_out = argument("avoid_saving_lower_precision_weights", True)
    given = argument("avoid_saving_lower_precision_weights", None)
    same_as_fresh(tmp_path, jobs, [_zero1_train, left_out, _zero1_train, given, _zero1_train])


def test_the_shapes_of_a_zero1_dict(tmp_path: Path) -> None:
    """Shards of the same form may be of a parameter with other padding: the index says which rows are real."""

    def jobs_of(rows: int) -> list[Job]:
        tree = {
            "state": {},
            "param_groups": [{"params": [0]}],
            "base_state": {0: {"exp_avg": torch.ones(3, 2)}},
            "shape_info": {0: torch.Size([rows, 2])},
        }
        return [Job(None, {**tree}, {"zero1_optimizer": True, "param_names": [["w"]]}) for _ in (0, 1)]

    def six_rows(found: Job) -> None:
        found.optimizer["shape_info"] = {0: torch.Size([6, 2])}

    same_as_fresh(tmp_path, jobs_of(5), [six_rows])


def _expert_job(stepped: Sequence[int]) -> Job:
    """Two ordinary parameters and two experts, all of one shape; those of ``stepped`` have optimizer state."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(4)]
    for parameter in parameters[2:]:
        parameter.expert_model_parallel = True  # type: ignore[attr-defined]
    optimizer = ExpertShardedOptimizer([{"params": parameters}], 0, [[0]], [[0]], lr=0.1)
    for number in stepped:
        parameters[number].grad = torch.full((2, 2), number + 1.0)
    optimizer.non_ep_zero_optimizer.step()
    optimizer.ep_zero_optimizer.step()
    names = ["a", "b", "c", "d"]
    return Job(dict(zip(names, parameters, strict=True)), optimizer)


def test_where_the_experts_state_begins(tmp_path: Path) -> None:
    """As many entries as before, more of them ordinary parameters': each is under its own name."""
    found = _expert_job([0, 2, 3])

    def other_parameters(found: Job) -> None:
        other = _expert_job([0, 1, 2])
        found.model, found.optimizer = other.model, other.optimizer

    same_as_fresh(tmp_path, [found], [other_parameters, lambda _: None])


# Staging


def _sized(*sizes: int) -> Step:
    def step(found: Job) -> None:
        torch.manual_seed(len(sizes))
        for number, size in enumerate(sizes):
            found.model[f"w{number}"] = torch.rand(size)
        for number in range(len(sizes), 8):
            found.model.pop(f"w{number}", None)
        found.arguments["user_content"] = {"sizes": sizes}

    return step


def _new_values(found: Job) -> None:
    for name in found.model:
        found.model[name] = torch.rand(found.model[name].shape)
    found.optimizer["param_groups"][0]["lr"] *= 300


@pytest.mark.parametrize("cap", [4 * MIB, None])
@pytest.mark.parametrize("use_xser", [False, True])
def test_states_that_grow_and_shrink_are_staged_apart(tmp_path: Path, cap: int | None, use_xser: bool) -> None:
    """In waves or at once, with an arena that grows: nothing is staged to where something else lies now."""
    small, large = _sized(10, 1000), _sized(1_200_000, 10, 400_000, 0, 90_000)
    optimizer = {"state": {}, "param_groups": [{"params": [], "lr": 1}]}
    found = Job({"w0": torch.ones(2)}, optimizer, {"use_xser": use_xser})
    steps = [small, _new_values, large, _new_values, small, _new_values, large]
    same_as_fresh(tmp_path, [found], steps, memory_cap=cap)


def _hooked(path: Path, hook: Hook) -> HookedStorage:
    return HookedStorage(LocalStorage(path, durable=False), hook)


class Switch:
    """A hook that fails writes while it is on."""

    def __init__(self, name: str, ending: str = "") -> None:
        self.name, self.ending, self.on = name, ending, False

    def __call__(self, operation: Operation) -> None:
        if self.on and operation.name == self.name and operation.key.endswith(self.ending):
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("use_xser", [False, True])
@pytest.mark.parametrize("operation", ["write_at", "create", "close"])
def test_a_good_save_after_a_failed_one(tmp_path: Path, operation: str, use_xser: bool) -> None:
    """Of the failed one nothing remains in the plan: not its values, not its tensors."""
    switch = Switch(operation, ".pt")
    found = trained()
    found.arguments["use_xser"] = use_xser
    with Checkpointer(tmp_path / "reused", storage=_hooked(tmp_path / "reused", switch)) as saver:
        found.save(saver, "first").wait()
        train(found)
        switch.on = True
        with pytest.raises(SaveFailed, match="No space left on device"):
            found.save(saver, "failed").wait()
        switch.on = False
        train(found)
        found.save(saver, "good").wait()
    with Checkpointer(tmp_path / "fresh", durable=False) as saver:
        found.save(saver, "good")
    assert contents(tmp_path / "fresh" / "good") == contents(tmp_path / "reused" / "good")


@pytest.mark.parametrize("use_xser", [False, True])
@pytest.mark.parametrize("change", [train, values, all_bfloat16, untied_data, renamed, another_group], ids=_name)
def test_changes_after_an_async_save_are_not_in_it(tmp_path: Path, change: Step, use_xser: bool) -> None:
    """What changes while a planned save is being written, numbers and dtypes too, is not in it."""
    found = trained()
    found.arguments["use_xser"] = use_xser
    written: list[Any] = []

    def hold(operation: Operation) -> None:
        if written and operation.name == "create":
            written.pop().wait(600)

    with Checkpointer(tmp_path / "reused", storage=_hooked(tmp_path / "reused", hold)) as saver:
        found.save(saver, "first").wait()
        train(found)
        with Checkpointer(tmp_path / "fresh", durable=False) as fresh:
            found.save(fresh, "t").wait()
        gate = threading.Event()
        written.append(gate)
        pending = found.save(saver, "t")
        change(found)
        assert not pending.done()
        gate.set()
    assert contents(tmp_path / "fresh" / "t") == contents(tmp_path / "reused" / "t")


@pytest.mark.parametrize("use_xser", [False, True])
def test_a_dropped_models_memory_is_free(tmp_path: Path, use_xser: bool) -> None:
    """Once a save is decided, neither plan nor threads hold on to the tensors that were saved."""
    found = trained()
    found.arguments["use_xser"] = use_xser
    memory = [StorageWeakRef(parameter.untyped_storage()) for parameter in found.model.parameters()]
    with Checkpointer(tmp_path, durable=False) as saver:
        for tag in ("first", "second"):
            found.save(saver, tag).wait()
        del found
        saver.save("other", {"w": torch.ones(2)}).wait()
        gc.collect()
        assert [True] * len(memory) == [held.expired() for held in memory]


def expires(memory: StorageWeakRef) -> bool:
    """Whether it is given back soon: after the decision, the background thread still tidies up."""
    deadline = time.monotonic() + 600
    while not memory.expired() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return memory.expired()


def test_the_last_saves_memory_is_free(tmp_path: Path) -> None:
    """Also before the next save, or the close."""
    model = {"w": torch.ones(1000)}
    memory = StorageWeakRef(model["w"].untyped_storage())
    with Checkpointer(tmp_path, durable=False) as saver:
        saver.save("only", model, async_save=True).wait()
        del model
        assert expires(memory)


def test_the_memory_of_a_failed_save_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once it was reported and another save followed: its error holds on to nothing that the Checkpointer keeps."""
    caplog.set_level(logging.CRITICAL, "nxd_ckpt")  # a captured record holds the error, and so its traceback
    switch = Switch("write_at")
    model = {"w": torch.ones(1000)}
    memory = StorageWeakRef(model["w"].untyped_storage())
    with Checkpointer(tmp_path, storage=_hooked(tmp_path, switch)) as saver:
        switch.on = True
        with suppress(SaveFailed):
            saver.save("failed", model)
        switch.on = False
        saver.save("good", {"w": torch.ones(2)})
        del model
        assert expires(memory)
