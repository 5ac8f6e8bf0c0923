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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from nxd_ckpt.checkpoint import open_checkpoint
from nxd_ckpt.checkpointer import Checkpointer
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.units import size
from nxd_ckpt.examine.diff import diff_checkpoints
from nxd_ckpt.examine.selftest import UNUSABLE, CheckResult, checks_for, merged
from nxd_ckpt.live.torch_xla import compile_count, sync, to_cpu
from nxd_ckpt.storage.base import Storage, completed
from nxd_ckpt.storage.urls import is_url, join, local_path, open_storage
from nxd_ckpt.tag.listing import list_checkpoints
from nxd_ckpt.testing import selftest_jobs as jobs
from nxd_ckpt.testing.resume import check_resume
from nxd_ckpt.testing.selftest_jobs import Failed, Left
from nxd_ckpt.testing.storage import HookedStorage, killing

_KILL = "kill"
_PACKAGES = (
    *("nxd_ckpt", "torch", "torch-xla", "torch-neuronx", "libneuronxla", "neuronx-cc", "neuronx-distributed"),
    "numpy",
)
_GIB = 2**30


class NotPossible(Exception):
    """A check that this device or place has no use for; says why."""


@dataclass
class Rank:
    """This rank, and what it is to do."""

    plan: dict[str, Any]
    device: jobs.Device

    @property
    def number(self) -> int:
        return dist.get_rank()

    @property
    def options(self) -> dict[str, Any] | None:
        return self.plan["storage_options"] or None

    def place(self, *names: str) -> str:
        return join(self.plan["place"], *names)

    def storage(self, *names: str) -> Storage:
        return open_storage(self.place(*names), storage_options=self.options)

    def checkpointer(self, name: str, **options: Any) -> Checkpointer:
        if self.device.is_xla:
            options["topology"] = Topology(dp=dist.get_world_size(), rank=self.number)
        return Checkpointer(self.place(name), storage_options=self.options, **options)

    def make(self, layout: str) -> Any:
        return jobs.make(layout, self.device)

    def step(self, model: Any, optimizer: Any) -> float:
        return jobs.step(model, optimizer, self.device)


def _versions(rank: Rank) -> tuple[str, dict[str, Any]]:
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    driver = Path("/sys/module/neuron/version")
    if driver.exists():
        versions["neuron driver"] = driver.read_text().strip()
    device = rank.device
    facts = {"versions": versions, "python": platform.python_version(), "system": platform.platform()}
    facts |= {"device": str(device.torch_device), "host": rank.device.gathered(platform.node())}
    shown = [f"{name} {version}" for name, version in versions.items() if name != "numpy"]
    return f"{', '.join(shown)}; Python {facts['python']}; {device.torch_device}", facts


def _transfers(rank: Rank) -> tuple[str, dict[str, Any]]:
    device = rank.device
    if device.name == "cpu" or device.is_xla:
        raise NotPossible(
            "nothing is copied from a device" if device.name == "cpu" else "torch-xla copies in its own way, in groups"
        )
    value = torch.arange(2**20, dtype=torch.float32).to(device.torch_device)
    try:
        host, pinned = torch.empty(2**20, pin_memory=True), True
    except (RuntimeError, NotImplementedError):
        host, pinned = torch.empty(2**20), False
    host.copy_(value, non_blocking=True)
    try:
        event = torch.Event(device.torch_device)
        event.record()
        event.synchronize()
        events = True
    except (RuntimeError, NotImplementedError):
        getattr(torch, device.name).synchronize()
        events = False
    if not torch.equal(host, torch.arange(2**20, dtype=torch.float32)):
        raise Failed("a copy to the host, waited for, has other numbers than the device")
    facts = {"pinned_memory": pinned, "events": events}
    waits = "one event is waited for" if events else "it has no events: each copy is waited for"
    return f"{waits}; {'host memory can be pinned' if pinned else 'no pinned memory'}", facts


def _dtypes(rank: Rank) -> tuple[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    hosts: dict[str, torch.Tensor] = {}
    saved, loaded, lacking = nn.Module(), nn.Module(), []
    for dtype in sorted({member for member in vars(torch).values() if isinstance(member, torch.dtype)}, key=str):
        name = str(dtype).removeprefix("torch.")
        if not re.fullmatch(r"(u?int(8|16|32|64)|bool|b?float.*|complex.*)", name):
            continue  # quantized ones, and parts of a byte: torch has no tensor of plain numbers of these
        values = torch.randint(0, 256, (64 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        host = (values & 1 if dtype == torch.bool else values).view(dtype)
        live = _moved(host, rank.device)
        if live is None:  # NaNs that are not the device's own may change there
            host = _numbers(host)
            live = _moved(host, rank.device)
        if live is None:
            lacking.append(name)
            continue
        hosts[name] = host
        saved.register_buffer(f"of_{name}", live)
        loaded.register_buffer(f"of_{name}", _moved(torch.zeros_like(values).view(dtype), rank.device))
    with rank.checkpointer("dtypes") as checkpointer:
        checkpointer.save("every", saved, async_save=True).wait()
        checkpointer.load("every", loaded)
    returned = {name: _bits(loaded.get_buffer(f"of_{name}")) for name in hosts}
    wrong = [name for name, host in hosts.items() if not torch.equal(returned[name], _bits(host))]
    if wrong:
        raise Failed(f"other bits came back of {', '.join(wrong)}")
    without = f"; the device itself changes or lacks {', '.join(lacking)}" if lacking else ""
    return f"{len(hosts)} dtypes{without}", {"dtypes": sorted(hosts), "lacking": lacking}


def _numbers(like: torch.Tensor) -> torch.Tensor:
    """Return finite numbers of its shape and dtype; what was given where torch makes none."""
    try:
        return torch.arange(like.numel(), dtype=torch.float32).to(like.dtype)
    except (RuntimeError, TypeError, NotImplementedError):
        return like


def _moved(host: torch.Tensor, device: jobs.Device) -> torch.Tensor | None:
    """Return the tensor on the device; None where it has not the same bits there."""
    try:
        live = host.to(device.torch_device)
        return live if torch.equal(_bits(live), _bits(host)) else None
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def _bits(value: torch.Tensor) -> torch.Tensor:
    sync()
    (host,) = to_cpu([value])
    return host.contiguous().flatten().view(torch.uint8)


def _resumes(layout: str, rank: Rank) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {"use_xser": layout == "xser"} if rank.device.is_xla else {}

    def save(_: str, tag: str, *objects: Any) -> None:
        with rank.checkpointer(layout) as checkpointer:
            checkpointer.save(tag, *objects, async_save=True, **options).wait()

    def load(_: str, tag: str, *objects: Any) -> None:
        with rank.checkpointer(layout) as checkpointer:
            checkpointer.load(tag, *objects)

    make = partial(rank.make, layout)
    check_resume(make, rank.step, save=save, load=load, steps=2, steps_after=2, new_process=False)
    same = _on_the_cpu(layout, rank)
    trained = "" if rank.device.communicates else "; gradients were made up, as no process group takes its tensors"
    return f"2 steps after a load equal the uninterrupted ones; {same} tensors equal on the CPU{trained}", {}


def _on_the_cpu(layout: str, rank: Rank) -> int:
    """Load what was saved on the device into objects on the CPU, save these, and compare the two tags."""
    model, optimizer = jobs.make(layout, rank.device, "cpu")
    objects = (model,) if rank.device.is_xla else (model, optimizer)  # ZeRO-1 is only for XLA devices
    with rank.checkpointer(layout) as checkpointer:
        checkpointer.load("rehearsal", *objects)
        checkpointer.save("on_cpu", *objects)
    rank.device.gathered(None)
    prefix = "model/" if rank.device.is_xla else ()
    tags = (open_checkpoint(rank.place(layout), tag, storage_options=rank.options) for tag in ("rehearsal", "on_cpu"))
    difference = diff_checkpoints(*tags, prefix=prefix, full=True)
    if difference:
        names = [tensor.name for tensor in difference.tensors] + [value.name for value in difference.values]
        raise Failed(f"on the CPU others came back: {', '.join(names[:3]) or difference.problems[0]}")
    return difference.same_tensors


def _training(rank: Rank) -> str:
    return "xser" if rank.device.is_xla else "fsdp2"


def _killed(rank: Rank) -> str:
    """Save step 1, train on, and lose the last rank while it writes step 2: what the others were told."""
    torch.manual_seed(2**30)
    model, optimizer = rank.make(_training(rank))
    storage = HookedStorage(rank.storage(_KILL), lambda operation: None)
    checkpointer = rank.checkpointer(_KILL, storage=storage)
    for number in range(2):
        torch.manual_seed(number)
        rank.step(model, optimizer)
        if number == 1 and rank.number == dist.get_world_size() - 1:
            storage.hook = killing("close", "*")  # of the first file, when its bytes are written
        pending = checkpointer.save(f"step_{number + 1}", model, optimizer, async_save=True)
        pending.exception()
    return f"{type(pending.error).__name__}: {pending.error}" if pending.error else ""


def _kill(rank: Rank) -> tuple[str, dict[str, Any]]:
    outcome = rank.device.gathered(rank.plan["killed"])[0]  # with torchrun only rank 0 has the word of rank 0
    message, ended, why = (outcome[key] for key in ("told", "ended", "why"))
    if not message:
        raise Failed(f"the others were not told of it: {ended}; {why}")
    tags = list_checkpoints(rank.place(_KILL), storage_options=rank.options)
    complete = [tag.tag for tag in tags if tag.complete]
    if complete != ["step_1"]:
        raise Failed(f"expected step_1 alone to be visible, found {complete}")

    def load(_: str, tag: str, *objects: Any) -> None:
        with rank.checkpointer(_KILL) as checkpointer:
            checkpointer.load(None, *objects)

    check_resume(
        partial(rank.make, _training(rank)),
        rank.step,
        save=lambda *_: None,  # the job that lost a rank has saved just this
        load=load,
        steps=1,
        steps_after=2,
        new_process=False,
    )
    return "step_2 never became visible; 2 steps after step_1 equal the uninterrupted ones", {"told": message}


def _compilations(rank: Rank) -> tuple[str, dict[str, Any]]:
    if not rank.device.is_xla:
        raise NotPossible(f"torch compiles nothing for {rank.device.name} by itself")
    model, optimizer = rank.make("xser")
    for _ in range(3):
        rank.step(model, optimizer)
    before = compile_count()
    with rank.checkpointer("compilations") as checkpointer:
        checkpointer.save("one", model, optimizer, async_save=True, use_xser=True).wait()
        checkpointer.load("one", model, optimizer)
    between = compile_count()
    rank.step(model, optimizer)
    facts = {"in save and load": between - before, "in the step after": compile_count() - between}
    if any(facts.values()):
        raise Failed(f"graphs compiled: {facts}")
    return f"0 graphs in a save, a load and the step after; {before} before", facts


def _storage(rank: Rank) -> tuple[str, dict[str, Any]]:
    storage, facts = rank.storage("storage"), {}
    if rank.number == 0:
        storage.make_dir("")
        storage.write("value", b"0")
    rank.device.gathered(None)
    facts["seen by all ranks"] = storage.read("value") == b"0"
    facts["one of many may create"] = _one_wins(rank, lambda number: storage.link_new("new", b"%d" % number))
    facts["one of many may replace"] = _one_wins(rank, lambda number: storage.exchange("value", b"0", b"%d" % number))
    if rank.number == 0:
        facts |= _alone(storage)
    rank.device.gathered(None)
    wrong = [name for name, holds in facts.items() if not holds and name not in ("renames", "swaps")]
    if wrong:
        raise Failed(f"does not hold: {', '.join(wrong)}")
    way = "tags appear by one rename" if facts.get("renames", True) else "no renames: tags are written in place"
    return f"{way}; created, replaced and synced as promised, by all ranks at once", facts


def _one_wins(rank: Rank, attempt: Callable[[int], bool]) -> bool:
    """Let eight threads of each rank try the same: of all of them one succeeds."""
    rank.device.gathered(None)
    first = 1 + 8 * rank.number
    with ThreadPoolExecutor(8) as threads:
        won = sum(threads.map(attempt, range(first, first + 8)))
    return bool(sum(rank.device.gathered(won)) == 1)


def _alone(storage: Storage) -> dict[str, bool]:
    data = os.urandom(100_000)
    writer = storage.create("folder/file", len(data))
    with completed(writer):
        writer.write_at(50_000, data[50_000:])
        writer.write_at(0, data[:50_000])
    storage.sync_dir("folder")
    facts = {"written as given": storage.read("folder/file") == data}
    try:
        storage.rename("folder", "renamed")
        facts["renames"] = storage.renames and storage.read("renamed/file") == data and not storage.is_dir("folder")
    except OSError:
        facts["renames"] = False
    if facts["renames"]:
        storage.write("other/file", b"other")
        facts["swaps"] = storage.swap("renamed", "other") and storage.read("renamed/file") == b"other"
    for name in ("folder", "renamed", "other"):
        storage.remove(name)
    facts["removes"] = not any(storage.is_dir(name) for name in ("folder", "renamed", "other"))
    return facts


def _speed(rank: Rank) -> tuple[str, dict[str, Any]]:
    device, nbytes = rank.device, rank.plan["nbytes"]
    data = torch.full((max(nbytes // 4, 1),), float(rank.number)).to(device.torch_device)
    model = nn.Module()
    model.data = nn.Parameter(data if device.is_xla else jobs.part_of(data, device.mesh()))
    host = torch.empty(data.shape)
    copy = _seconds(rank, lambda: host.copy_(data))
    write = _seconds(rank, lambda: _raw_write(rank, host.numpy().data.cast("B")))
    with rank.checkpointer("speed") as checkpointer:
        checkpointer.save("warm", model, async_save=True).wait()
        checkpointer.remove("warm") if rank.number == 0 else None
        rank.device.gathered(None)
        begun = time.monotonic()
        pending = checkpointer.save("measured", model, async_save=True)
        stall = time.monotonic() - begun
        pending.wait()
        whole = time.monotonic() - begun
    outcomes = device.gathered((pending.nbytes, stall, whole))
    total = sum(written for written, *_ in outcomes)
    stall, whole = (max(outcome[field] for outcome in outcomes) for field in (1, 2))
    raw = len(outcomes) * nbytes
    facts = {"nbytes": total, "stall_seconds": stall, "save_seconds": whole, "raw_copy_seconds": copy}
    facts |= {"raw_write_nbytes": raw, "raw_write_seconds": write}
    return (
        f"an async save of {size(total)} held up training for {stall * 1000:.0f} ms (a copy takes {copy * 1000:.0f} "
        f"ms) and ran at {total / whole / _GIB:.2f} GiB/s (plain files: {raw / write / _GIB:.2f} GiB/s)"
    ), facts


def _seconds(rank: Rank, work: Callable[[], Any]) -> float:
    """Return how long the slowest rank took, all at the same time, the second time."""
    work()
    rank.device.gathered(None)
    begun = time.monotonic()
    work()
    return float(max(rank.device.gathered(time.monotonic() - begun)))


def _raw_write(rank: Rank, data: memoryview) -> None:
    """Write a file as fast as the place takes it, up to the disk, and remove it."""
    name = f"raw-{rank.number}"
    if is_url(rank.place()):
        storage = rank.storage("raw")
        writer = storage.create(name, len(data))
        with completed(writer):
            writer.write_at(0, data)
        storage.remove(name)
        return
    path = Path(local_path(rank.place()), name)
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
    path.unlink()


_CHECKS: dict[str, Callable[[Rank], tuple[str, dict[str, Any]]]] = {
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
        trace = "" if isinstance(error, Left) else traceback.format_exc()
        return CheckResult(name, "failed", detail, time.monotonic() - begun, {}, trace)


def _end_with_the_command() -> None:
    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main(path: str) -> int:
    """Run the job of a plan on this rank, and return the exit code."""
    _end_with_the_command()
    plan = json.loads(Path(path).read_text())
    with Path(plan["notes"]).open("w") as notes:

        def note(**what: Any) -> None:
            notes.write(json.dumps(what) + "\n")
            notes.flush()

        try:
            rank = Rank(plan, jobs.join(plan["device"], plan["emulated"]))
        except jobs.Unusable as reason:
            note(unusable=str(reason))
            return UNUSABLE
        note(device=rank.device.name)
        if plan["job"] == "killed":
            note(name="killed", detail=_killed(rank))
            return 0
        for check in checks_for(rank.device.name):
            rank.device.begin(check.name)
            result = merged(rank.device.gathered_at_end(_result(check.name, rank)))
            if rank.number == 0:
                note(**asdict(result))
        rank.device.leave()
    return 0


def end(code: int) -> NoReturn:
    """End this process without what an interpreter does at its end.

    Threads of gloo and XLA abort it then, now and again.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main(sys.argv[1]))
