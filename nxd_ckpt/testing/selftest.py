"""One rank of ``nxd-ckpt selftest``: ``python -m nxd_ckpt.testing.selftest PLAN``, which the command starts.

``PLAN`` is a JSON file: the job ("killed" or "checks"), the place, the device, and the file for this rank's notes. If
the command ends, its pipe at this process' stdin closes, and this process ends too.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from nxd_ckpt.checkpoint import open_checkpoint
from nxd_ckpt.checkpointer import Checkpointer
from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.units import size
from nxd_ckpt.errors import PeerTimeout
from nxd_ckpt.examine.diff import diff_checkpoints
from nxd_ckpt.examine.selftest import UNUSABLE, CheckResult, checks_for, merged
from nxd_ckpt.live.torch_xla import compile_count, sync, to_cpu
from nxd_ckpt.storage.base import Storage, completed
from nxd_ckpt.storage.urls import is_url, join, local_path, open_storage
from nxd_ckpt.tag.listing import list_checkpoints
from nxd_ckpt.testing.resume import check_resume
from nxd_ckpt.testing.storage import HookedStorage, killing

_PATIENCE = 120.0
"""Seconds that a rank waits for another one."""
_KILL = "kill"
_PACKAGES = "nxd_ckpt torch torch-xla torch-neuronx libneuronxla neuronx-cc neuronx-distributed numpy"


class NotPossible(Exception):
    """A device that cannot be tested, or a check that it has no use for; says why."""


class Failed(Exception):
    """A check that found something wrong; says what."""


@dataclass
class Rank:
    """This rank, its device, and what it is to do.

    ``communicates``: a process group takes the device's tensors. Where none does, gradients are made up.
    """

    plan: dict[str, Any]
    name: str
    device: torch.device
    communicates: bool
    agreement: Agreement

    @property
    def number(self) -> int:
        return self.agreement.rank

    @property
    def is_xla(self) -> bool:
        return self.name == "xla"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.plan["storage_options"])

    def place(self, *names: str) -> str:
        return join(self.plan["place"], *names)

    def storage(self, *names: str) -> Storage:
        return open_storage(self.place(*names), storage_options=self.options)

    def checkpointer(self, name: str, **options: Any) -> Checkpointer:
        if self.is_xla:
            options["topology"] = Topology(dp=self.agreement.world_size, rank=self.number)
        return Checkpointer(self.place(name), storage_options=self.options, **options)

    def gathered(self, value: Any = None) -> list[Any]:
        """Return each rank's JSON value, by rank. Raises PeerTimeout if another has ended the check, or is gone."""
        words = self._exchanged([False, value])
        for rank, (ended, _) in enumerate(words):
            if ended:
                raise PeerTimeout(f"rank {rank} ended it before")
        return [value for _, value in words]

    def results(self, own: CheckResult) -> list[CheckResult]:
        """Wait until each rank has ended the check, and return all results, by rank."""
        # Not by a collective: those of ranks that have left a check and of those that have not would be mixed up.
        while True:
            words = self._exchanged([True, asdict(own)])
            if all(ended for ended, _ in words):
                return [CheckResult(**result) for _, result in words]

    def _exchanged(self, word: Any) -> list[Any]:
        words: list[Any] = self.agreement.broadcast(self.agreement.gather(word))
        return words


def _joined(plan: dict[str, Any]) -> Rank:
    """Find the device, and join the other ranks. Raises NotPossible if there is no such device, or too few of them."""
    name = plan["device"] or _default_device()
    if name == "xla":
        device, backends = _xla_device(plan), "xla"
    elif name == "cpu":
        device, backends = torch.device("cpu"), "cpu:gloo"
    else:
        device = _numbered(name, int(os.environ.get("LOCAL_RANK", "0")))
        of_device = getattr(dist.Backend, "default_device_backend_map", {}).get(name)
        backends = "cpu:gloo" + (f",{name}:{of_device}" if of_device else "")
    dist.init_process_group(backends, timeout=timedelta(seconds=_PATIENCE))
    agreement = meet(dist.get_rank(), dist.get_world_size(), _PATIENCE, "nxd-ckpt selftest")
    assert agreement is not None  # there is a process group
    return Rank(plan, name, device, name in backends, agreement)


def _default_device() -> str:
    if find_spec("torch_xla") is not None and find_spec("libneuronxla") is not None:
        return "xla"
    accelerator = getattr(torch, "accelerator", None)
    current = accelerator.current_accelerator() if accelerator is not None and accelerator.is_available() else None
    return "cpu" if current is None else str(current.type)


def _numbered(name: str, rank: int) -> torch.device:
    module = getattr(torch, name, None)
    if module is None or not hasattr(module, "device_count"):
        raise NotPossible(f"device {name}: torch {torch.__version__} does not know it; is its package installed?")
    count = module.device_count() if module.is_available() else 0
    if count == 0:
        raise NotPossible(f"device {name}: torch {torch.__version__} knows it and finds none on this host")
    if name == "cuda" and count < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        raise NotPossible(f"device cuda: found {count}, each rank of this host needs one: pass --ranks {count}")
    device = torch.device(name, rank % count)
    if hasattr(module, "set_device"):
        module.set_device(device)
    return device


def _xla_device(plan: dict[str, Any]) -> torch.device:
    os.environ.setdefault("PJRT_DEVICE", "CPU" if plan["emulated"] else "NEURON")
    if plan["emulated"]:
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        os.environ.setdefault("NXD_CKPT_EMULATION_PORT", str(int(os.environ["MASTER_PORT"]) + 2))
        from nxd_ckpt.emulation.install import install

        install()
    import torch_xla
    import torch_xla.distributed.xla_backend

    try:
        device: torch.device = torch_xla.device()
    except RuntimeError as error:
        raise NotPossible(f"device xla: torch_xla finds none: {error}") from error
    return device


class _Linear(nn.Linear):
    """A layer whose sharded parameters are gathered in its forward pass, as SimpleFSDP does."""

    def forward(self, batch: Tensor) -> Tensor:
        sharded: tuple[Any, ...] = (self.weight, self.bias)
        whole = (parameter.redistribute(placements=[Replicate()]) for parameter in sharded)
        return nn.functional.linear(batch, *(tensor.to_local(grad_placements=[Partial("avg")]) for tensor in whole))


def _mesh(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (dist.get_world_size(),))


def _cut(part: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return the parameter of which each rank has a part, cut along its first dimension."""
    return nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))


def _model(layout: str, rank: Rank, device: torch.device) -> nn.Module:
    """Return two layers, whose sizes 2, 4 and 8 ranks divide; 16 inputs, 16 outputs."""
    linear = _Linear if layout == "simple_fsdp" else nn.Linear
    model = nn.Sequential(linear(16, 32), nn.ReLU(), linear(32, 16)).to(device)
    if layout == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        # All ranks have the same numbers: nothing is sent, which not every device can.
        silent: dict[str, Any] = {} if rank.communicates else {"src_data_rank": None}
        parallelize_module(model, _mesh(device), {"0": ColwiseParallel(), "2": RowwiseParallel()}, **silent)
    elif layout == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = _mesh(device)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    elif layout == "simple_fsdp":
        mesh = _mesh(device)
        for layer in (model[0], model[2]):
            for key, parameter in list(layer.named_parameters()):
                setattr(layer, key, _cut(parameter.detach().chunk(mesh.size())[rank.number].clone(), mesh))
    return model


def _make(layout: str, rank: Rank, device: torch.device | None = None) -> tuple[Any, Any]:
    """Return a model and its optimizer, on the rank's device or another."""
    torch.manual_seed(0)
    model = _model(layout, rank, device or rank.device)
    if not rank.is_xla or device is not None:
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    everyone = [list(range(dist.get_world_size()))]
    options: dict[str, Any] = {"sharding_groups": everyone, "pin_layout": False, "save_master_weights": True}
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, **options)


def _step(rank: Rank, model: nn.Module, optimizer: Any) -> float:
    """Make one step of training, and return its loss; 0 where gradients are made up."""
    # torch-xla's ZeRO-1 zeroes them by default: then the first step after a load, without gradients, is another graph.
    optimizer.zero_grad(set_to_none=True)
    loss = torch.zeros(())
    if rank.communicates:
        loss = model(torch.randn(8, 16).to(next(model.parameters()).device)).square().mean()
        loss.backward()
    else:
        factor = torch.rand(()).item()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, factor)
    optimizer.step()
    if rank.is_xla:
        import torch_xla

        torch_xla.sync()
    return loss.item()


Outcome = tuple[str, dict[str, Any]]


def _versions(rank: Rank) -> Outcome:
    versions = {}
    for package in _PACKAGES.split():
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    with suppress(OSError):
        versions["neuron driver"] = Path("/sys/module/neuron/version").read_text().strip()
    facts = {"versions": versions, "python": platform.python_version(), "system": platform.platform()}
    facts |= {"device": str(rank.device), "host": rank.gathered(platform.node())}
    shown = [f"{name} {version}" for name, version in versions.items() if name != "numpy"]
    return f"{', '.join(shown)}; Python {facts['python']}; {rank.device}", facts


def _transfers(rank: Rank) -> Outcome:
    if rank.name == "cpu":
        raise NotPossible("nothing is copied from a device")
    if rank.is_xla:
        raise NotPossible("torch-xla copies in its own way, in groups")
    value = torch.arange(2**20, dtype=torch.float32).to(rank.device)
    try:
        host, pinned = torch.empty(2**20, pin_memory=True), True
    except (RuntimeError, NotImplementedError):
        host, pinned = torch.empty(2**20), False
    host.copy_(value, non_blocking=True)
    try:
        event = torch.Event(rank.device)
        event.record()
        event.synchronize()
        events = True
    except (RuntimeError, NotImplementedError):
        getattr(torch, rank.name).synchronize()
        events = False
    if not torch.equal(host, torch.arange(2**20, dtype=torch.float32)):
        raise Failed("a copy to the host, waited for, has other numbers than the device")
    waits = "one event is waited for" if events else "it has no events: each copy is waited for"
    pages = "host memory can be pinned" if pinned else "no pinned memory"
    return f"{waits}; {pages}", {"pinned_memory": pinned, "events": events}


def _dtypes(rank: Rank) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    saved, loaded, lacking = nn.Module(), nn.Module(), []
    for dtype in sorted({member for member in vars(torch).values() if isinstance(member, torch.dtype)}, key=str):
        name = str(dtype).removeprefix("torch.")
        if not re.fullmatch(r"(u?int(8|16|32|64)|bool|b?float.*|complex.*)", name):
            continue  # quantized ones, and parts of a byte: torch has no tensor of plain numbers of these
        # Neither NaNs nor subnormal numbers: a device may change their bits.
        values = torch.randint(8, 64, (64 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        live = _moved((values & 1 if dtype == torch.bool else values).view(dtype), rank.device)
        if live is None:
            lacking.append(name)
            continue
        saved.register_buffer(f"of_{name}", live)
        loaded.register_buffer(f"of_{name}", _moved(torch.zeros_like(values).view(dtype), rank.device))
    with rank.checkpointer("dtypes") as checkpointer:
        checkpointer.save("every", saved, async_save=True).wait()
        checkpointer.load("every", loaded)
    names = [name.removeprefix("of_") for name, _ in saved.named_buffers()]
    pairs = zip(names, saved.buffers(), loaded.buffers(), strict=True)
    wrong = [name for name, before, after in pairs if not torch.equal(_bits(before), _bits(after))]
    if wrong:
        raise Failed(f"other bits came back of {', '.join(wrong)}")
    without = f"; the device itself changes or lacks {', '.join(lacking)}" if lacking else ""
    return f"{len(names)} dtypes{without}", {"dtypes": sorted(names), "lacking": lacking}


def _moved(host: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Return the tensor on the device; None where it has not the same bits there."""
    try:
        live = host.to(device)
        return live if torch.equal(_bits(live), _bits(host)) else None
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def _bits(value: torch.Tensor) -> torch.Tensor:
    sync()
    (host,) = to_cpu([value])
    return host.contiguous().flatten().view(torch.uint8)


def _resumes(layout: str, rank: Rank) -> Outcome:
    options: dict[str, Any] = {"use_xser": layout == "xser"} if rank.is_xla else {}

    def save(_: str, tag: str, *objects: Any) -> None:
        with rank.checkpointer(layout) as checkpointer:
            checkpointer.save(tag, *objects, async_save=True, **options).wait()

    _rehearse(rank, layout, layout, save, 2)
    same = _on_the_cpu(layout, rank)
    trained = "" if rank.communicates else "; gradients were made up, as no process group takes its tensors"
    return f"2 steps after a load equal the uninterrupted ones; {same} tensors equal on the CPU{trained}", {}


def _rehearse(rank: Rank, layout: str, name: str, save: Callable[..., None], steps: int) -> None:
    """Compare two steps after a load of the latest tag of a directory with those of a run that went on."""

    def load(_: str, tag: str, *objects: Any) -> None:
        with rank.checkpointer(name) as checkpointer:
            checkpointer.load(None, *objects)

    make, step = partial(_make, layout, rank), partial(_step, rank)
    check_resume(make, step, save=save, load=load, steps=steps, steps_after=2, new_process=False)


def _on_the_cpu(layout: str, rank: Rank) -> int:
    """Load what was saved on the device into objects on the CPU, save these, and compare the two tags."""
    model, optimizer = _make(layout, rank, torch.device("cpu"))
    objects = (model,) if rank.is_xla else (model, optimizer)  # ZeRO-1 is only for XLA devices
    with rank.checkpointer(layout) as checkpointer:
        checkpointer.load("rehearsal", *objects)
        checkpointer.save("on_cpu", *objects)
    rank.gathered()
    prefix = "model/" if rank.is_xla else ()
    tags = (open_checkpoint(rank.place(layout), tag, storage_options=rank.options) for tag in ("rehearsal", "on_cpu"))
    difference = diff_checkpoints(*tags, prefix=prefix, full=True)
    if difference:
        names = [tensor.name for tensor in difference.tensors] + [value.name for value in difference.values]
        raise Failed(f"on the CPU others came back: {', '.join(names[:3]) or difference.problems[0]}")
    return difference.same_tensors


def _killed(rank: Rank) -> str:
    """Save step 1, train on, and lose the last rank while it writes step 2: what the others were told."""
    torch.manual_seed(2**30)
    model, optimizer = _make("xser" if rank.is_xla else "fsdp2", rank)
    storage = HookedStorage(rank.storage(_KILL), lambda operation: None)
    checkpointer = rank.checkpointer(_KILL, storage=storage)
    for number in range(2):
        torch.manual_seed(number)
        _step(rank, model, optimizer)
        if number == 1 and rank.number == rank.agreement.world_size - 1:
            storage.hook = killing("close", "*")  # of the first file, when its bytes are written
        pending = checkpointer.save(f"step_{number + 1}", model, optimizer, async_save=True)
        pending.exception()
    return f"{type(pending.error).__name__}: {pending.error}" if pending.error else ""


def _kill(rank: Rank) -> Outcome:
    told, ended = rank.gathered(rank.plan["killed"])[0]  # with torchrun only rank 0 has the word of rank 0
    if not told:
        raise Failed(f"the others were not told of it: {ended}")
    tags = list_checkpoints(rank.place(_KILL), storage_options=rank.options)
    complete = [tag.tag for tag in tags if tag.complete]
    if complete != ["step_1"]:
        raise Failed(f"expected step_1 alone to be visible, found {complete}")
    layout = "xser" if rank.is_xla else "fsdp2"
    _rehearse(rank, layout, _KILL, lambda *_: None, 1)  # the job that lost a rank has saved just this
    return "step_2 never became visible; 2 steps after step_1 equal the uninterrupted ones", {"told": told}


def _compilations(rank: Rank) -> Outcome:
    if not rank.is_xla:
        raise NotPossible(f"torch compiles nothing for {rank.name} by itself")
    model, optimizer = _make("xser", rank)
    for _ in range(3):
        _step(rank, model, optimizer)
    before = compile_count()
    with rank.checkpointer("compilations") as checkpointer:
        checkpointer.save("one", model, optimizer, async_save=True, use_xser=True).wait()
        checkpointer.load("one", model, optimizer)
    between = compile_count()
    _step(rank, model, optimizer)
    facts = {"in save and load": between - before, "in the step after": compile_count() - between}
    if any(facts.values()):
        raise Failed(f"graphs compiled: {facts}")
    return f"0 graphs in a save, a load and the step after; {before} before", facts


def _storage(rank: Rank) -> Outcome:
    storage, facts = rank.storage("storage"), {}
    if rank.number == 0:
        storage.make_dir("")
        storage.write("value", b"0")
    rank.gathered()
    facts["seen by all ranks"] = storage.read("value") == b"0"
    facts["one of many may create"] = _one_wins(rank, lambda number: storage.link_new("new", b"%d" % number))
    facts["one of many may replace"] = _one_wins(rank, lambda number: storage.exchange("value", b"0", b"%d" % number))
    if rank.number == 0:
        facts |= _alone(storage)
    rank.gathered()
    wrong = [name for name, holds in facts.items() if not holds and name != "renames"]
    if wrong:
        raise Failed(f"does not hold: {', '.join(wrong)}")
    way = "tags appear by one rename" if facts.get("renames", True) else "no renames: tags are written in place"
    return f"{way}; created, replaced and synced as promised, by all ranks at once", facts


def _one_wins(rank: Rank, attempt: Callable[[int], bool]) -> bool:
    """Let eight threads of each rank try the same: of all of them one succeeds."""
    rank.gathered()
    with ThreadPoolExecutor(8) as threads:
        won = sum(threads.map(attempt, range(8 * rank.number + 1, 8 * rank.number + 9)))
    return bool(sum(rank.gathered(won)) == 1)


def _alone(storage: Storage) -> dict[str, bool]:
    data = os.urandom(100_000)
    writer = storage.create("folder/file", len(data))
    with completed(writer):
        writer.write_at(50_000, data[50_000:])
        writer.write_at(0, data[:50_000])
    storage.sync_dir("folder")
    facts = {"written as given": storage.read("folder/file") == data}
    with suppress(OSError):
        storage.rename("folder", "renamed")
    facts["renames"] = storage.renames and storage.is_dir("renamed") and not storage.is_dir("folder")
    for name in ("folder", "renamed"):
        storage.remove(name)
    facts["removes"] = not storage.is_dir("folder") and not storage.is_dir("renamed")
    return facts


def _speed(rank: Rank) -> Outcome:
    nbytes = rank.plan["nbytes"]
    data = torch.full((max(nbytes // 4, 1),), float(rank.number)).to(rank.device)
    model = nn.Module()
    model.data = nn.Parameter(data) if rank.is_xla else _cut(data, _mesh(rank.device))
    host = torch.empty(data.shape)
    copy = _seconds(rank, lambda: host.copy_(data))
    write = _seconds(rank, lambda: _raw_write(rank, host.numpy().data.cast("B")))
    with rank.checkpointer("speed") as checkpointer:
        checkpointer.save("warm", model, async_save=True).wait()
        if rank.number == 0:
            checkpointer.remove("warm")
        rank.gathered()
        begun = time.monotonic()
        pending = checkpointer.save("measured", model, async_save=True)
        stall = time.monotonic() - begun
        pending.wait()
        whole = time.monotonic() - begun
    written, stalls, wholes = zip(*rank.gathered((pending.nbytes, stall, whole)), strict=True)
    facts = {"nbytes": sum(written), "stall_seconds": max(stalls), "save_seconds": max(wholes)}
    facts |= {"raw_copy_seconds": copy, "raw_write_nbytes": len(written) * nbytes, "raw_write_seconds": write}
    speed, raw = facts["nbytes"] / facts["save_seconds"] / 2**30, facts["raw_write_nbytes"] / write / 2**30
    return (
        f"an async save of {size(facts['nbytes'])} held up training for {max(stalls) * 1000:.0f} ms (a copy takes "
        f"{copy * 1000:.0f} ms) and ran at {speed:.2f} GiB/s (plain files: {raw:.2f} GiB/s)"
    ), facts


def _seconds(rank: Rank, work: Callable[[], Any]) -> float:
    """Return how long the slowest rank took, all at the same time, the second time."""
    work()
    rank.gathered()
    begun = time.monotonic()
    work()
    return float(max(rank.gathered(time.monotonic() - begun)))


def _raw_write(rank: Rank, data: memoryview) -> None:
    """Write a plain file up to the disk, or an object, and remove it."""
    storage, name = rank.storage(), f"raw-{rank.number}"
    if is_url(rank.place()):
        with completed(writer := storage.create(name, len(data))):
            writer.write_at(0, data)
    else:
        with Path(local_path(rank.place()), name).open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
    storage.remove(name)


_CHECKS: dict[str, Callable[[Rank], Outcome]] = {
    "versions": _versions,
    "transfers": _transfers,
    "dtypes": _dtypes,
    **{layout: partial(_resumes, layout) for layout in ("fsdp2", "tp", "simple_fsdp", "zero1", "xser")},
    "kill": _kill,
    "compilations": _compilations,
    "storage": _storage,
    "speed": _speed,
}


def _result(name: str, rank: Rank) -> CheckResult:
    begun = time.monotonic()
    try:
        detail, facts = _CHECKS[name](rank)
        return CheckResult(name, "ok", detail, time.monotonic() - begun, facts)
    except NotPossible as reason:
        return CheckResult(name, "not possible here", str(reason))
    except Exception as error:
        detail = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        trace = "" if isinstance(error, PeerTimeout) else traceback.format_exc()
        return CheckResult(name, "failed", detail, time.monotonic() - begun, {}, trace)


def _end_with_the_command() -> None:
    os.read(0, 1)
    os._exit(1)


def main(path: str) -> int:
    """Run the job of a plan on this rank, and return the exit code."""
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    plan = json.loads(Path(path).read_text())

    def note(**what: Any) -> None:
        with Path(plan["notes"]).open("a") as notes:
            notes.write(json.dumps(what) + "\n")

    try:
        rank = _joined(plan)
    except NotPossible as reason:
        note(unusable=str(reason))
        return UNUSABLE
    note(device=rank.name)
    if plan["job"] == "killed":
        note(detail=_killed(rank))
        return 0
    for name in checks_for(rank.name):
        result = merged(rank.results(_result(name, rank)))
        if rank.number == 0:
            note(**asdict(result))
    rank.agreement.gather(None)  # rank 0, whose process holds the store in which they meet, goes last
    return 0


def end(code: int) -> NoReturn:
    """End this process at once: threads of gloo and XLA abort an interpreter at its end, now and again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main(sys.argv[1]))
