"""State dicts in place of live optimizers."""

import pytest
import torch

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.formats.state import StateTensor
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer import open_optimizer
from tests.live.doubles import copied, plain, read

pytestmark = pytest.mark.both


def _plain():
    group = {"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}
    return {"state": {1: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2)}}, "param_groups": [group]}


def _zero1():
    group = {"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}
    return {
        "state": {},
        "param_groups": [group],
        "base_state": {1: {"step": 3, "exp_avg": torch.ones(2, 2)}},
        "shape_info": {0: torch.Size([5]), 1: torch.Size([3, 2])},
        "sharded_master_weights": {0: torch.zeros(3), 1: torch.zeros(2, 2)},
    }


@pytest.mark.parametrize("state", [_plain(), _zero1()])
def test_an_empty_dict_is_filled_with_live_types(state):
    """Lists on disk come back as the tuples and sizes that a live state dict has."""
    filled: dict = {}
    adapter = open_optimizer(filled)
    saved = copied(state)
    adapter.validate(saved)
    adapter.load(saved, read)
    assert plain(state) == plain(filled)
    assert (tuple, 0.9) == (type(filled["param_groups"][0]["betas"]), filled["param_groups"][0]["betas"][0])


def test_a_filled_dict_is_replaced():
    """Nothing of what the dict held before remains; another kind of state is refused."""
    held = _plain()
    held["state"][7] = {}
    adapter = open_optimizer(held)
    with pytest.raises(OptimizerMismatch, match="holds a state dict of state, param_groups, base_state"):
        adapter.validate(_zero1())
    adapter.validate(_plain())
    adapter.load(_plain(), read)
    assert plain(_plain()) == plain(held)


def test_plain_entries_are_shaped_like_their_parameter():
    """Names as given; the cut is known where there is one tensor-parallel rank, or from the model."""
    names = [["a", "b"]]
    entry = ("state", 1, "exp_avg")
    alone = open_optimizer(_plain(), param_names=names)
    assert ("plain", ["a", "b"]) == (alone.kind, alone.parameter_names)
    known = ParameterSpec("float32", (2, 2), Partition())
    assert StateTensor("optim/b/exp_avg", known) == alone.capture().tensors[entry]
    unknown = ParameterSpec("float32", (2, 2), Partition(known=False))
    at = Topology(tp=2)
    assert unknown == open_optimizer(_plain(), param_names=names, topology=at).capture().tensors[entry].spec
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    vars(weight).update(tensor_model_parallel=True, partition_dim=1)
    model = open_model({"b": weight})
    named = open_optimizer(_plain(), param_names=names, model=model, topology=at).capture()
    assert ParameterSpec("float32", (2, 2), Partition(1, 1, 2)) == named.tensors[entry].spec


def test_zero1_entries_are_cut_over_dp():
    """shape_info gives the parameter that a shard belongs to; entries without a name are numbered."""
    adapter = open_optimizer(_zero1(), topology=Topology(dp=2, rank=1))
    assert ("zero1", None) == (adapter.kind, adapter.parameter_names)
    state = adapter.capture()
    spec = ParameterSpec("float32", (3, 2), Partition())
    assert StateTensor("optim/#1/exp_avg", spec, 2, 1) == state.tensors["base_state", 1, "exp_avg"]
    assert {"#0": ("sharded_master_weights", 0), "#1": ("sharded_master_weights", 1)} == state.master_weight_entries()


def test_expert_entries_are_found_by_the_offsets():
    """Indices from the offsets on are expert parameters: names follow the groups, the cut the expert replicas."""
    state = _zero1()
    state["param_groups"].append({"params": [0]})
    state.update(ep_param_id_offset=1, ep_param_group_offset=1, ep_base_state_offset=2, ep_shape_info_offset=2)
    state["base_state"][2] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2)}
    state["shape_info"][2] = torch.Size([4, 2])
    names = [["a", "b"], ["experts"]]
    adapter = open_optimizer(state, param_names=names, topology=Topology(dp=4, ep=2, rank=3))
    spec = ParameterSpec("float32", (4, 2), Partition(expert=True, known=False))
    tensors = adapter.capture().tensors
    assert StateTensor("optim/experts/exp_avg", spec, 2, 1, expert=True) == tensors["base_state", 2, "exp_avg"]
    assert StateTensor("optim/experts/step", expert=True) == tensors["base_state", 2, "step"]


def test_a_flagged_dict_is_of_this_rank_alone():
    """zero1_optimizer=True says what an unusual state dict does not: every rank has its own."""
    adapter = open_optimizer(_plain(), zero1_optimizer=True, topology=Topology(dp=2))
    assert "zero1" == adapter.kind
    assert StateTensor("optim/#1/exp_avg") == adapter.capture().tensors["state", 1, "exp_avg"]


def test_an_empty_dict_knows_the_names_given():
    """param_names= serves loads that must match names before anything is filled."""
    assert ["a", "b"] == open_optimizer({}, param_names=[["a"], ["b"]]).parameter_names
    assert open_optimizer({}).parameter_names is None
