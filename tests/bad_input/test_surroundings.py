"""Saves and loads in the middle of whatever a script has set for torch or its process: as without it, or refused."""

import asyncio
import gc
import os
import resource
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nxd_ckpt import Checkpointer, convert, dcp, load_checkpoint, open_checkpoint, save_checkpoint, unshard_checkpoint
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.verify import verify_checkpoint
from tests.bad_input.live import files_below
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.both

Mode = Callable[[], AbstractContextManager[Any]]
CPU = torch.device("cpu")


@contextmanager
def between(enter: Callable[[], object], leave: Callable[[], object]) -> Iterator[None]:
    enter()
    try:
        yield
    finally:
        leave()


def default_device(device: str) -> AbstractContextManager[None]:
    def leave() -> None:
        torch.set_default_device(None)
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # else torch 2.9's get_default_device() fails on this thread

    return between(partial(torch.set_default_device, device), leave)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    before = torch.get_default_dtype()
    return between(partial(torch.set_default_dtype, dtype), partial(torch.set_default_dtype, before))


def deterministic(*, fills: bool) -> AbstractContextManager[None]:
    def switch(on: bool, fill: bool) -> None:
        torch.use_deterministic_algorithms(on)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]

    return between(partial(switch, True, fills), partial(switch, False, True))


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


MODES: dict[str, Mode] = {
    "default device meta": partial(default_device, "meta"),
    "with torch.device(meta)": partial(torch.device, "meta"),
    "default dtype float64": partial(default_dtype, torch.float64),
    "default dtype bfloat16": partial(default_dtype, torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "deterministic algorithms": partial(deterministic, fills=False),
    "deterministic fill": partial(deterministic, fills=True),
    "warnings are errors": warnings_are_errors,
}


class Net(torch.nn.Module):
    """A layer with a buffer, an extra state, and an AdamW; made on the CPU in float32, whatever the modes."""

    def __init__(self, seed: int, *, stepped: bool = True) -> None:
        super().__init__()
        generator = torch.Generator(device=CPU).manual_seed(seed)
        self.layer = torch.nn.Linear(64, 64, device=CPU, dtype=torch.float32)
        self.register_buffer("buffer", torch.full((3,), float(seed), device=CPU, dtype=torch.float32))
        self.count = torch.full((2,), seed, device=CPU)
        with torch.no_grad():
            self.layer.weight.normal_(generator=generator)
            self.layer.bias.zero_()
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.1)
        if stepped:
            self.step()

    def step(self) -> None:
        self.layer(torch.ones(1, 64, device=CPU, dtype=torch.float32)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state.clone()

    def tensors(self) -> list[torch.Tensor]:
        state = self.optimizer.state_dict()["state"]
        moments = [tensor for entries in state.values() for tensor in entries.values()]
        return [*self.state_dict().values(), *moments]


def same(one: Net, other: Net) -> bool:
    """True if both are equal to the bit, now and after a step, which tensors of inference mode could not make."""
    for _ in range(2):
        pairs = list(zip(one.tensors(), other.tensors(), strict=True))
        if not all(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in pairs):
            return False
        one.step()
        other.step()
    return True


def loaded(directory: Path, tag: str, mode: Mode = nullcontext, *, stepped: bool = False, **options: Any) -> Net:
    net = Net(5, stepped=stepped)
    with mode():
        load_checkpoint(directory, tag, net, net.optimizer, **options)
    return net


def converted(tag: Path, output: Path) -> dict[str, bytes | None]:
    """The files of two conversions of a tag."""
    unshard_checkpoint(tag, output / "whole")
    convert(tag, output / "dcp", to="dcp")
    return files_below(output)


@pytest.mark.parametrize("mode", list(MODES))
def test_modes_of_torch(tmp_path: Path, mode: str) -> None:
    """Saves, loads, reads and conversions are those without the mode, and the next step is."""
    within, saved = MODES[mode], Net(1)
    content = {"a": torch.ones(2)}
    with Checkpointer(tmp_path) as checkpointer:
        for tag in ("sync", "async", "xser"):
            with within():
                options: Any = {"user_content": content, "async_save": tag == "async", "use_xser": tag == "xser"}
                checkpointer.save(tag, saved, saved.optimizer, **options)
        checkpointer.wait()
    for tag in ("sync", "async", "xser"):
        assert same(Net(1), loaded(tmp_path, tag))
    for stepped in (False, True):
        for verify in (True, "reading"):
            assert same(Net(1), loaded(tmp_path, "xser", within, stepped=stepped, verify=verify))
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    with within():
        user_content = load_checkpoint(tmp_path, "sync", model, optimizer)
        weight = open_checkpoint(tmp_path, "sync").read("model/layer.weight")
        converted(tmp_path / "sync", tmp_path / "within")
        verified = verify_checkpoint(tmp_path, "sync")
        assert torch.is_inference_mode_enabled() == (mode == "inference_mode")
    for tensor in (weight, model["layer.weight"], optimizer["state"][0]["exp_avg"], user_content["a"]):
        assert (CPU, torch.float32, False) == (tensor.device, tensor.dtype, tensor.is_inference())
    assert torch.equal(saved.layer.weight, weight)
    assert () == verified.problems
    assert converted(tmp_path / "sync", tmp_path / "without") == files_below(tmp_path / "within")


@pytest.mark.xla
@pytest.mark.parametrize("kind", [partial(default_device, "xla"), partial(torch.device, "xla")])
def test_a_default_device_of_torch_xla(tmp_path: Path, kind: Mode) -> None:
    """A script's tensors are made on the device; what is loaded is where it was, and a dict is on the CPU."""
    pytest.importorskip("torch_xla")
    saved = Net(1)
    save_checkpoint(tmp_path, "t", saved, saved.optimizer)
    assert same(Net(1), loaded(tmp_path, "t", kind))
    live = Net(5, stepped=False).to("xla")
    with kind():
        save_checkpoint(tmp_path, "u", live)
        load_checkpoint(tmp_path, "t", live)
        weight = open_checkpoint(tmp_path, "t").read("model/layer.weight")
    assert ("xla", "cpu") == (live.layer.weight.device.type, weight.device.type)
    assert torch.equal(saved.layer.weight, live.layer.weight.cpu())


@pytest.mark.once
def test_code_of_the_script_runs_in_its_modes(tmp_path: Path) -> None:
    """What a hook makes is where the script's default device says, as in torch's own load_state_dict."""

    class Own(Net):
        def set_extra_state(self, state: Any) -> None:
            self.made = torch.empty(3)

    save_checkpoint(tmp_path, "t", Net(1))
    live = Own(2)
    with torch.device("meta"):
        load_checkpoint(tmp_path, "t", live)
        assert "meta" == torch.empty(1).device.type
    assert "meta" == live.made.device.type
    assert "cpu" == torch.empty(1).device.type


@pytest.mark.once
def test_fake_tensor_mode_is_refused_by_name(tmp_path: Path) -> None:
    """Its tensors have no values; nothing changes."""
    saved, live = Net(1), Net(2)
    save_checkpoint(tmp_path, "t", saved, saved.optimizer)
    with FakeTensorMode():
        for call in (
            lambda: save_checkpoint(tmp_path, "u", saved),
            lambda: load_checkpoint(tmp_path, "t", live),
            lambda: load_checkpoint(tmp_path, "t", {}),
            lambda: open_checkpoint(tmp_path, "t").read("model/layer.weight"),
            lambda: open_checkpoint(tmp_path, "t").model_state(),
        ):
            with pytest.raises(UnsupportedState, match="FakeTensorMode"):
                call()
        converted(tmp_path / "t", tmp_path / "within")
    assert same(Net(2), live)
    assert converted(tmp_path / "t", tmp_path / "without") == files_below(tmp_path / "within")


@pytest.mark.once
@pytest.mark.parametrize("mode", ["default device meta", "with torch.device(meta)", "inference_mode"])
def test_torch_dcp_by_our_names(tmp_path: Path, mode: str) -> None:
    live = {"model": {"w": torch.zeros(4)}}
    with MODES[mode]():
        dcp.save({"model": {"w": torch.ones(4, device=CPU)}}, checkpoint_id=tmp_path / "t")
        dcp.load(live, checkpoint_id=tmp_path / "t")
    assert torch.equal(torch.ones(4), live["model"]["w"])


@pytest.mark.once
def test_callers_that_are_compiled(tmp_path: Path) -> None:
    saved, live = Net(1), Net(2)

    def save_and_load(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        save_checkpoint(tmp_path, "t", saved, saved.optimizer)
        load_checkpoint(tmp_path, "t", live, live.optimizer)
        return x + open_checkpoint(tmp_path, "t").read("model/layer.bias").sum()

    compiled = torch.compile(save_and_load, backend="eager")
    assert 2 + saved.layer.bias.sum() == compiled(torch.ones(()))
    assert same(Net(1), live)


def round_trip(directory: Path) -> None:
    """Save, load, read and convert; raise AssertionError if anything differs."""
    saved = Net(1)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, saved, saved.optimizer, async_save=True)
        checkpointer.save(2, saved, saved.optimizer)
        assert 2 == checkpointer.latest_step()
    converted(directory / "step_1", directory / "converted")
    for tag in ("step_1", "step_2"):
        if not same(Net(1), loaded(directory, tag)):
            raise AssertionError(tag)


def in_a_strange_process(directory: str) -> None:
    """Make a round trip with a relative path, in a process with many unusual settings."""
    os.environ.pop("HOME", None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    torch.multiprocessing.set_start_method("spawn", force=True)
    socket.setdefaulttimeout(0.5)
    gc.disable()
    os.umask(0o777 if os.getuid() == 0 else 0o077)  # which nobody but root could write with
    os.close(1)
    os.chdir(directory)
    os.mkdir("elsewhere")
    saved = Net(1)
    with Checkpointer("run") as checkpointer:
        os.chdir("elsewhere")
        checkpointer.save(1, saved, saved.optimizer, async_save=True)
        checkpointer.save(2, saved, saved.optimizer)
    round_trip(Path(directory) / "other")
    print([*os.listdir("."), same(Net(1), loaded(Path(directory) / "run", "step_1")), __debug__], file=sys.stderr)


# As `python -O`, which would compile all of torch anew.
WITHOUT_ASSERTIONS = """
import sys
from importlib.machinery import SourceFileLoader

get_code = SourceFileLoader.get_code

def optimised(loader, name):
    if name.startswith(("nxd_ckpt", "tests")):
        return compile(loader.get_data(loader.path), loader.path, "exec", dont_inherit=True, optimize=1)
    return get_code(loader, name)

SourceFileLoader.get_code = optimised
from tests.bad_input.test_surroundings import in_a_strange_process

in_a_strange_process(sys.argv[1])
"""


@pytest.mark.once
def test_settings_of_the_process(tmp_path: Path) -> None:
    """No assertions, no HOME, few files, another start method, short timeouts, no stdout, another working directory.

    And a umask without any rights, no garbage collection, and a locale in which the directory's name is no text.
    """
    directory = tmp_path / "\u00e4"
    directory.mkdir()
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "Asia/Kathmandu"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ASSERTIONS, str(directory)],
        env=os.environ | locale, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert "[True, False]" == done.stderr.strip().split("\n")[-1], done.stderr


@pytest.mark.once
def test_an_event_loop_and_another_thread(tmp_path: Path) -> None:
    """A save is awaited in a loop; a thread that is not the main one saves and loads, in its own modes."""

    async def awaited() -> None:
        with Checkpointer(tmp_path / "loop") as checkpointer:
            await checkpointer.save(1, Net(1), async_save=True)
            assert 1 == checkpointer.latest_step()

    def within() -> None:
        try:
            with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
                round_trip(tmp_path / "thread")
        except BaseException as error:
            failed.append(error)

    asyncio.run(awaited())
    failed = list[BaseException]()
    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert [] == failed


def shards_in_modes(rank: int, directory: str) -> list[str]:
    """Save and load an FSDP2 job in each mode; return the modes in which something differs."""
    from torch.distributed.fsdp import fully_shard

    def job(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(8, 8)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state(model: torch.nn.Module) -> list[torch.Tensor]:
        return [parameter.to_local().detach().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]

    different = []
    with Checkpointer(directory) as checkpointer:
        for number, (name, mode) in enumerate(MODES.items()):
            model, optimizer = job(1)
            stepped(model, optimizer)
            with mode():
                checkpointer.save(number, model, optimizer, async_save=bool(number % 2))
            stepped(model, optimizer)
            live, its_optimizer = job(2)
            with mode():
                checkpointer.load(number, live, its_optimizer)
            stepped(live, its_optimizer)
            if not all(map(torch.equal, state(model), state(live))):
                different.append(name)
    return different


@pytest.mark.once
def test_shards_of_fsdp2(pair: RankPool, tmp_path: Path) -> None:
    """In each mode, fresh optimizers continue with the next step of the uninterrupted run."""
    assert [[], []] == pair.run(shards_in_modes, str(tmp_path))
