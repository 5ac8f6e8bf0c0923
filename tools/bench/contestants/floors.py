"""What the hardware allows: the same bytes written, read and copied with nothing around it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tools.bench.contestants.contract import LOADS, RATE, SAVES, Contestant, Settled
from tools.bench.host import PIECE, pages
from tools.bench.results import ASYNC, LOST, SAVE, SLOWDOWN, STALL
from tools.bench.workloads import State, fetch
from tools.bench.world import World

BLOCK = 4096

DIRECT = "floor: O_DIRECT write"
BUFFERED = "floor: buffered write"
READ = "floor: read"
COPY = "floor: memcpy"
GROUPED = "floor: grouped device-to-host"
EACH = "floor: .cpu() of each"
NOTHING = "floor: no save"


class Image:
    """This rank's share of the state's bytes in page-aligned memory, rounded up to whole blocks.

    Of replicas every rank has its part of the tensors, of shards its own.
    """

    def __init__(self, state: State, world: World) -> None:
        tensors = list(state.local.values())
        self.tensors = tensors if world.shards else tensors[world.rank :: world.size]
        self.nbytes = -(-sum(tensor.nbytes for tensor in self.tensors) // BLOCK) * BLOCK
        memory = pages(self.nbytes)
        self.view = memoryview(memory)[: self.nbytes]
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.fill()

    def fill(self) -> None:
        """Copy the tensors in, one after the other."""
        for target, tensor in zip(self._targets(), self.tensors, strict=True):
            target.copy_(tensor.detach())

    def _targets(self) -> list[torch.Tensor]:
        targets, offset = [], 0
        for tensor in self.tensors:
            part = self._whole[offset : offset + tensor.nbytes]
            targets.append(part.view(tensor.dtype).view(tensor.shape))
            offset += tensor.nbytes
        return targets


class _Floor(Contestant):
    fresh: frozenset[str] = frozenset()

    def __init__(self, name: str, state: State, directory: Path, world: World, image: Image) -> None:
        super().__init__(name, state, directory, world)
        self.image = image
        self.directory = self.directory / f"rank_{world.rank}"
        self.directory.mkdir(exist_ok=True)

    @property
    def leads(self) -> bool:
        return True  # every rank writes its share to a file of its own


class DirectWrite(_Floor):
    """Large direct writes from page-aligned memory. Its files are those that :class:`Read` reads."""

    measures = frozenset({SAVE})

    def save(self, durable: bool) -> None:
        _write(self.next_path(), self.image.view, os.O_DIRECT, durable)


class BufferedWrite(_Floor):
    """Large writes through the page cache."""

    measures = SAVES
    fresh = SAVES

    def save(self, durable: bool) -> None:
        _write(self.next_path(), self.image.view, 0, durable)


class Read(_Floor):
    """Large reads into memory that was touched before; with several ranks, each reads all shares."""

    measures = LOADS
    loads = ("1 thread", "2 threads")
    restores = False

    def save(self, durable: bool) -> None:
        _write(self.next_path(), self.image.view, 0, durable)

    def load(self, how: str) -> None:
        threads = int(how.split()[0])
        for path in sorted(self.directory.parent.glob("rank_*/step_*")):
            number = os.open(path, os.O_RDONLY)
            try:
                _read(number, self.image.view[: path.stat().st_size], threads)
            finally:
                os.close(number)


class Copy(_Floor):
    """Every tensor copied into memory that was touched before."""

    measures = frozenset({STALL, ASYNC})

    def save_async(self) -> Settled:
        self.image.fill()
        return Settled()


class DeviceToHost(Contestant):
    """Device tensors on the host: in one transfer, or one by one."""

    measures = frozenset({STALL, ASYNC})

    def save_async(self) -> Settled:
        live = [tensor for tensor in self.state.tensors.values() if tensor.device.type != "cpu"]
        if self.name == GROUPED:
            fetch(live)
        else:
            for tensor in live:
                tensor.detach().cpu()
        return Settled()


class Nothing(Contestant):
    """No save, for as long as one at a limited rate takes: the steps of a busy machine differ by themselves."""

    measures = frozenset({SLOWDOWN, LOST})
    fresh: frozenset[str] = frozenset()

    def save_async(self) -> Nothing:
        self._end = time.perf_counter() + self.state.nbytes / RATE
        return self

    def done(self) -> bool:
        return time.perf_counter() >= self._end

    def wait(self) -> None:
        return


def floors(state: State, directory: Path, world: World) -> list[Contestant]:
    """All floors; they share one image."""
    image = Image(state, world)
    files = [kind(name, state, directory, world, image) for name, kind in _FILES.items()]
    return [*files, *_copies(state, directory, world, image), Nothing(NOTHING, state, directory, world)]


def copies(state: State, directory: Path, world: World) -> list[Contestant]:
    """The floors of an async save's stall alone."""
    return _copies(state, directory, world, Image(state, world))


_FILES = {DIRECT: DirectWrite, BUFFERED: BufferedWrite, READ: Read}


def _copies(state: State, directory: Path, world: World, image: Image) -> list[Contestant]:
    if state.device.type == "cpu":
        return [Copy(COPY, state, directory, world, image)]
    return [DeviceToHost(name, state, directory, world) for name in (GROUPED, EACH)]


def _write(path: Path, view: memoryview, flags: int, durable: bool) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    try:
        for start in range(0, len(view), PIECE):
            os.pwrite(number, view[start : start + PIECE], start)
        if durable:
            os.fdatasync(number)
    finally:
        os.close(number)


def _read(number: int, view: memoryview, threads: int) -> None:
    def some(starts: range) -> None:
        for start in starts:
            os.preadv(number, [view[start : start + PIECE]], start)

    if threads == 1:
        some(range(0, len(view), PIECE))
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, [range(i * PIECE, len(view), threads * PIECE) for i in range(threads)]))
