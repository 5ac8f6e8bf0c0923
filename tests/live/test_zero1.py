"""ZeRO-1 optimizers as state trees, and back, on doubles that run on plain CPU torch."""

import logging

import pytest
import torch

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import (
    DtypeMismatch,
    InvalidArgument,
    OptimizerMismatch,
    ShapeMismatch,
    UnsupportedState,
)
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer import open_optimizer
from tests.live.doubles import NxDWrapper, ShardedOptimizer, copied, plain, read

pytestmark = pytest.mark.both

RANKS = (0, 1)
GROUPS = [list(RANKS)]


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)
    net.unused = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    return net


def _optimizers(net, **options):
    groups = [{"params": [net.unused, net[0].weight]}, {"params": [net[1].weight, net[0].bias], "weight_decay": 0.0}]
    return [ShardedOptimizer(groups, rank, GROUPS, lr=0.1, weight_decay=0.3, **options) for rank in RANKS]


def _adapters(net, optimizers):
    model = open_model(net)
    return [
        open_optimizer(NxDWrapper(optimizer), model=model, topology=Topology(dp=2, rank=rank))
        for rank, optimizer in enumerate(optimizers)
    ]


def _train(net, optimizers, steps, set_to_none=True, zero_first=True):
    inputs = torch.arange(6.0).reshape(2, 3).to(net.unused.dtype) / 7
    for _ in range(steps):
        if zero_first:
            net.zero_grad(set_to_none)
        net(inputs).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        if not zero_first:
            net.zero_grad(set_to_none)


def _load(adapters, trees):
    for adapter, tree in zip(adapters, trees, strict=True):
        adapter.validate(tree)
        adapter.load(tree, read)


def test_no_gradients_are_left():
    """Neither gradients nor gradient accumulators survive: their mere presence would make the next step use them."""
    net = _model()
    optimizers = _optimizers(net)
    _train(net, optimizers, 1)
    adapters = _adapters(net, optimizers)
    trees = [copied(adapter.capture().tree) for adapter in adapters]
    shard = optimizers[0].base_optimizer.param_groups[0]["params"][0]
    shard.main_grad = net.unused.main_grad = torch.ones(3)
    net.unused.grad = torch.ones(3)
    _load(adapters, trees)
    stepped = [net.unused, net[0].weight, net[1].weight, net[0].bias]
    assert [None] * 4 == [parameter.grad for parameter in stepped]
    assert (False, False) == (hasattr(shard, "main_grad"), hasattr(net.unused, "main_grad"))


def test_both_optimizers_groups_are_restored():
    """The options of the wrapper and of its base optimizer agree after a load, betas as tuples."""
    net = _model()
    optimizers = _optimizers(net)
    trees = [copied(optimizer.state_dict()) for optimizer in optimizers]
    for tree in trees:
        tree["param_groups"][0].update(lr=0.7, betas=[0.1, 0.2])
    _load(_adapters(net, optimizers), trees)
    for groups in (optimizers[0].param_groups, optimizers[0].base_optimizer.param_groups):
        assert (0.7, (0.1, 0.2)) == (groups[0]["lr"], groups[0]["betas"])


def test_without_master_weights_shards_follow_the_loaded_model(caplog):
    """Shards are cut from the parameters as loaded, padded; for low precision the loss is said once."""
    net = _model(torch.bfloat16)
    optimizers = _optimizers(net)
    trees = [copied(optimizer.state_dict()) for optimizer in optimizers]
    with torch.no_grad():
        net[0].weight.fill_(3.0)
    with caplog.at_level(logging.WARNING):
        _load(_adapters(net, optimizers)[1:], trees[1:])
    shard = optimizers[1].base_optimizer.param_groups[0]["params"][1]
    assert ("torch.float32", (3, 3), [[3.0] * 3, [3.0] * 3, [0.0] * 3]) == plain(shard)
    assert [True] == ["cut from bfloat16 parameters" in message for message in caplog.messages]


def _as_plain(tree):
    tree["state"] = tree.pop("base_state")


def _from_dp4(tree):
    tree["base_state"][1]["exp_avg"] = torch.zeros(2, 3)


def _another_order(tree):
    tree["shape_info"][1], tree["shape_info"][2] = tree["shape_info"][2], tree["shape_info"][1]


def _bfloat16_masters(tree):
    tree["sharded_master_weights"] = {1: torch.zeros(3, 3, dtype=torch.bfloat16)}


def _of_experts(tree):
    tree["ep_param_group_offset"] = 1


def _one_parameter_less(tree):
    tree["param_groups"][1]["params"].pop()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_as_plain, OptimizerMismatch, "optimizer: the checkpoint holds a plain optimizer's state (state, param_gr"),
        (_from_dp4, ShapeMismatch, "optim/0.weight/exp_avg: saved with shape (2, 3), the live one has (3, 3)"),
        (_another_order, ShapeMismatch, "optim/0.weight: saved for a parameter of shape (2, 5), the live one"),
        (_bfloat16_masters, DtypeMismatch, "optim/0.weight/master_weights: saved as bfloat16, the live one is float32"),
        (_of_experts, OptimizerMismatch, "optimizer: the checkpoint's ZeRO-1 state was saved with expert parall"),
        (_one_parameter_less, OptimizerMismatch, "optimizer: the checkpoint has parameters per param group [2, 1]"),
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_what_does_not_fit_is_refused_and_nothing_changes(change, error, words, trained):
    """validate names the mismatch, trained or fresh, and leaves the optimizer as it was."""
    net = _model()
    optimizers = _optimizers(net)
    _train(net, optimizers, 1)
    tree = copied(optimizers[0].state_dict())
    change(tree)
    live = optimizers if trained else _optimizers(net)
    before = plain(live[0].state_dict())
    with pytest.raises(error) as caught:
        _adapters(net, live)[0].validate(tree)
    assert str(caught.value).startswith(words)
    assert before == plain(live[0].state_dict())


def test_shards_must_follow_the_topology():
    """Sharding groups that are not the data-parallel groups would be saved under wrong coordinates: refused."""
    optimizer = _optimizers(_model())[1]
    with pytest.raises(UnsupportedState, match=r"expected shard 0 of 1 .*found \(shards, shard\) = \(2, 1\)"):
        open_optimizer(optimizer, topology=Topology())


def test_an_optimizer_without_shards_yet_is_refused():
    """lazy_init optimizers have nothing to save before init_zero(); the error says so."""

    class Lazy(torch.optim.SGD):
        sharding_groups = GROUPS

    with pytest.raises(InvalidArgument, match=r"has no shards yet .*init_zero"):
        open_optimizer(Lazy(_model().parameters(), lr=0.1), topology=Topology(dp=2))
