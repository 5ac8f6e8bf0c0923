"""Wrapped and unwrapped models load each other: torch.compile, data parallelism, activation checkpointing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nxd_ckpt import Topology, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import IncompatibleState, KeyMismatch, UnsupportedState

Model = torch.nn.Module


class Block(Model):
    """Has a module that is really called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.module(batch))
        return out


def plain() -> Model:
    return torch.nn.Sequential(Block(), torch.nn.Linear(4, 4))


def inner_compiled() -> Model:
    model = torch.nn.Sequential(Block(), torch.nn.Linear(4, 4))
    model[1] = torch.compile(model[1])  # type: ignore[assignment]
    return model


def checkpointed() -> Model:
    model = torch.nn.Sequential(Block(), torch.nn.Linear(4, 4))
    model[0] = checkpoint_wrapper(model[0])
    return model


WRAPPED: dict[str, Callable[[], Model]] = {
    "plain": plain,
    "compiled": lambda: torch.compile(plain()),  # type: ignore[dict-item, return-value]
    "a compiled layer": inner_compiled,
    "checkpointed": checkpointed,
    "DDP": lambda: torch.nn.parallel.DistributedDataParallel(plain()),
    "DataParallel": lambda: torch.nn.DataParallel(plain()),
    "compiled DDP": lambda: torch.compile(  # type: ignore[dict-item, return-value]
        torch.nn.parallel.DistributedDataParallel(checkpointed())
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, which DDP needs."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group') / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def made(kind: str, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = WRAPPED[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return model, optimizer


def values(model: Model, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    return [*model.parameters(), *model.buffers(), *moments]


@pytest.mark.parametrize("kind", WRAPPED)
def test_names_are_those_of_the_model_itself(tmp_path: Path, kind: str) -> None:
    """In the tag, of weights and of the optimizer."""
    expected, _ = made("plain", 1)
    save_checkpoint(tmp_path, "t", *made(kind, 1))
    names = {name for name in open_checkpoint(tmp_path).metadata if name.startswith("model/")}
    assert {f"model/{name}" for name in expected.state_dict()} == names
    assert "optim/0.module.weight/exp_avg" in open_checkpoint(tmp_path).metadata


@pytest.mark.parametrize("saved", WRAPPED)
def test_wrapped_and_unwrapped_load_each_other(tmp_path: Path, saved: str) -> None:
    """With the optimizer; tags too that have the names of wrappers, as those of earlier versions and of others have."""
    model, optimizer = made(saved, 1)
    save_checkpoint(tmp_path, "t", model, optimizer)
    topology = Topology()
    save_checkpoint(tmp_path / "old", "t", model.state_dict(), topology=topology)
    close_checkpointers()
    for number, live in enumerate(WRAPPED):
        other = made(live, number + 2)
        load_checkpoint(tmp_path, "t", *other)
        pairs = zip(values(model, optimizer), values(*other), strict=True)
        assert all(torch.equal(one, its) for one, its in pairs), live
        fresh, _ = made(live, number + 2)
        load_checkpoint(tmp_path / "old", "t", fresh)
        pairs = zip(model.parameters(), fresh.parameters(), strict=True)
        assert all(torch.equal(one, its) for one, its in pairs), live


def test_a_state_dict_of_a_wrapped_model_is_filled(tmp_path: Path) -> None:
    """From a tag with the model's own names."""
    model, _ = made("plain", 1)
    save_checkpoint(tmp_path, "t", model)
    state: dict[str, Any] = {name: value.clone() for name, value in WRAPPED["compiled DDP"]().state_dict().items()}
    load_checkpoint(tmp_path, "t", state)
    assert all(torch.equal(one, its) for one, its in zip(model.state_dict().values(), state.values(), strict=True))


PREFIXES = [
    "module.",
    "_orig_mod.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "module.module.",
    "_forward_module.",
    "_forward_module._fsdp_wrapped_module.",
    "_orig_mod.module.module._fsdp_wrapped_module._orig_mod.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("at", [Topology(), Topology(dp=2, rank=1)], ids=["same sizes", "other sizes"])
def test_a_tag_that_nxd_wrote_of_a_wrapped_model_loads(tmp_path: Path, prefix: str, at: Topology) -> None:
    """Without manifest and index; into an unwrapped model and into a wrapped one, with the optimizer."""
    model, optimizer = made("plain", 1)
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    for folder, content in (("model", state), ("optim", optimizer.state_dict())):
        (tmp_path / "t" / folder).mkdir(parents=True)
        torch.save(content, tmp_path / "t" / folder / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    for marker in ("checkpoint", "done"):
        (tmp_path / "t" / marker).write_text("1")
    for kind in ("plain", "compiled DDP"):
        other = made(kind, 2)
        load_checkpoint(tmp_path, "t", *other, topology=at)
        pairs = zip(values(model, optimizer), values(*other), strict=True)
        assert all(torch.equal(one, its) for one, its in pairs)


class Around(Model):
    """A wrapper that calls what it wraps by the name ``inner``."""

    def __init__(self, inner: str, model: Model) -> None:
        super().__init__()
        self.add_module(inner, model)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_live_model_in_any_stack_of_wrappers_loads_and_saves(tmp_path: Path, prefix: str) -> None:
    """What other programs wrap a model with: the tag of the plain model loads, and the other way round."""

    def wrapped(seed: int) -> tuple[Model, torch.optim.Optimizer]:
        model, optimizer = made("plain", seed)
        for inner in reversed(prefix.split(".")[:-1]):
            model = Around(inner, model)
        return model, optimizer

    expected = made("plain", 1)
    save_checkpoint(tmp_path, "plain", *expected)
    save_checkpoint(tmp_path, "wrapped", *wrapped(1))
    for tag, live in (("plain", wrapped(2)), ("wrapped", made("plain", 3)), ("wrapped", wrapped(4))):
        load_checkpoint(tmp_path, tag, *live)
        pairs = zip(values(*expected), values(*live), strict=True)
        assert all(torch.equal(one, its) for one, its in pairs), tag


def test_wrappers_around_an_inner_module_are_seen_through(tmp_path: Path) -> None:
    """Data parallelism of a part of the model, in a tag of another program."""
    model, _ = made("plain", 1)
    state = {name.replace("1.", "1.module._orig_mod.", 1): value for name, value in model.state_dict().items()}
    save_checkpoint(tmp_path, "t", state)
    other, _ = made("plain", 2)
    load_checkpoint(tmp_path, "t", other)
    assert all(torch.equal(one, its) for one, its in zip(model.parameters(), other.parameters(), strict=True))


def test_a_wrapped_name_never_takes_what_stands_for_another(tmp_path: Path) -> None:
    """A live ``module.weight`` beside a live ``weight`` is no wrapped one, and neither is one of two candidates."""
    weight, other = torch.ones(2), torch.zeros(2)
    save_checkpoint(tmp_path, "t", {"weight": weight})
    with pytest.raises(KeyMismatch, match=r"missing from the checkpoint: 'module\.weight'"):
        load_checkpoint(tmp_path, "t", {"weight": torch.zeros(2), "module.weight": other})
    save_checkpoint(tmp_path, "two", {"module.weight": weight, "_orig_mod.weight": weight + 1})
    with pytest.raises(KeyMismatch, match="missing from the checkpoint: 'weight'"):
        load_checkpoint(tmp_path, "two", {"weight": other})
    assert not other.any()


def test_a_name_in_front_of_all_others_is_recognised(tmp_path: Path) -> None:
    """``model.`` may be an attribute's real name: the error says how to load, and so it does."""
    saved, _ = made("plain", 1)
    held = Around("model", saved)
    save_checkpoint(tmp_path, "held", held)
    save_checkpoint(tmp_path, "plain", saved)
    live, _ = made("plain", 2)
    with pytest.raises(KeyMismatch, match=r"there with 'model\.' in front: pass prefix='model\.'"):
        load_checkpoint(tmp_path, "held", live)
    load_checkpoint(tmp_path, "held", live, prefix="model.")
    around = Around("model", made("plain", 3)[0])
    with pytest.raises(KeyMismatch, match=r"without 'model\.' in front: pass key_mapping=\{name: name.removeprefix"):
        load_checkpoint(tmp_path, "plain", around)
    load_checkpoint(
        tmp_path, "plain", around, key_mapping={name: name.removeprefix("model.") for name in around.state_dict()}
    )
    for loaded in (live, around):
        pairs = zip(saved.state_dict().values(), loaded.state_dict().values(), strict=True)
        assert all(torch.equal(one, its) for one, its in pairs)
    two = {"a.weight": torch.ones(2), "bias": torch.ones(2)}
    save_checkpoint(tmp_path, "some", {"b.a.weight": torch.ones(2), "bias": torch.ones(2)})
    with pytest.raises(KeyMismatch, match=r"with 'b\.' in front: pass key_mapping=\{name: 'b\.' \+ name\} for each"):
        load_checkpoint(tmp_path, "some", two)
    load_checkpoint(tmp_path, "some", two, key_mapping={"a.weight": "b.a.weight"})


def test_live_tensors_that_share_some_memory_are_refused(tmp_path: Path) -> None:
    """Before anything changes; the same memory seen the same way is a tie, and neighbours are no overlap."""
    save_checkpoint(tmp_path, "t", {"a": torch.ones(4, 4), "b": torch.full((4, 4), 2.0)})
    base = torch.zeros(40)
    across = torch.zeros(4, 8)
    overlapping: list[tuple[torch.Tensor, torch.Tensor]] = [
        (base[:16].view(4, 4), base[8:24].view(4, 4)),
        (base[:16].view(4, 4), base[:16].view(4, 4).T),
        (across[:, :4], across[:, 3:7]),
        (base[: 32 : 2].view(4, 4), base[2:34:2].view(4, 4)),
    ]
    for one, other in overlapping:
        with pytest.raises(UnsupportedState, match=r"model/[ab] and model/[ab] share some of their memory"):
            load_checkpoint(tmp_path, "t", {"a": one, "b": other})
        assert not one.any()
        assert not other.any()
    with pytest.raises(IncompatibleState, match=r"a.*b"):
        load_checkpoint(tmp_path, "t", {"a": base[:16].view(4, 4), "b": base[:16].view(4, 4)})
    assert not base.any()
    apart: list[tuple[torch.Tensor, torch.Tensor]] = [
        (base[:16].view(4, 4), base[16:32].view(4, 4)),
        (across[:, :4], across[:, 4:]),
        (base[: 32 : 2].view(4, 4), base[1:33:2].view(4, 4)),
    ]
    for one, other in apart:
        load_checkpoint(tmp_path, "t", {"a": one, "b": other})
        assert torch.equal(torch.ones(4, 4), one)
        assert torch.equal(torch.full((4, 4), 2.0), other)
    save_checkpoint(tmp_path, "tied", {"a": torch.ones(4, 4), "b": torch.ones(4, 4)})
    same = torch.zeros(4, 4)
    load_checkpoint(tmp_path, "tied", {"a": same, "b": same.detach()})
    assert torch.equal(torch.ones(4, 4), same)


def test_a_model_whose_process_group_was_destroyed_is_saved(tmp_path: Path) -> None:
    """Scripts destroy it at the end, and save after that."""
    group = dist.new_group([0])
    model = torch.nn.parallel.DistributedDataParallel(plain(), process_group=group)
    dist.destroy_process_group(group)
    save_checkpoint(tmp_path, "t", model)
    assert open_checkpoint(tmp_path).keys("model/0.norm.*")
