"""Several models and optimizers by name, and other objects with a state, in one tag."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_ckpt import Checkpointer, Topology, convert, open_checkpoint
from nxd_ckpt.errors import CheckpointError, IncompatibleState, InvalidArgument, KeyMismatch, OptimizerMismatch
from tests.hugging_face.reference import Model
from tests.hugging_face.saved import live, weights, write_config
from tests.interop.saving import save_as_every_rank
from tests.live.doubles import ShardedOptimizer

Objects = dict[str, Any]


class Average:
    """Any object with a state."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def objects(seed: int) -> Objects:
    """A GAN: two models, optimizers of two classes, a scheduler of one, a scaler, an average."""
    torch.manual_seed(seed)
    generator, critic = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), nn.Linear(3, 1)
    first = torch.optim.AdamW(generator.parameters(), lr=1e-2)
    return {
        "generator": generator,
        "critic": critic,
        "first": first,
        "second": torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9),
        "scheduler": torch.optim.lr_scheduler.StepLR(first, 2),
        "scaler": torch.amp.grad_scaler.GradScaler("cpu", init_scale=seed + 16.0),
        "average": Average(seed),
    }


def train(held: Objects, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = held["critic"](held["generator"](torch.ones(2, 4))).square().mean()
        loss.backward()
        for name in ("first", "second"):
            held[name].step()
            held[name].zero_grad()
        held["scheduler"].step()
        losses.append(loss.item())
    return losses


def values(held: Objects) -> dict[str, Any]:
    """Everything in them, as text: equal texts are equal numbers."""
    return {name: repr(one.state_dict()) for name, one in held.items()}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Objects]:
    held = objects(0)
    train(held)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(2, state=held)
    return tmp_path / "run", held


@pytest.mark.parametrize("stepped", [False, True])
def test_all_come_back(saved: tuple[Path, Objects], stepped: bool) -> None:
    """Models, optimizers of different classes, scheduler, scaler: the next steps are those of the run."""
    directory, held = saved
    fresh = objects(1)
    train(fresh, int(stepped))
    with Checkpointer(directory) as checkpointer:
        assert 2 == checkpointer.load_latest(state=dict(reversed(fresh.items())))
    assert values(held) == values(fresh)
    assert train(held) == train(fresh)


def test_names_begin_those_of_tensors(saved: tuple[Path, Objects]) -> None:
    """One can be read, or loaded with its optimizer, alone."""
    directory, held = saved
    fresh = objects(1)
    assert torch.equal(held["critic"].weight, open_checkpoint(directory).read("model/critic.weight"))
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(2, fresh["generator"], fresh["first"], prefix="generator.")
    assert {name: values(held)[name] for name in ("generator", "first")} == {
        name: values(fresh)[name] for name in ("generator", "first")
    }


def test_what_a_resume_forgets_is_refused(saved: tuple[Path, Objects]) -> None:
    """An optimizer, or what is neither that nor a model; said to be left out, it is."""
    directory, held = saved
    models = {name: objects(1)[name] for name in ("generator", "critic")}
    optimizers = {name: objects(1)[name] for name in ("first", "second")}
    fresh = {**models, **optimizers}
    before = values(fresh)
    with Checkpointer(directory) as checkpointer:
        with pytest.raises(IncompatibleState, match=r"holds the state of optimizer.*ignore_keys='optim'"):
            checkpointer.load(2, state=models)
        calls: list[Objects] = [{"state": fresh}, {"model": models, "optimizer": optimizers}]
        for given in calls:
            with pytest.raises(IncompatibleState, match=r"'scaler'.*ignore_keys='scheduler'"):
                checkpointer.load(2, **given)
        assert before == values(fresh)
        checkpointer.load(2, state=models, ignore_keys=["optim", "scheduler"])
        assert values(models) == {name: values(held)[name] for name in models}
        checkpointer.load(2, state=models, load_weights_only=True)
        checkpointer.load(2, model=models)


def test_dicts_of_models_and_of_optimizers_need_no_state(tmp_path: Path) -> None:
    """A scheduler is a scheduler then, and what is beside it is in ``state=``."""
    held, fresh = objects(0), objects(1)
    train(held)

    def given(one: Objects) -> dict[str, Any]:
        return {
            "model": {"generator": one["generator"], "critic": one["critic"]},
            "optimizer": {"first": one["first"], "second": one["second"]},
            "scheduler": one["scheduler"],
            "state": {"scaler": one["scaler"]},
        }

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, **given(held))
        checkpointer.load(2, **given(fresh))
    fresh["average"] = held["average"]
    assert values(held) == values(fresh)


def test_a_tensor_of_two_models_is_tied(tmp_path: Path) -> None:
    """It is stored once, and both have it after a load."""
    actor, critic = nn.Linear(2, 2), nn.Linear(2, 2)
    critic.weight = actor.weight
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"actor": actor, "critic": critic})
        expected = actor.weight.clone()
        nn.init.zeros_(actor.weight)
        checkpointer.load(1, {"actor": actor, "critic": critic})
    specs = open_checkpoint(tmp_path).manifest.parameters  # type: ignore[union-attr]
    assert specs["actor.weight"].tie == specs["critic.weight"].tie is not None
    assert torch.equal(expected, critic.weight)


class Setterless:
    def state_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"critic": None, "second": None}, KeyMismatch, "unexpected in the checkpoint: 'critic.weight'"),
        ({"second": None}, OptimizerMismatch, "has state for critic.weight"),
        ({"scaler": None}, IncompatibleState, "holds the state of 'scheduler', 'scaler', 'average'"),
        ({"encoder": nn.Linear(2, 2)}, KeyMismatch, "missing from the checkpoint: 'encoder.weight'"),
        ({"first": None, "frist": "first"}, OptimizerMismatch, "no 'frist' .did you mean 'first'"),
        ({"average": None, "mean": "average"}, IncompatibleState, "state= has 'scheduler', 'scaler', 'mean'"),
        ({"first": "second", "second": "first"}, OptimizerMismatch, "optimizer.'first'.: param group 0 was saved with"),
        ({"setterless": Setterless()}, InvalidArgument, "has state_dict.. and no load_state_dict"),
        ({"step": 3}, InvalidArgument, "state.'step'. is a int"),
        ({"twin": "critic"}, InvalidArgument, "'critic' and 'twin' are one object"),
        ({"a.b": "average", "average": None}, InvalidArgument, "'a.b' cannot be a name"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_changes_nothing(
    saved: tuple[Path, Objects], change: Objects, error: type[CheckpointError], words: str
) -> None:
    """Names that are missing or new, exchanged optimizers, states without a setter."""
    directory, _ = saved
    held = objects(1)
    before = values(held)
    changed = held | {name: held.get(one, one) if isinstance(one, str) else one for name, one in change.items()}
    with Checkpointer(directory) as checkpointer, pytest.raises(error, match=words):
        checkpointer.load(2, state={name: one for name, one in changed.items() if one is not None})
    assert before == values(held)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda held: {"model": held["critic"], "state": {"generator": held["generator"]}}, "model= is given, and"),
        (lambda held: {"model": {"critic": held["critic"], "first": held["first"]}}, "model.'first'. is a AdamW"),
        (lambda held: {"model": {"critic": held["critic"], "x": torch.ones(1)}}, "'x' is a Tensor"),
        (lambda held: {"state": {}}, "must be a dict of objects by name"),
        (lambda held: {"optimizer": [held["first"]]}, "pass several by name"),
        (lambda held: {"scheduler": held["scheduler"], "state": {"scheduler": held["scaler"]}}, "are both given"),
        (
            lambda held: {"optimizer": {"a": held["first"], "b": torch.optim.SGD(held["generator"].parameters())}},
            "both hold the parameter",
        ),
    ],
)
def test_a_save_refuses_what_no_load_gives_back(tmp_path: Path, given: Any, words: str) -> None:
    """And writes nothing."""
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(InvalidArgument, match=words):
        checkpointer.save(1, **given(objects(0)))
    assert [] == [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize("argument", ["optimizer", "scheduler"])
def test_one_object_does_not_take_the_state_of_several(saved: tuple[Path, Objects], argument: str) -> None:
    """Nor does one that was saved alone load into several."""
    directory, held = saved
    with Checkpointer(directory) as checkpointer:
        one = torch.optim.AdamW([*held["generator"].parameters(), *held["critic"].parameters()])
        alone: Objects = {"optimizer": one, "scheduler": torch.optim.lr_scheduler.StepLR(one, 2)}
        with pytest.raises((OptimizerMismatch, IncompatibleState), match=r"several by name|is one|nothing to put"):
            checkpointer.load(2, **{argument: alone[argument]})
        models = {"generator": held["generator"], "critic": held["critic"]}
        checkpointer.save(3, models, alone["optimizer"], alone["scheduler"])
        with pytest.raises((OptimizerMismatch, IncompatibleState), match=r"were one group|without a name"):
            checkpointer.load(3, state={**models, "first": held["first"], "second": held["second"]})
        two = {f"{name}_": torch.optim.AdamW(model.parameters()) for name, model in models.items()}
        with pytest.raises(OptimizerMismatch, match="one optimizer, without a name"):
            checkpointer.load(3, models, two)
        with pytest.raises(IncompatibleState, match=r"without a name|nothing to put it into"):
            checkpointer.load(3, state={"scheduler": held["scheduler"]})


def test_a_tag_on_other_sizes_keeps_the_names(saved: tuple[Path, Objects], tmp_path: Path) -> None:
    """A conversion to other sizes, and a load of its output."""
    directory, held = saved
    convert(directory / "step_2", tmp_path / "wide" / "step_2", to="tag", dp=3)
    fresh = objects(1)
    with Checkpointer(tmp_path / "wide") as checkpointer:
        checkpointer.load(None, state=fresh)
    assert values(held) == values(fresh)


def sharded(topology: Topology, seed: int) -> Objects:
    """Two models of one rank, and ZeRO-1 of each over all ranks."""
    torch.manual_seed(seed)
    models = {"policy": nn.Linear(3, 5), "value": nn.Linear(3, 1)}
    ranks = [list(range(topology.dp))]
    optimizers = {
        name: ShardedOptimizer(model.parameters(), topology.rank, ranks, lr=0.1 * number, save_master_weights=True)
        for number, (name, model) in enumerate(models.items(), start=1)
    }
    return {**models, **{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}}


def shards(held: Objects) -> list[Any]:
    return [
        [[key, *base.state.get(key, {}).values()] for group in base.param_groups for key in group["params"]]
        for base in (held[name].base_optimizer for name in ("policy_optimizer", "value_optimizer"))
    ]


def test_zero1_of_each_is_cut_for_other_ranks(tmp_path: Path) -> None:
    """From 4 data-parallel ranks to 2 and back to 4: the shards of both optimizers."""
    ranks = [Topology(dp=4).at(rank) for rank in range(4)]
    jobs = [sharded(topology, 0) for topology in ranks]
    for number, held in enumerate(jobs):
        for name in ("policy", "value"):
            held[name](torch.ones(2, 3)).sum().backward()
            held[f"{name}_optimizer"].step()
            held[name].load_state_dict(jobs[0][name].state_dict()) if number else None
    save_as_every_rank(tmp_path / "four", "step_1", ranks, lambda rank: {"state": jobs[rank]})
    convert(tmp_path / "four" / "step_1", tmp_path / "two" / "step_1", to="tag", dp=2)
    for source in ("four", "two"):
        for topology, expected in zip(ranks, jobs, strict=True):
            fresh = sharded(topology, 1)
            with Checkpointer(tmp_path / source, topology=topology) as checkpointer:
                checkpointer.load(None, state=fresh)
            assert repr(shards(expected)) == repr(shards(fresh))


def test_one_model_is_exported(tmp_path: Path) -> None:
    """With its part of the optimizers; a wrong name is an error that lists the right ones."""
    model = Model()
    held = {"student": live(model.state()), "teacher": nn.Linear(2, 2)}
    held["student"].load_state_dict(model.state())
    optimizers = {name: torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.5) for name, one in held.items()}
    for optimizer in optimizers.values():
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, held, optimizers)
    config = write_config(tmp_path / "config", model.config)
    tag = tmp_path / "run" / "step_1"
    convert(tag, tmp_path / "out", to="hf", config=config, mapping="llama", model="student", optimizer=True)
    assert repr(dict(sorted(model.state().items()))) == repr(dict(sorted(weights(tmp_path / "out").items())))
    with pytest.raises(KeyMismatch, match=r"no model 'studnet' .did you mean 'student'"):
        convert(tag, tmp_path / "other", to="hf", config=config, mapping="llama", model="studnet")
