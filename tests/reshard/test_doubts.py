"""What a checkpoint does not say is not guessed: where two readings are possible, digests decide, or it is refused."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import Partition, Topology, errors, load_checkpoint
from tests.interop.saving import save_as_every_rank
from tests.tag.equality import difference

Values = Mapping[str, torch.Tensor]


class Model(torch.nn.Module):
    """Parameters by name, with NxD's attributes on those that have some, and names that are tied to others."""

    def __init__(self, values: Values, attributes: Mapping[str, dict[str, Any]] = {}, ties: Mapping[str, str] = {}):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, torch.nn.Parameter(value.clone()))
            vars(self.get_parameter(name)).update(attributes.get(name, {}))
        for name, other in ties.items():
            setattr(self, name, self.get_parameter(other))


def columns(tp: int) -> dict[str, Any]:
    return {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1, "num_partitions": tp}


def adam(model: torch.nn.Module, value: float | None = None) -> torch.optim.Optimizer:
    """With state if a value is given: moments that are ``value`` more than their parameter's first element."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters() if value is not None else ():
        moment = torch.full_like(parameter, parameter.detach().flatten()[0].item() + (value or 0.0))
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment.clone()}
    return optimizer


def save(directory: Path, topology: Topology, what: Callable[[int], dict[str, Any]], **options: Any) -> Path:
    ranks = [topology.at(rank) for rank in range(topology.world_size)]
    save_as_every_rank(directory, "tag", ranks, what, durable=False, **options)
    return directory


def as_nxd_wrote_it(directory: Path) -> Path:
    (directory / "tag" / "manifest.json").unlink()
    shutil.rmtree(directory / "tag" / "index")
    return directory


def refuse(directory: Path, error: type[Exception], match: str, model: Any, *others: Any, **options: Any) -> None:
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=match):
        load_checkpoint(directory, "tag", model, *others, **options)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_experts_that_nobody_marked_are_not_taken_for_one(tmp_path: Path) -> None:
    """Expert-parallel ranks that saved other values under one name: on another tp none of them is taken for all."""
    save(tmp_path, Topology(dp=2, tp=2, ep=2), lambda rank: {"model": {"experts": torch.full((2, 3), 1.0 + rank // 2)}})
    live = Model({"experts": torch.zeros(2, 3)})
    refuse(tmp_path, errors.TopologyMismatch, "expert=True", live, topology=Topology(dp=2, ep=2, dp_rank=1))


@pytest.mark.parametrize("order", ["neighbours", "interleaved"])
def test_heads_that_several_ranks_hold(tmp_path: Path, order: str) -> None:
    """Key-value heads that ranks of NxD's tag hold alike, though live attributes say a part each: refused."""
    parts = [0, 0, 1, 1] if order == "neighbours" else [0, 1, 0, 1]
    heads = [torch.full((2, 2), float(part)) + torch.eye(2) for part in parts]
    directory = save(tmp_path, Topology(tp=4), lambda rank: {"model": Model({"k": heads[rank]}, {"k": columns(4)})})
    live = Model({"k": torch.zeros(1, 2)}, {"k": columns(8)})
    refuse(
        as_nxd_wrote_it(directory), errors.TopologyMismatch, "partitions= with its num_partitions", live,
        topology=Topology(tp=8),
    )  # fmt: skip


def test_heads_in_an_order_that_is_not_recorded(tmp_path: Path) -> None:
    """NxD's tag does not say whether rank 1 holds the first head or the second: its digests do."""
    heads = [torch.full((2, 2), float(rank // 2)) + torch.eye(2) for rank in range(4)]
    directory = as_nxd_wrote_it(save(tmp_path, Topology(tp=4), lambda rank: {"model": {"k": heads[rank]}}))
    live = Model({"k": torch.zeros(2, 2)}, {"k": columns(2)})
    refuse(directory, errors.TopologyMismatch, "rank_ordering", live, topology=Topology(tp=2))


def test_a_bias_that_is_zero_on_all_ranks(tmp_path: Path) -> None:
    """Equal parts are no sign of replicas where every element is the same, attributes or none at the save."""
    for attributes in ({"bias": columns(2)}, {}):
        directory = tmp_path / str(len(attributes))
        model = Model({"bias": torch.zeros(2)}, attributes)
        save(directory, Topology(tp=2), lambda rank, model=model: {"model": model})  # type: ignore[misc]
        live = Model({"bias": torch.ones(4)}, {"bias": columns(1)})
        load_checkpoint(directory, "tag", live, topology=Topology())
        assert [0.0] * 4 == live.state_dict()["bias"].tolist()


def test_a_tie_that_was_made(tmp_path: Path) -> None:
    """Two equal parameters had a state each, live they are one: whose moments should it continue with?"""

    def what(rank: int) -> dict[str, Any]:
        model = Model({"embed": torch.full((2,), 1.0), "head": torch.full((2,), 1.0)})
        return {"model": model, "optimizer": adam(model, 10.0)}

    save(tmp_path, Topology(), what)
    live = Model({"embed": torch.zeros(2)}, ties={"head": "embed"})
    refuse(tmp_path, errors.OptimizerMismatch, "embed, head are one tied parameter now", live, adam(live))


def test_a_tie_that_was_broken(tmp_path: Path) -> None:
    """One parameter, live two: they would share its moments."""

    def what(rank: int) -> dict[str, Any]:
        model = Model({"embed": torch.full((2,), 1.0)}, ties={"head": "embed"})
        return {"model": model, "optimizer": adam(model, 10.0)}

    save(tmp_path, Topology(), what)
    live = Model({"embed": torch.zeros(2), "head": torch.zeros(2)})
    refuse(tmp_path, errors.OptimizerMismatch, "tied", live, adam(live))


def test_tensors_inside_an_entry_load_on_the_same_sizes_only(tmp_path: Path) -> None:
    """A list of tensors in an optimizer's state says nothing of how they are cut."""

    def what(rank: int) -> dict[str, Any]:
        model = Model({"w": torch.full((2, 2), float(rank))}, {"w": columns(2)})
        optimizer = adam(model, 10.0)
        optimizer.state[model.get_parameter("w")]["history"] = [torch.full((2, 2), float(rank))]
        return {"model": model, "optimizer": optimizer}

    save(tmp_path, Topology(tp=2), what)
    live = Model({"w": torch.zeros(4, 2)}, {"w": columns(1)})
    refuse(tmp_path, errors.OptimizerMismatch, "w/history: saved as a list", live, adam(live), topology=Topology())


def test_tensors_inside_extra_state_load_where_all_ranks_agree(tmp_path: Path) -> None:
    """They are read as tensors on the same sizes; on others only what is equal on all ranks can be taken."""
    for equal in (True, False):
        directory = tmp_path / str(equal)
        values = [torch.full((2,), 0.0 if equal else float(rank)) for rank in range(2)]
        states = [{"stats": {"seen": value, "epoch": 3}} for value in values]
        save(directory, Topology(tp=2), lambda rank, states=states: {"model": states[rank]})  # type: ignore[misc]
        same: dict[str, Any] = {}
        load_checkpoint(directory, "tag", same, topology=Topology(tp=2, rank=1))
        assert (values[1].tolist(), 3) == (same["stats"]["seen"].tolist(), same["stats"]["epoch"])
        other: dict[str, Any] = {}
        if equal:
            load_checkpoint(directory, "tag", other, topology=Topology())
            assert [0.0, 0.0] == other["stats"]["seen"].tolist()
        else:
            with pytest.raises(errors.TopologyMismatch, match="stats: nothing records how it is cut"):
                load_checkpoint(directory, "tag", other, topology=Topology())


def _lr(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.get_parameter("w")]["step"] += 1


def _moment(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.get_parameter("norm")]["exp_avg"][0] += 1


def _value(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.get_parameter("norm")]["seen"] = {"tokens": [1]}


def _general(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state["all"] = {"noise": torch.ones(2), "count": 1}  # type: ignore[index]


DRIFTS = {
    "optim/param_groups/0/lr": _lr,
    "optim/w/step": _step,
    "optim/norm/exp_avg": _moment,
    "optim/norm/seen": _value,
    "optim/state/all": _general,
}
"""Changes of what ranks that hold other parts of the model should have alike."""

GROUPS: dict[str, tuple[Topology, Callable[[int], bool]]] = {
    "tp": (Topology(dp=2, tp=2), lambda rank: rank % 2 == 1),
    "ep": (Topology(dp=4, ep=2), lambda rank: rank % 2 == 1),
    "pp": (Topology(dp=2, pp=2), lambda rank: rank > 1),
    "none": (Topology(dp=2, tp=2), lambda rank: False),
}


def _drifting(topology: Topology, changes: Callable[[int], bool], drift: Any) -> Callable[[int], dict[str, Any]]:
    """State that each rank saves: "w" is cut over tp, if there is any; pipeline stages have both names."""

    def what(rank: int) -> dict[str, Any]:
        tp = topology.tp
        cut = torch.full((2, 2), 1.0 + rank % tp)
        model = Model({"w": cut, "norm": torch.ones(2)}, {"w": columns(2)} if tp > 1 else {})
        optimizer = adam(model, 10.0)
        optimizer.state[model.get_parameter("norm")]["seen"] = {"tokens": [0]}
        optimizer.state["all"] = {"noise": torch.zeros(2), "count": 1}  # type: ignore[index]
        if changes(rank):
            drift(model, optimizer)
        return {"model": model, "optimizer": optimizer}

    return what


@pytest.mark.parametrize("name", DRIFTS)
@pytest.mark.parametrize("group", GROUPS)
def test_what_groups_of_ranks_should_have_alike_is_compared(tmp_path: Path, group: str, name: str) -> None:
    """On other sizes neither is taken, and the message says how to leave it out; on their own each comes back."""
    topology, changes = GROUPS[group]
    what = _drifting(topology, changes, DRIFTS[name])
    save(tmp_path, topology, what)
    rows = 2 * topology.tp
    live = Model({"w": torch.zeros(rows, 2), "norm": torch.zeros(2)}, {"w": columns(1)} if topology.tp > 1 else {})
    if group != "none":
        refuse(tmp_path, errors.IncompatibleState, f"(?s){name} differed.*ignore_keys", live, adam(live))
        with pytest.raises(errors.IncompatibleState, match=name):
            nxd_ckpt.convert(tmp_path / "tag", tmp_path / "whole", to="dcp")
    left_out = {"optim/param_groups/0/lr": "optim/param_groups"}.get(name, name)
    load_checkpoint(tmp_path, "tag", live, adam(live), ignore_keys=[] if group == "none" else [left_out])
    for rank in range(topology.world_size):
        saved = what(rank)
        same = Model({"w": torch.zeros(2, 2), "norm": torch.zeros(2)}, {"w": columns(2)} if topology.tp > 1 else {})
        optimizer = adam(same)
        load_checkpoint(tmp_path, "tag", same, optimizer, topology=topology.at(rank))
        assert None is difference(saved["optimizer"].state_dict(), optimizer.state_dict())


def test_stages_with_other_rates_are_not_joined(tmp_path: Path) -> None:
    """Each stage has parameters of its own, in its first group: one live group has one rate."""

    def what(rank: int) -> dict[str, Any]:
        model = Model({f"w{rank}": torch.ones(2)})
        optimizer = adam(model, 10.0)
        optimizer.param_groups[0]["lr"] = 0.1 + rank
        return {"model": model, "optimizer": optimizer}

    save(tmp_path, Topology(pp=2), what)
    live = Model({"w0": torch.zeros(2), "w1": torch.zeros(2)})
    refuse(tmp_path, errors.OptimizerMismatch, "options differ: lr", live, adam(live))
    apart = torch.optim.AdamW([{"params": [one]} for one in live.parameters()])
    load_checkpoint(tmp_path, "tag", live, apart)
    assert [0.1, 1.1] == [group["lr"] for group in apart.param_groups]


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(dp=2, ep=2), Topology(pp=2)], ids=["tp", "ep", "pp"])
def test_values_of_the_model_that_differ_are_not_taken_from_one_rank(tmp_path: Path, topology: Topology) -> None:
    """Extra state without tensors, as with them."""
    save(tmp_path, topology, lambda rank: {"model": {"stats": {"epoch": rank}, "all": {"epoch": 7}}})
    with pytest.raises(errors.TopologyMismatch, match=r"model/stats: .*(other|different) values"):
        load_checkpoint(tmp_path, "tag", {}, topology=Topology())
    other: dict[str, Any] = {}
    load_checkpoint(tmp_path, "tag", other, topology=Topology(), ignore_keys=["model/stats"])
    assert {"all": {"epoch": 7}} == other


def test_partitions_for_an_empty_dict_are_those_of_its_ranks(tmp_path: Path) -> None:
    """As for a live model: the cut over the ranks that load."""
    whole = torch.arange(8.0).reshape(4, 2)
    save(tmp_path, Topology(tp=4), lambda rank: {"model": {"w": whole.chunk(4)[rank]}})
    for rank, expected in enumerate(whole.chunk(2)):
        state: dict[str, Any] = {}
        cut = {"w": Partition(0, num_partitions=2)}
        load_checkpoint(tmp_path, "tag", state, topology=Topology(tp=2, rank=rank), partitions=cut)
        assert torch.equal(expected, state["w"])


def test_an_optimizer_without_names_goes_by_position(tmp_path: Path) -> None:
    """On another dp, with no model to name its parameters, whether the tag names them or not."""

    def what(rank: int) -> dict[str, Any]:
        model = Model({"a": torch.full((2,), 1.0), "b": torch.full((3,), 2.0)})
        return {"model": model, "optimizer": adam(model, 10.0)}

    save(tmp_path, Topology(), what)
    live = Model({"a": torch.zeros(2), "b": torch.zeros(3)})
    optimizer = adam(live)
    load_checkpoint(tmp_path, "tag", None, optimizer, topology=Topology(dp=3, rank=2))
    assert [11.0, 12.0] == [optimizer.state[p]["exp_avg"][0].item() for p in live.parameters()]


def test_the_same_sizes_with_partitions_that_the_attributes_do_not_say(tmp_path: Path) -> None:
    """Saved with ``partitions=`` for two key-value heads on four ranks, a resume on four ranks needs no more."""
    heads = [torch.full((2, 2), float(rank % 2)) + torch.eye(2) for rank in range(4)]
    partitions = {"k": Partition(0, num_partitions=2)}
    attributes = {"k": columns(4)}
    topology = Topology(tp=4)
    save(tmp_path, topology, lambda rank: {"model": Model({"k": heads[rank]}, attributes)}, partitions=partitions)
    live = Model({"k": torch.zeros(2, 2)}, attributes)
    load_checkpoint(tmp_path, "tag", live, topology=topology.at(3))
    assert torch.equal(heads[3], live.state_dict()["k"])


@pytest.mark.parametrize("said_by", ["attributes", "partitions"])
@pytest.mark.parametrize("name", ["up.bias", "attention.weight_k"])
def test_a_cut_that_is_said_is_believed_though_neighbours_are_alike(tmp_path: Path, name: str, said_by: str) -> None:
    """By a live module or by ``partitions=``: biases that are not trained, frozen blocks, one seed on all ranks."""
    values = torch.arange(8.0).reshape(4, 2)
    partitions = {name: Partition(partition_dim=0, num_partitions=2)} if said_by == "partitions" else None
    parameter = torch.nn.Parameter(values.clone())
    if partitions is None:
        vars(parameter).update(columns(2))
    save(tmp_path, Topology(tp=2), lambda rank: {"model": {name: parameter}}, partitions=partitions)
    whole = torch.cat([values, values])
    for tp in (1, 4):
        for rank in range(tp):
            loaded: dict[str, torch.Tensor] = {}
            load_checkpoint(tmp_path, "tag", loaded, topology=Topology(tp=tp, rank=rank))
            assert torch.equal(whole.chunk(tp)[rank], loaded[name])


@pytest.mark.parametrize("name", ["attention.weight_k", "shared.w"])
def test_what_neighbours_share_is_refused_until_the_caller_says_how(tmp_path: Path, name: str) -> None:
    """Attributes of old NxD do not say how many parts there are. The remedy of the message works, either way."""
    values = torch.arange(8.0).reshape(4, 2)
    attributes = {"tensor_model_parallel": True, "partition_dim": 0}

    def what(rank: int) -> dict[str, Any]:
        tensor = torch.nn.Parameter(values.clone())
        vars(tensor).update(attributes)
        return {"model": {name: tensor}}

    save(tmp_path, Topology(tp=2), what)
    with pytest.raises(errors.TopologyMismatch, match=r"partitions= with its num_partitions"):
        load_checkpoint(tmp_path, "tag", {}, topology=Topology())
    cut_on_one_rank = Partition(partition_dim=0, num_partitions=1)
    for cut, whole in ((cut_on_one_rank, torch.cat([values, values])), (Partition(), values)):
        loaded: dict[str, torch.Tensor] = {}
        load_checkpoint(tmp_path, "tag", loaded, topology=Topology(), partitions={name: cut})
        assert torch.equal(whole, loaded[name])


@pytest.mark.parametrize("alike", [True, False])
def test_partitions_that_make_it_another_size_are_refused(tmp_path: Path, alike: bool) -> None:
    """``Partition()`` for what the save says is cut in two would be half of it."""
    values = [torch.arange(8.0) + (0 if alike else 100 * rank) for rank in range(2)]
    cut = {"w": Partition(partition_dim=0, num_partitions=2)}
    save(tmp_path, Topology(tp=2), lambda rank: {"model": {"w": values[rank]}}, partitions=cut)
    expected = r"w: the save recorded .* \(16,\), but partitions= makes it \(8,\)"
    with pytest.raises(errors.TopologyMismatch, match=expected):
        load_checkpoint(tmp_path, "tag", {}, topology=Topology(), partitions={"w": Partition()})
    live = Model({"w": torch.zeros(8)})
    whole = {"w": Partition()}
    if not alike:
        refuse(tmp_path, errors.TopologyMismatch, "partition_dim", live, topology=Topology(), partitions=whole)
