"""State dicts in place of live optimizers."""

import pytest
import torch

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.formats.state import StateTensor
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


def test_a_flagged_dict_is_of_this_rank_alone():
    """zero1_optimizer=True says what an unusual state dict does not: every rank has its own."""
    adapter = open_optimizer(_plain(), zero1_optimizer=True, topology=Topology(dp=2))
    assert "zero1" == adapter.kind
    assert StateTensor("optim/#1/exp_avg") == adapter.capture().tensors["state", 1, "exp_avg"]


def test_an_empty_dict_knows_the_names_given():
    """param_names= serves loads that must match names before anything is filled."""
    assert ["a", "b"] == open_optimizer({}, param_names=[["a"], ["b"]]).parameter_names
    assert open_optimizer({}).parameter_names is None
