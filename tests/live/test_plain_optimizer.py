"""Plain torch optimizers as state trees, and back."""


import pytest
import torch

from nxd_ckpt.errors import DtypeMismatch, InvalidArgument, OptimizerMismatch, ShapeMismatch
from nxd_ckpt.formats.state import StateTensor
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer import open_optimizer
from tests.live.doubles import copied, plain, read

pytestmark = pytest.mark.both

INPUT = torch.arange(6.0).reshape(2, 3) / 7


def _model():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    net[0].bias.requires_grad_(False)
    net.unused = torch.nn.Parameter(torch.ones(2))
    return net


def _optimizer(net, kind=torch.optim.AdamW, **options):
    groups = [{"params": [net.unused, net[1].weight], "lr": 0.1}, {"params": [net[0].weight, net[1].bias]}]
    return kind(groups, lr=0.01, **options)


def _train(net, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        net(INPUT).square().sum().backward()
        optimizer.step()


def test_names_can_be_given_or_are_numbers():
    """Without a model, names come from the caller; else entries are numbered, and named as unknown."""
    net = _model()
    optimizer = _optimizer(net)
    _train(net, optimizer, 1)
    assert open_optimizer(optimizer).parameter_names is None
    assert "optim/#1/exp_avg" == open_optimizer(optimizer).capture().tensors["state", 1, "exp_avg"].name
    given = open_optimizer(optimizer, param_names=[["a", "b"], ["c", "d"]])
    assert ["a", "b", "c", "d"] == given.parameter_names
    with pytest.raises(InvalidArgument, match=r"expected lists of \[2, 2\] names, found \[1, 2\]"):
        open_optimizer(optimizer, param_names=[["a"], ["c", "d"]])
    with pytest.raises(InvalidArgument, match=r"unique, found more than once: \['a'\]"):
        open_optimizer(optimizer, param_names=[["a", "b"], ["a", "d"]])


def test_loading_into_a_trained_optimizer_rolls_it_back():
    """Live tensors are overwritten in place; state and gradients that the checkpoint does not have are gone."""
    net = _model()
    optimizer = _optimizer(net)
    _train(net, optimizer, 1)
    saved = copied(open_optimizer(optimizer).capture().tree)
    net.unused.grad = torch.ones(2)
    optimizer.step()
    moment = optimizer.state[net[1].weight]["exp_avg"]
    assert net.unused in optimizer.state
    open_optimizer(optimizer).load(saved, read)
    assert net.unused not in optimizer.state
    assert moment is optimizer.state[net[1].weight]["exp_avg"]
    assert [None] * 4 == [p.grad for group in optimizer.param_groups for p in group["params"]]
    assert plain(saved["state"]) == plain(optimizer.state_dict()["state"])


def test_groups_are_restored_in_place():
    """Schedulers hold the group dicts: options change inside them, betas come back as a tuple."""
    net = _model()
    optimizer = _optimizer(net)
    groups = [*optimizer.param_groups]
    saved = copied(optimizer.state_dict())
    saved["param_groups"][1].update(lr=0.5, betas=[0.5, 0.6], initial_lr=0.7)
    open_optimizer(optimizer).load(saved, read)
    assert [id(group) for group in groups] == [id(group) for group in optimizer.param_groups]
    assert (0.5, (0.5, 0.6), 0.7) == tuple(groups[1][option] for option in ("lr", "betas", "initial_lr"))
    assert groups[0]["params"][0] is net.unused


def test_a_tensor_learning_rate_stays_the_same_tensor():
    """Compiled steps refer to a tensor learning rate: its value is restored, the object kept, and it is saved."""
    net = _model()
    rate = torch.tensor(0.25)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, capturable=False, foreach=False)
    state = open_optimizer(optimizer).capture()
    assert StateTensor("optim/param_groups/0/lr") == state.tensors["param_groups", 0, "lr"]
    saved = copied(state.tree)
    rate.fill_(9.0)
    open_optimizer(optimizer).load(saved, read)
    assert optimizer.param_groups[0]["lr"] is rate
    assert 0.25 == rate.item()


@pytest.mark.parametrize(("live", "saved"), [(3, torch.tensor(7.0)), (torch.tensor(3.0), 7)])
def test_step_stays_as_the_optimizer_keeps_it(live, saved):
    """A Python step stays one, a tensor stays one, whichever the checkpoint has."""
    net = _model()
    optimizer = _optimizer(net)
    optimizer.state[net.unused] = {"step": live}
    tree = copied(optimizer.state_dict())
    tree["state"][0]["step"] = saved
    adapter = open_optimizer(optimizer)
    adapter.validate(tree)
    adapter.load(tree, read)
    step = optimizer.state[net.unused]["step"]
    assert (type(live), 7) == (type(step), int(step))


def test_a_fresh_torch_optimizer_gets_steps_that_it_can_use():
    """NxD's optimizers count steps as numbers, torch's Adam needs tensors: with no state yet, nothing else tells."""
    net = _model()
    optimizer = _optimizer(net)
    tree = copied(optimizer.state_dict())
    assert {} == tree["state"]
    tree["state"][0] = {"step": 7, "exp_avg": torch.ones_like(net.unused), "exp_avg_sq": torch.ones_like(net.unused)}
    open_optimizer(optimizer).load(tree, read)
    assert torch.equal(torch.tensor(7.0), optimizer.state[net.unused]["step"])


def _without_group(tree):
    tree["param_groups"].pop()


def _with_shape(tree):
    tree["state"][1]["exp_avg"] = torch.zeros(3, 4)


def _with_dtype(tree):
    tree["state"][1]["exp_avg"] = torch.zeros(2, 4, dtype=torch.bfloat16)


def _with_unknown_index(tree):
    tree["state"][9] = tree["state"].pop(3)


def _as_zero1(tree):
    tree["base_state"] = {}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_without_group, OptimizerMismatch, "optimizer: the checkpoint has parameters per param group [2], the live"),
        (_with_shape, ShapeMismatch, "optim/1.weight/exp_avg: saved with shape (3, 4), the live one has (2, 4)"),
        (_with_dtype, DtypeMismatch, "optim/1.weight/exp_avg: saved as bfloat16, the live one is float32"),
        (_with_unknown_index, OptimizerMismatch, "optimizer: the checkpoint has state for parameter 9, but no"),
        (_as_zero1, OptimizerMismatch, "optimizer: the checkpoint holds a ZeRO-1 state (state, param_groups, base"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(change, error, words):
    """validate names the mismatch and leaves the optimizer as it was."""
    net = _model()
    optimizer = _optimizer(net)
    _train(net, optimizer, 1)
    before = plain(optimizer.state_dict())
    tree = copied(optimizer.state_dict())
    change(tree)
    with pytest.raises(error) as caught:
        open_optimizer(optimizer, model=open_model(net)).validate(tree)
    assert str(caught.value).startswith(words)
    assert before == plain(optimizer.state_dict())


def test_a_fresh_optimizer_refuses_other_shapes_too():
    """Shapes are compared with the parameter's where the live optimizer has no state yet."""
    net = _model()
    optimizer = _optimizer(net)
    tree = {"state": {1: {"exp_avg": torch.zeros(4, 4)}}, "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.raises(ShapeMismatch, match=r"optim/#1/exp_avg: saved with shape \(4, 4\), the live one has \(2, 4\)"):
        open_optimizer(optimizer).validate(tree)
