"""ZeRO-1 with expert parallelism: two optimizers, one state dict."""

import pytest
import torch

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import OptimizerMismatch, ShapeMismatch, UnsupportedState
from nxd_ckpt.formats.state import StateTensor
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer import open_optimizer
from tests.live.doubles import ExpertShardedOptimizer, copied, plain, read

pytestmark = pytest.mark.both

# dp 4 = 2 replicas of each expert x ep 2; seen from dp rank 3: expert replica 1, ep rank 1.
TOPOLOGY = Topology(dp=4, ep=2, dp_rank=3)
DP_GROUPS, EXPERT_DP_GROUPS = [[0, 1, 2, 3]], [[0, 2], [1, 3]]
NAMES = ["norm", "up", "bias", "experts"]


def _model():
    torch.manual_seed(0)
    net = torch.nn.ParameterDict(
        {"norm": torch.randn(6), "experts": torch.randn(3, 2, 2), "up": torch.randn(5, 2), "bias": torch.randn(4)}
    )
    net["experts"].expert_model_parallel = True
    return net


def _optimizer(net, **options):
    groups = [{"params": [net["norm"], net["up"], net["experts"]]}, {"params": [net["bias"]], "weight_decay": 0.0}]
    return ExpertShardedOptimizer(groups, 3, DP_GROUPS, EXPERT_DP_GROUPS, lr=0.1, **options)


def _step(optimizer):
    for inner in (optimizer.non_ep_zero_optimizer, optimizer.ep_zero_optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        inner.step()


def _adapter(net, optimizer):
    return open_optimizer(optimizer, model=open_model(net), topology=TOPOLOGY)


def test_capture_joins_both_and_adds_master_weights():
    """The tree is NxD's, plus the master weights that NxD leaves out; expert entries are cut over expert replicas."""
    net = _model()
    optimizer = _optimizer(net, save_master_weights=True)
    _step(optimizer)
    adapter = _adapter(net, optimizer)
    state = adapter.capture()
    expected = optimizer.state_dict()
    assert NAMES == adapter.parameter_names
    assert [*expected, "sharded_master_weights"] == list(state.tree)
    assert plain(expected) == plain({key: state.tree[key] for key in expected})
    assert [0, 1, 2, 3] == list(state.tree["sharded_master_weights"])
    experts = ParameterSpec("float32", (3, 2, 2), Partition(expert=True))
    up = ParameterSpec("float32", (5, 2), Partition())
    assert StateTensor("optim/up/exp_avg", up, 4, 3) == state.tensors["base_state", 1, "exp_avg"]
    moment = StateTensor("optim/experts/exp_avg", experts, 2, 1, expert=True)
    assert moment == state.tensors["base_state", 3, "exp_avg"]
    assert StateTensor("optim/experts/step", expert=True) == state.tensors["base_state", 3, "step"]
    masters = StateTensor("optim/experts/master_weights", experts, 2, 1, expert=True)
    assert masters == state.tensors["sharded_master_weights", 3]


def test_load_restores_both_and_the_outer_groups():
    """Moments, master weights and options of both inner optimizers, and the options of the outer one."""
    net = _model()
    optimizer = _optimizer(net, save_master_weights=True)
    _step(optimizer)
    saved = copied(_adapter(net, optimizer).capture().tree)
    for group in saved["param_groups"]:
        group["lr"] = 0.7
    other = _optimizer(_model(), save_master_weights=True)
    adapter = open_optimizer(other, param_names=[["a", "b"], ["c"], ["d"], []], topology=TOPOLOGY)
    adapter.validate(saved)
    adapter.load(saved, read)
    assert plain({**saved, "param_groups": None}) == plain(copied({**adapter.capture().tree, "param_groups": None}))
    for groups in (other.param_groups, other.ep_zero_optimizer.param_groups, other.non_ep_zero_optimizer.param_groups):
        assert [0.7, 0.7] == [group["lr"] for group in groups]


@pytest.mark.parametrize("half", [0, 2])
def test_a_half_that_was_left_out_has_the_options_of_its_group(half):
    """A group is one set of options, for its ordinary parameters and its experts; the other group's stay apart."""
    saved = copied(_adapter(net := _model(), _optimizer(net)).capture().tree)
    for group in saved["param_groups"]:
        group["lr"] = 0.7
    saved["param_groups"][half] = {"params": saved["param_groups"][half]["params"]}
    other = _optimizer(_model())
    open_optimizer(other, param_names=[["a", "b"], ["c"], ["d"], []], topology=TOPOLOGY).load(saved, read)
    for groups in (other.param_groups, other.ep_zero_optimizer.param_groups, other.non_ep_zero_optimizer.param_groups):
        assert [0.7, 0.7] == [group["lr"] for group in groups]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("ep_base_state_offset",), "optimizer: the checkpoint's expert-parallel state lacks ['ep_base_state_offset']"),
        (
            ("ep_param_id_offset", "ep_param_group_offset", "ep_base_state_offset", "ep_shape_info_offset"),
            "optimizer: the checkpoint's ZeRO-1 state was saved without expert parallelism",
        ),
    ],
)
def test_state_without_the_offsets_is_refused(keys, words):
    """Which entries are the experts' cannot be guessed."""
    net = _model()
    optimizer = _optimizer(net)
    saved = {key: value for key, value in copied(optimizer.state_dict()).items() if key not in keys}
    with pytest.raises(OptimizerMismatch) as caught:
        _adapter(net, optimizer).validate(saved)
    assert str(caught.value).startswith(words)


def test_expert_shapes_are_checked():
    """A mismatch in the second optimizer is named by its parameter."""
    net = _model()
    optimizer = _optimizer(net)
    _step(optimizer)
    saved = copied(optimizer.state_dict())
    saved["base_state"][3]["exp_avg"] = torch.zeros(1, 2, 2)
    with pytest.raises(ShapeMismatch, match=r"exp_avg: saved with shape \(1, 2, 2\), the live one has \(2"):
        _adapter(net, optimizer).validate(saved)


@pytest.mark.parametrize("which", ["outer", "inner", "base"])
def test_hooks_of_both_optimizers_are_called_or_refused(which):
    """Those after a load are called once; those before it would be skipped, so the save refuses them."""
    net = _model()
    optimizer = _optimizer(net, save_master_weights=True)
    _step(optimizer)
    hooked = {
        "outer": optimizer,
        "inner": optimizer.ep_zero_optimizer,
        "base": optimizer.non_ep_zero_optimizer.base_optimizer,
    }[which]
    called: list[object] = []
    hooked.register_load_state_dict_post_hook(called.append)
    adapter = _adapter(net, optimizer)
    adapter.load(copied(adapter.capture().tree), read)
    adapter.after_load()
    assert [hooked] == called
    hooked.register_load_state_dict_pre_hook(lambda optimizer, state: state)
    with pytest.raises(UnsupportedState, match="hooks that look at its state dict before a load"):
        adapter.capture()


def test_keys_of_its_own_are_refused_at_the_save(caplog):
    """No load would give them back. A tag of earlier that has them loads, and the log says what is left out."""
    net = _model()
    optimizer = _optimizer(net, save_master_weights=True)
    _step(optimizer)
    adapter = _adapter(net, optimizer)
    saved = copied(adapter.capture().tree) | {"loss_scale": 512.0}
    adapter.validate(saved)
    assert "has loss_scale, which is not part of ZeRO-1" in caplog.text
    kind = type("Scaling", (type(optimizer),), {"state_dict": lambda self: saved})
    optimizer.__class__ = kind
    with pytest.raises(UnsupportedState, match=r"Scaling has loss_scale, which is not part of ZeRO-1"):
        adapter.capture()
