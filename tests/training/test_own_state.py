"""Hooks, and state of a user's own: what torch's load_state_dict calls is called, and what was saved comes back."""

from __future__ import annotations

import collections
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, load_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import OptimizerMismatch, UnsafePickle, UnsupportedState
from nxd_ckpt.verify import verify_checkpoint

pytestmark = [pytest.mark.plain, pytest.mark.once]

Model = torch.nn.Module


def trained(model: Model, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


class Gate(Model):
    """Derives a buffer that is in no state dict from its weight, after each load."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4))
        self.refreshed: list[str] = []
        self.register_load_state_dict_post_hook(lambda module, keys: module.refresh())

    def refresh(self) -> None:
        self.scale = 1 / (1 + self.w.detach())
        self.refreshed.append("refreshed")


class Observer(Model):
    """Its buffer grows, so that a fresh one has another shape than a saved one, as torch.ao's observers."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(size)))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Renaming(Model):
    """Takes the names of an older version of it."""

    def __init__(self, name: str = "weight") -> None:
        super().__init__()
        self.inner = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(3))})
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Model, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}inner.w" in state:
            state[f"{prefix}inner.weight"] = state.pop(f"{prefix}inner.w")


class Extra(Model):
    """Extra state of many kinds, as TransformerEngine's in a BytesIO."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "in a sequence"])
def test_hooks_after_a_load_are_called(tmp_path: Path, compiled: bool) -> None:
    """Once, when everything is loaded, the inner modules' first."""
    one, other = Gate(), Gate()
    one.w.data.fill_(4.0)
    wrap: Callable[[Model], Model] = (lambda gate: torch.nn.Sequential(gate, torch.nn.Linear(4, 4))) if compiled else (
        lambda gate: gate
    )
    root, loaded = wrap(one), wrap(other)
    called: list[str] = []
    loaded.register_load_state_dict_post_hook(lambda module, keys: called.append("root"))
    save_checkpoint(tmp_path, "t", root)
    load_checkpoint(tmp_path, "t", loaded)
    assert (["refreshed"], ["root"]) == (other.refreshed, called)
    assert torch.equal(torch.full((4,), 0.2), other.scale)


def test_a_module_that_loads_in_its_own_way_does(tmp_path: Path) -> None:
    """Beside others, which are loaded as ever; a fresh one may have other shapes."""
    saved = torch.nn.Sequential(torch.nn.Linear(2, 2), Observer(5), torch.nn.BatchNorm1d(3))
    live = torch.nn.Sequential(torch.nn.Linear(2, 2), Observer(), torch.nn.BatchNorm1d(3))
    save_checkpoint(tmp_path, "t", saved)
    load_checkpoint(tmp_path, "t", live)
    expected = saved.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in live.state_dict().items())
    assert torch.equal(torch.arange(5.0), live.get_buffer("1.seen"))


def test_hooks_before_a_load_see_the_state(tmp_path: Path) -> None:
    """An old tag loads into a model that renames what it had."""
    old = torch.nn.Sequential(Renaming("w"))
    old.get_parameter("0.inner.w").data.fill_(7.0)
    save_checkpoint(tmp_path, "t", old)
    live = torch.nn.Sequential(Renaming(), torch.nn.Identity())
    load_checkpoint(tmp_path, "t", live)
    assert torch.equal(torch.full((3,), 7.0), live.get_parameter("0.inner.weight"))


def test_a_lazy_module_gets_its_shape_from_the_tag(tmp_path: Path) -> None:
    """Before its first batch it has nothing to save."""
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    with pytest.raises(UnsupportedState, match=r"model/0\.(weight|bias) has no shape yet"):
        save_checkpoint(tmp_path, "t", lazy)
    lazy(torch.ones(1, 5))
    save_checkpoint(tmp_path, "t", lazy)
    fresh = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    load_checkpoint(tmp_path, "t", fresh)
    assert torch.equal(lazy(torch.ones(1, 5)), fresh(torch.ones(1, 5)))


def _buffer() -> io.BytesIO:
    buffer = io.BytesIO(b"amax")
    buffer.seek(2)
    return buffer


KINDS: dict[str, Callable[[], Any]] = {
    "a tuple": lambda: (1, (2.5, "x")),
    "a size": lambda: torch.Size([2, 3]),
    "a deque": lambda: collections.deque([1.0, torch.ones(2)], maxlen=4),
    "nested": lambda: {"a": [{"b": (1, [torch.zeros(2)])}], "c": None},
    "a defaultdict": lambda: collections.defaultdict(int, {"a": 1}),
    "a set": lambda: {1, 2},
    "bytes": lambda: b"abc",
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple, collections.deque)):
        alike = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return alike and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("use_xser", [False, True], ids=["pt", "xser"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_come_back_as_what_they_were(tmp_path: Path, kind: str, use_xser: bool) -> None:
    """In extra state, in an optimizer's state, and in its param groups; into fresh objects."""
    expected = KINDS[kind]()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Extra(KINDS[kind]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model[:1], optimizer)
    optimizer.state[model.get_parameter("0.weight")]["own"] = KINDS[kind]()
    optimizer.param_groups[0]["own"] = KINDS[kind]()
    save_checkpoint(tmp_path, "t", model, optimizer, use_xser=use_xser)
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 4), Extra())
    other = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    other.param_groups[0]["own"] = None
    load_checkpoint(tmp_path, "t", fresh, other)
    assert same(expected, fresh[1].state)
    assert same(expected, other.state[fresh.get_parameter("0.weight")]["own"])
    assert same(expected, other.param_groups[0]["own"])
    assert () == verify_checkpoint(tmp_path).problems


def test_a_buffer_in_memory_comes_back(tmp_path: Path) -> None:
    """With its position."""
    save_checkpoint(tmp_path, "t", Extra(_buffer()))
    fresh = Extra()
    load_checkpoint(tmp_path, "t", fresh)
    assert (b"amax", 2) == (fresh.state.getvalue(), fresh.state.tell())


class Opaque:
    """Of a class that a load refuses."""


def test_what_a_load_refuses_is_refused_at_the_save(tmp_path: Path) -> None:
    """By name, before anything is written; of the model, of state, and of param groups."""
    model = torch.nn.Linear(4, 4)
    in_state, in_group = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    in_state.state[model.weight]["own"] = Opaque()
    in_group.param_groups[0]["fn"] = torch.zeros_like
    one_way = type("OneWay", (Model,), {"get_extra_state": lambda self: 1})()
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (Extra(Opaque()), None, UnsafePickle, "model/_extra_state"),
        (model, in_state, UnsafePickle, "optimizer/state/0/own"),
        (model, in_group, UnsafePickle, "param_groups"),
        (one_way, None, UnsupportedState, "model/_extra_state: OneWay has get_extra_state"),
    ]
    for live, optimizer, kind, match in cases:
        with pytest.raises(kind, match=match):
            save_checkpoint(tmp_path, "t", live, optimizer)
        close_checkpointers()
        assert not (tmp_path / "t").exists()


class LossScale(torch.optim.SGD):
    """Has more in its state dict than torch's, and takes it back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.loss_scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loss_scale": self.loss_scale}

    def load_state_dict(self, state_dict: Any) -> None:
        state = dict(state_dict)
        self.loss_scale = state.pop("loss_scale")
        super().load_state_dict(state)


class Preconditioned(torch.optim.Optimizer):
    """A matrix for each parameter, of another shape than it; a number for each of its rows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                rows = parameter.shape[0]
                state.update(L=torch.zeros(rows, rows), rows=torch.zeros(rows), nested={"inv": [torch.eye(rows)]})
            grad = parameter.grad.reshape(parameter.shape[0], -1)
            state["L"] += grad @ grad.T
            state["rows"] += grad.square().sum(1)
            parameter.sub_(parameter.grad * 0.1)


def with_hook(params: Any) -> torch.optim.Optimizer:
    """Hooks that add to the state dict, and take it back."""
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    optimizer.loss_scale = 1.0  # type: ignore[attr-defined]

    def add(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "loss_scale": optimizer.loss_scale}

    def take(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        optimizer.loss_scale = state["loss_scale"]
        return {key: value for key, value in state.items() if key != "loss_scale"}

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)
    return optimizer


@pytest.mark.parametrize("make", [LossScale, Preconditioned, with_hook])
def test_an_optimizer_of_ones_own_goes_on(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Into a fresh one: its own state, and the next steps, are those of the run that was not interrupted."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6)
    optimizer = make(model.parameters())
    trained(model, optimizer)
    if hasattr(optimizer, "loss_scale"):
        optimizer.loss_scale = 512.0
    save_checkpoint(tmp_path, "t", model, optimizer)
    expected = copy.deepcopy(optimizer.state_dict())
    fresh = torch.nn.Linear(4, 6)
    other = make(fresh.parameters())
    load_checkpoint(tmp_path, "t", fresh, other)
    assert same(expected, other.state_dict())
    for one, its in ((model, optimizer), (fresh, other)):
        trained(one, its, 3)
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))


def test_own_state_that_nothing_takes_back_is_refused(tmp_path: Path) -> None:
    """At the save, and where another class loads it."""
    model = torch.nn.Linear(4, 4)
    adding = torch.optim.SGD(model.parameters(), lr=0.1)
    adding.register_state_dict_post_hook(lambda optimizer, state: {**state, "own": 1})
    with pytest.raises(UnsupportedState, match="has own beside state and param_groups"):
        save_checkpoint(tmp_path, "t", model, adding)
    save_checkpoint(tmp_path, "t", model, LossScale(model.parameters()))
    with pytest.raises(OptimizerMismatch, match="holds loss_scale beside"):
        load_checkpoint(tmp_path, "t", model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_hooks_after_an_optimizers_load_are_called(tmp_path: Path) -> None:
    """Once, with everything in its place."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    save_checkpoint(tmp_path, "t", model, optimizer)
    fresh = torch.optim.AdamW(model.parameters())
    seen: list[float] = []
    fresh.register_load_state_dict_post_hook(lambda one: seen.append(float(one.state[model.weight]["step"])))
    load_checkpoint(tmp_path, "t", model, fresh)
    assert [2.0] == seen


def test_own_state_is_taken_to_other_sizes(tmp_path: Path) -> None:
    """It is the same on all ranks."""
    model = torch.nn.Linear(4, 4)
    optimizer = LossScale(model.parameters())
    trained(model, optimizer)
    optimizer.loss_scale = 8.0
    for rank in range(2):
        topology = Topology(dp=2, rank=rank)
        save_checkpoint(tmp_path, "t", model, optimizer, topology=topology, run_id="x", async_save=True)
    close_checkpointers()
    fresh = torch.nn.Linear(4, 4)
    other = LossScale(fresh.parameters())
    load_checkpoint(tmp_path, "t", fresh, other, topology=Topology())
    assert 8.0 == other.loss_scale


def test_nested_tensors_are_refused_by_name(tmp_path: Path) -> None:
    """In a model and in an optimizer, with what to keep in their place; of both layouts."""
    parts = [torch.ones(2), torch.ones(3)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[model.weight]["ragged"] = nested
        with pytest.raises(UnsupportedState, match=r"optim/weight/ragged is a nested tensor.*unbind"):
            save_checkpoint(tmp_path, "t", model, optimizer)
        model.register_buffer("ragged", nested)
        with pytest.raises(UnsupportedState, match=r"model/ragged is a nested tensor.*unbind"):
            save_checkpoint(tmp_path, "t", model)
    close_checkpointers()
    assert not (tmp_path / "t").exists()
