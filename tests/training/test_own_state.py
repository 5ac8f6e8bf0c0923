"""Hooks, and state of a user's own: what torch's load_state_dict calls is called, and what was saved comes back."""

import collections
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nxd_ckpt import Topology, load_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import OptimizerMismatch, UnsafePickle, UnsupportedState
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.support.stateful import Extra

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
    "a buffer in memory": _buffer,
    "a tuple": lambda: (1, (2.5, "x")),
    "a size": lambda: torch.Size([2, 3]),
    "a deque": lambda: collections.deque([1.0, torch.ones(2)], maxlen=4),
    "nested": lambda: {"a": [{"b": (1, [torch.zeros(2)])}], "c": None},
    "a defaultdict": lambda: collections.defaultdict(int, {"a": 1}),
    "a set": lambda: {1, 2},
    "bytes": lambda: b"abc",
}


def text(value: Any) -> str:
    """All of a value, as text."""
    return repr((value.getvalue(), value.tell()) if isinstance(value, io.BytesIO) else value)


@pytest.mark.parametrize("use_xser", [False, True], ids=["pt", "xser"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_come_back_as_what_they_were(tmp_path: Path, kind: str, use_xser: bool) -> None:
    """In extra state, in an optimizer's state, and in its param groups; into fresh objects."""
    expected = text(KINDS[kind]())
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
    own = [fresh[1].state, other.state[fresh.get_parameter("0.weight")]["own"], other.param_groups[0]["own"]]
    assert [expected] * 3 == list(map(text, own))
    assert () == verify_checkpoint(tmp_path).problems


class Opaque:
    """Of a class that a load refuses."""


def test_what_a_load_refuses_is_refused_at_the_save(tmp_path: Path) -> None:
    """By name, before anything is written; of the model, of state, and of param groups."""
    model = torch.nn.Linear(4, 4)
    in_state, in_group = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    in_state.state[model.weight]["own"] = Opaque()
    in_group.param_groups[0]["fn"] = torch.zeros_like
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (Extra(Opaque()), None, UnsafePickle, "model/_extra_state"),
        (model, in_state, UnsafePickle, "optimizer/state/0/own"),
        (model, in_group, UnsafePickle, "param_groups"),
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
    expected = text(optimizer.state_dict())
    fresh = torch.nn.Linear(4, 6)
    other = make(fresh.parameters())
    load_checkpoint(tmp_path, "t", fresh, other)
    assert expected == text(other.state_dict())
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


class Stage(Model):
    """What NxD's pipeline model offers; names are those of the whole model."""

    def __init__(self, *layers: Model) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def local_modules(self) -> list[Model]:
        return list(self.layers)

    def local_state_dict(self, **options: Any) -> dict[str, Any]:
        states = enumerate(layer.state_dict(**options) for layer in self.layers)
        return {f"model.layers.{7 + number}.{name}": value for number, state in states for name, value in state.items()}

    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("model.state_dict() is not supported in pipeline mode")


@pytest.mark.parametrize("pp", [1, 2])
def test_hooks_and_own_state_of_a_pipeline_stage(tmp_path: Path, pp: int) -> None:
    """Hooks before and after, methods of modules' own, and extra state."""
    gate, fresh, renaming, extra, observer = Gate(), Gate(), Renaming("w"), Extra(), Observer()
    saved = Stage(gate, Observer(5), Extra({"n": 5}), renaming, linear := torch.nn.Linear(2, 2))
    live = Stage(fresh, observer, extra, renamed := Renaming(), other := torch.nn.Linear(2, 2))
    gate.w.data.fill_(4.0)
    renaming.get_parameter("inner.w").data.fill_(7.0)
    for rank in range(pp):
        model = saved if rank == 0 else Stage()
        save_checkpoint(tmp_path, "t", model, topology=Topology(pp=pp, rank=rank), run_id="x", async_save=True)
    close_checkpointers()
    load_checkpoint(tmp_path, "t", live, topology=Topology(pp=pp))
    assert torch.equal(torch.full((4,), 0.2), fresh.scale)
    assert ["refreshed"] == fresh.refreshed
    assert torch.equal(torch.arange(5.0), observer.get_buffer("seen"))
    assert {"n": 5} == extra.state
    assert torch.equal(torch.full((3,), 7.0), renamed.get_parameter("inner.weight"))
    assert torch.equal(linear.weight, other.weight)


class Computing(torch.nn.Linear):
    """Its state dict has what it computes, in the place of its parameters or beside them."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.kind, self.loads = kind, 0

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        if self.kind == "norm":
            return {**state, "norm": self.weight.norm().detach()}
        if self.kind == "number":
            return {**state, "epoch": 7}
        change = {"clone": torch.clone, "double": lambda one: one * 2, "wide": torch.Tensor.double}
        return {name: change.get(self.kind, lambda one: one)(value) for name, value in state.items()}


class TakingBack(Computing):
    """With a load_state_dict of its own."""

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        self.loads += 1
        half = 2 if self.kind == "double" else 1
        state = {name: value / half for name, value in state_dict.items() if name in ("weight", "bias")}
        return super().load_state_dict(state, *args, **options)


WRAPPERS: dict[str, Callable[[Model], Model]] = {
    "bare": lambda one: one,
    "compiled": lambda one: torch.compile(one),  # type: ignore[dict-item, return-value]
    "replicated": torch.nn.DataParallel,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["plain", "clone", "double", "wide", "norm", "number"])
def test_a_load_state_dict_of_the_models_own_is_called(tmp_path: Path, kind: str, wrapper: str) -> None:
    """Once, with everything that was saved."""
    saved, live = TakingBack(kind), TakingBack(kind)
    save_checkpoint(tmp_path, "t", WRAPPERS[wrapper](saved))
    load_checkpoint(tmp_path, "t", WRAPPERS[wrapper](live))
    assert torch.equal(saved.weight, live.weight)
    assert torch.equal(saved.bias, live.bias)
    assert 1 == live.loads


def test_hooks_are_called_after_a_load_of_a_hugging_face_directory(tmp_path: Path) -> None:
    """And modules that load in a way of their own do."""
    save_file({"0.w": torch.full((4,), 4.0), "1.seen": torch.arange(3.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    rules = [{"nxd": name, "hf": name} for name in ("0.w", "1.seen")]
    (tmp_path / "mapping.json").write_text(json.dumps({"format_version": 1, "name": "tiny", "rules": rules}))
    gate = Gate()
    live = torch.nn.Sequential(gate, Observer(3))
    load_checkpoint(tmp_path, model=live, mapping=str(tmp_path / "mapping.json"))
    assert ["refreshed"] == gate.refreshed
    assert torch.equal(torch.full((4,), 0.2), gate.scale)
    assert torch.equal(torch.arange(3.0), live.get_buffer("1.seen"))


def test_what_is_left_out_of_a_load_is_not_missed_by_the_models_own(tmp_path: Path) -> None:
    saved, live = TakingBack("plain"), TakingBack("plain")
    before = live.bias.detach().clone()
    save_checkpoint(tmp_path, "t", saved)
    load_checkpoint(tmp_path, "t", live, ignore_keys=["model/bias"])
    assert torch.equal(saved.weight, live.weight)
    assert torch.equal(before, live.bias)


@pytest.mark.parametrize("kind", ["clone", "wide"])
def test_copies_in_a_state_dict_are_loaded_as_torch_does(tmp_path: Path, kind: str) -> None:
    """Into the parameters of the same names, cast to their dtype."""
    saved, live = Computing(kind), Computing(kind)
    save_checkpoint(tmp_path, "t", saved)
    load_checkpoint(tmp_path, "t", live)
    assert torch.equal(saved.weight, live.weight)


def test_copies_in_a_state_dict_are_cut_as_the_parameters_are(tmp_path: Path) -> None:
    """NxD's attributes are on the parameters, and not on what is computed from them."""
    for rank in range(2):
        model = Computing("clone")
        for parameter in model.parameters():
            vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1, num_partitions=2)
            parameter.data.fill_(1.0)
        save_checkpoint(tmp_path, "t", model, topology=Topology(tp=2, rank=rank), run_id="x", async_save=True)
    close_checkpointers()
    whole: dict[str, Any] = {}
    load_checkpoint(tmp_path, "t", whole, topology=Topology())
    assert {"weight": (8, 4), "bias": (8,)} == {name: tuple(value.shape) for name, value in whole.items()}


@pytest.mark.parametrize(("kind", "name"), [("norm", "norm"), ("number", "epoch")])
def test_what_a_state_dict_computes_and_nothing_takes_is_refused_at_the_save(
    tmp_path: Path, kind: str, name: str
) -> None:
    """By name; both remedies work."""
    model = Computing(kind)
    with pytest.raises(UnsupportedState, match=f"model/{name} is computed by state_dict"):
        save_checkpoint(tmp_path, "t", model)
    close_checkpointers()
    save_checkpoint(tmp_path, "t", model, ignore_keys=[f"model/{name}"])
    load_checkpoint(tmp_path, "t", model, ignore_keys=[f"model/{name}"])
    save_checkpoint(tmp_path / "dict", "t", model.state_dict())
    whole: dict[str, Any] = {}
    load_checkpoint(tmp_path / "dict", "t", whole)
    assert name in whole


def test_extra_state_that_comes_back_by_no_method_may_be_left_out(tmp_path: Path) -> None:
    """As the error says."""
    one_way = type("OneWay", (Model,), {"get_extra_state": lambda self: 1})()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), one_way)
    with pytest.raises(UnsupportedState, match=r"OneWay has get_extra_state.* ignore_keys=\['model/1._extra_state'\]"):
        save_checkpoint(tmp_path, "t", model)
    close_checkpointers()
    save_checkpoint(tmp_path, "t", model, ignore_keys=["model/1._extra_state"])


def test_matrices_of_a_parameter_without_a_name_come_back(tmp_path: Path) -> None:
    """Into a fresh optimizer of the same class; of torch's own classes other shapes mean another order."""
    model, parameter = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(4, 6))
    parameter.grad = torch.ones(4, 6)
    optimizer = Preconditioned([parameter])
    optimizer.step()
    save_checkpoint(tmp_path, "t", model, optimizer)
    other = torch.nn.Parameter(torch.ones(4, 6))
    fresh = Preconditioned([other])
    load_checkpoint(tmp_path, "t", model, fresh)
    assert text(dict(optimizer.state[parameter])) == text(dict(fresh.state[other]))
