"""Transfers and the real ZeroRedundancyOptimizer on an XLA device: bit for bit, and without compiling anything."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import dcp
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.formats.tensors import iter_tensors, map_tensors
from nxd_ckpt.live import torch_xla as xla
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer import open_optimizer
from tests.live.doubles import plain, read

pytestmark = pytest.mark.xla

THREADS = """
import sys
import nxd_ckpt
import torch_xla
import torch_xla.distributed.xla_multiprocessing as xmp

def main(index):
    state = {"weight": torch_xla.torch.full((2,), float(index), device=torch_xla.device())}
    nxd_ckpt.save_checkpoint(sys.argv[1], "step_1", state)

if __name__ == "__main__":
    xmp.spawn(main)
"""


def test_ranks_that_are_threads_of_one_process_save_nothing(tmp_path):
    """Each would save its own state as that of the whole job, in the place of the others'."""
    (tmp_path / "train.py").write_text(THREADS)
    devices = {**os.environ, "CPU_NUM_DEVICES": "2", "PJRT_DEVICE": "CPU"}
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run")]
    done = subprocess.run(command, env=devices, capture_output=True, text=True, timeout=300)
    assert "InvalidArgument: 2 ranks are threads of this process" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def _device():
    import torch_xla

    return torch_xla.device()


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)
    net.unused = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    net.register_buffer("seen", torch.tensor(1))
    return net.to(_device())


def _optimizer(net, **options):
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    base = options.pop("base", torch.optim.AdamW)
    return ZeroRedundancyOptimizer(net.parameters(), base, sharding_groups=[[0]], pin_layout=False, lr=0.1, **options)


def _train(net, optimizer, steps):
    inputs = torch.arange(6.0).reshape(2, 3).to(device=_device(), dtype=net.unused.dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        net(inputs).square().sum().backward()
        optimizer.step()
        xla.sync()


def _capture(net, optimizer):
    """Both trees with host tensors of their own, as a checkpoint would hold them."""
    model = open_model(net)
    trees = [model.capture(tp=1).tree, open_optimizer(optimizer, model=model).capture().tree]
    xla.sync()
    hosts = iter(xla.to_cpu([leaf for _, leaf in iter_tensors(trees)]))
    return map_tensors(trees, lambda _: next(hosts).clone())


def _load(net, optimizer, trees):
    model = open_model(net)
    adapter = open_optimizer(optimizer, model=model)
    adapter.validate(trees[1])
    for name in model.validate(trees[0]):
        model.assign(name, trees[0][name])
    adapter.load(trees[1], read)


def test_transfers_compile_nothing_and_alias_nothing():
    """Round trips of any shape and value, zeros and ones of rank 0 included; sources may be reused at once."""
    import torch_xla

    values = [torch.tensor(v) for v in (0, 1, 7)] + [torch.tensor(1.0), torch.ones(2, 3).bfloat16(), torch.zeros(0, 3)]
    live = [torch.full_like(value, 3).to(_device()) for value in values]
    alias = live[4].detach()
    torch_xla.sync(wait=True)
    before = xla.compile_count()
    for target, value in zip(live, values, strict=True):
        source = value.clone()
        xla.copy_in(target, source)
        source.fill_(9)
    placed = [xla.place(value, live[0].device) for value in values]
    xla.sync()
    assert plain(values) == plain(xla.to_cpu(live)) == plain(xla.to_cpu(placed))
    assert plain(values[4]) == plain(xla.to_cpu([alias])[0])
    assert before == xla.compile_count()


def test_saving_does_not_change_what_follows():
    """A sync in mid-step, or after a step mark, leaves random numbers and the graphs of later steps as they were."""
    import torch_xla
    from torch_xla.core import xla_model

    def run(save: str) -> tuple[list, int]:
        xla_model.set_rng_state(5)
        parameter, before = torch.zeros(4).to(_device()), xla.compile_count()
        for _ in range(3):
            noise = [torch.nn.functional.dropout(torch.rand(4, device=_device()))]
            xla_model.all_reduce("sum", noise)
            parameter.add_(noise[0])
            if save == "in mid-step":
                xla.sync()
            torch_xla.sync()
            if save == "after the step":
                xla.sync()
        return parameter.cpu().tolist(), xla.compile_count() - before

    expected, _ = run("never")
    assert (expected, 0) == run("in mid-step") == run("after the step")


def test_to_cpu_keeps_order_over_devices():
    """Host tensors are returned as they are, device tensors by one transfer, in the order given."""
    host = torch.ones(2)
    device = torch.zeros(3).to(_device())
    xla.sync()
    first, second, third = xla.to_cpu([device, host, device])
    assert (3, 2, 3) == (len(first), len(second), len(third))
    assert second.data_ptr() == host.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"use_grad_acc_hook": True}),
        (torch.bfloat16, {"capturable": True, "grad_clipping": False}),
    ],
)
def test_a_resumed_run_is_the_same_run(dtype, options):
    """2 + 2 steps of the real ZeRO-1 optimizer in new objects equal 4, bit for bit, whatever was trained before."""
    net = _model(dtype)
    optimizer = _optimizer(net, save_master_weights=dtype is not torch.float32, **options)
    _train(net, optimizer, 2)
    trees = _capture(net, optimizer)
    keys = ["state", "param_groups", "base_state", "shape_info"] + ["sharded_master_weights"] * (dtype != torch.float32)
    assert keys == list(trees[1])
    fresh = _model(dtype)
    other = _optimizer(fresh, save_master_weights=dtype is not torch.float32, **options)
    _load(fresh, other, trees)
    assert plain(trees) == plain(_capture(fresh, other))
    _train(net, optimizer, 2)
    _train(fresh, other, 2)
    expected = _capture(net, optimizer)
    assert plain(expected) == plain(_capture(fresh, other))
    _load(net, optimizer, trees)
    assert plain(trees) == plain(_capture(net, optimizer))
    _train(net, optimizer, 2)
    assert plain(expected) == plain(_capture(net, optimizer))


def test_saving_and_loading_again_compiles_nothing():
    """The second capture, and every load, only transfer: on Neuron each compilation would take minutes."""
    net = _model(torch.bfloat16)
    optimizer = _optimizer(net, save_master_weights=True)
    _train(net, optimizer, 3)
    _capture(net, optimizer)
    _train(net, optimizer, 1)
    before = xla.compile_count()
    trees = _capture(net, optimizer)
    assert before == xla.compile_count()
    _load(net, optimizer, trees)
    xla.sync()
    assert before == xla.compile_count()
    without = {key: value for key, value in trees[1].items() if key != "sharded_master_weights"}
    _load(net, optimizer, [trees[0], without])
    xla.sync()
    assert before == xla.compile_count()


def test_a_load_does_not_change_the_training_graph():
    """Steps after a load run the graphs compiled before it: no loaded value became a constant."""
    net = _model()
    optimizer = _optimizer(net, capturable=True)
    _train(net, optimizer, 1)
    first = _capture(net, optimizer)  # step is 1, a value that torch-xla would fold into the graph
    _train(net, optimizer, 2)
    third = _capture(net, optimizer)
    _load(net, optimizer, third)
    _train(net, optimizer, 2)  # gradients are new after a load: a graph of its own, as for the first step
    before = xla.compile_count()
    _load(net, optimizer, first)
    _train(net, optimizer, 2)
    assert before == xla.compile_count()


def test_step_lies_where_the_optimizer_keeps_it():
    """On the host as a rule, on the device for capturable optimizers, also when the state is new."""
    for capturable, kind in ((False, "cpu"), (True, "xla")):
        net = _model()
        optimizer = _optimizer(net, capturable=capturable)
        _train(net, optimizer, 1)
        trees = _capture(net, optimizer)
        other = _optimizer(net, capturable=capturable)
        _load(net, other, trees)
        for state in (optimizer.base_optimizer.state, other.base_optimizer.state):
            assert {kind} == {entries["step"].device.type for entries in state.values()}


def test_steps_that_lie_on_the_device_come_back_there(tmp_path):
    """Also into an optimizer without state: what is on its way to the device is not taken for a number."""
    net = _model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, capturable=True)
    _train(net, optimizer, 2)
    nxd_ckpt.save_checkpoint(str(tmp_path), "t", net, optimizer)
    other = torch.optim.AdamW(net.parameters(), lr=0.1, capturable=True)
    nxd_ckpt.load_checkpoint(str(tmp_path), "t", net, other)
    assert plain(_capture(net, optimizer)) == plain(_capture(net, other))
    assert {"xla"} == {entries["step"].device.type for entries in other.state.values()}


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adafactor])
def test_a_new_optimizer_steps_with_the_graphs_of_the_old_one(kind):
    """Each entry is made where the optimizer keeps it, whatever its shape: nothing is compiled after the load."""
    net = _model()
    optimizer = kind(net.parameters(), lr=0.1)
    _train(net, optimizer, 3)
    trees = _capture(net, optimizer)
    other = kind(net.parameters(), lr=0.1)
    _load(net, other, trees)
    before = xla.compile_count()
    _train(net, other, 1)
    assert before == xla.compile_count()


def test_parameters_stay_the_same_objects():
    """Loading writes into the device data: the module, the optimizer and tied names keep their parameter."""
    net = _model()
    weight = net[0].weight
    model = open_model(net)
    model.assign("0.weight", torch.ones(5, 3))
    assert net[0].weight is weight
    assert {} == model.destinations(["0.weight"])
    assert [[1.0] * 3] * 5 == weight.detach().cpu().tolist()


def test_a_save_beside_the_main_thread_leaves_its_pending_work_alone(tmp_path):
    """A half of another model's step: torch-xla lost its tensors, and those of all later steps."""
    saved, stepped = _model(), _model()
    optimizer = _optimizer(stepped)
    _train(stepped, optimizer, 2)
    stepped(torch.ones(1, 3, device=_device())).sum().backward()
    before = xla.compile_count()
    with ThreadPoolExecutor(1) as thread, nxd_ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            thread.submit(checkpointer.save, step, saved).result()
    assert before == xla.compile_count()
    optimizer.step()
    loaded: dict[str, torch.Tensor] = {}
    nxd_ckpt.load_checkpoint(tmp_path, 2, loaded)
    assert plain([*saved.state_dict().values()]) == plain([*loaded.values()])


def test_a_save_of_torch_dcp_beside_the_main_thread_leaves_its_pending_work_alone(tmp_path):
    stepped = _model()
    optimizer = _optimizer(stepped)
    _train(stepped, optimizer, 2)
    stepped(torch.ones(1, 3, device=_device())).sum().backward()
    before = xla.compile_count()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(dcp.save, {"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "step_1").result()
    assert before == xla.compile_count()
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in stepped.parameters())


def test_an_error_of_torch_xla_says_what_to_do(tmp_path, monkeypatch):
    """Its own says nothing but that a check failed."""
    import torch_xla

    def fail(*_):
        raise RuntimeError("Check failed: tensor_data: ")

    monkeypatch.setattr(torch_xla._XLAC, "_xla_sync_live_tensors", fail)
    checkpointer = nxd_ckpt.Checkpointer(tmp_path)
    with checkpointer, pytest.raises(CheckpointError, match=r"tensor_data:\): it loses tensors if another thread"):
        checkpointer.save(1, _model())
