"""Reading of ranges of a tag's files by several threads.

Neighbours are read together, and each range is compared with its digest while its bytes are in the processor's cache.
Tasks start in the order of submission, and the caller's thread reads too while it waits. An error stops those that have
not started. If several fail, the error of the first task is raised, whichever thread was faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from nxd_ckpt import effects
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats import crc32
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.storage.arena import private_memory
from nxd_ckpt.storage.base import HOLE, Closing, Reader, Storage
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.tag.verification import Digest, mismatch, naming

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")

PIECE = CRC_BLOCK
"""Bytes of scratch memory per thread, and of a task's read.

Large enough that threads seldom contend, small enough that the bytes are still in the cache when their digest is
computed; and a block of a tensor is verified at once.
"""

Task = Callable[[memoryview], None]
"""Called with ``PIECE`` bytes of scratch memory that belong to the thread."""


class ReadPool(Closing):
    """Pool that runs tasks on ``threads`` threads, the caller's included. The first ``alone`` bytes start no others.

    Must be closed.
    """

    def __init__(self, threads: int, alone: int = 0) -> None:
        self._others = threads - 1
        self._alone = alone
        self._nbytes = 0
        self._threads: list[effects.Thread] = []
        self._changed = effects.Condition()
        self._queue: deque[tuple[int, Task]] = deque()
        self._running: dict[int, int] = {}  # tasks, and the threads that they run on
        self._failed: tuple[int, BaseException] | None = None
        self._closed = False
        self._own = effects.local()
        self.submitted: int = 0

    def submit(self, task: Task, nbytes: int = PIECE) -> None:
        """Run ``task``, which reads ``nbytes``, soon. Raises the error of an earlier one."""
        if self._failed is not None:
            self.wait_for(self.submitted)
        with self._changed:
            self._queue.append((self.submitted, task))
            self.submitted += 1
            self._nbytes += nbytes
            self._changed.notify()
        # A single task is for the caller, which waits for it next.
        if len(self._queue) > 1 and self._nbytes > self._alone and len(self._threads) < self._others:
            thread = effects.Thread(target=self._work, name="nxd_ckpt-reader", daemon=True)
            self._threads.append(thread)  # first: an interrupt may come out of start()
            try:
                thread.start()
            except RuntimeError:  # the system gives no more; the caller's own thread does it all in the end
                self._threads.pop()
                self._others = len(self._threads)

    def wait_for(self, count: int) -> None:
        """Return once the first ``count`` tasks are done, and help with them.

        Raises the error of the first that failed.
        """
        while (item := self._next(count)) is not None:
            self._run(*item)
        if self._failed is not None:
            (_, error), self._failed = self._failed, None
            raise error

    def close(self) -> None:
        """Drop tasks that have not started and end the threads; returns when no task runs any more."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            # By tasks, since a thread whose start was interrupted cannot be joined; it will find nothing to do.
            while any(thread != effects.get_ident() for thread in self._running.values()):
                self._changed.wait()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _next(self, count: int) -> tuple[int, Task] | None:
        """Return the next of the first ``count`` tasks to run here; None once all of them are done."""
        with self._changed:
            while True:
                if self._queue and self._queue[0][0] < count:
                    return self._start_next()
                if not any(number < count for number in self._running):
                    return None
                self._changed.wait()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                item = self._start_next()
            self._run(*item)

    def _start_next(self) -> tuple[int, Task]:
        number, task = self._queue.popleft()
        self._running[number] = effects.get_ident()
        return number, task

    def _run(self, number: int, task: Task) -> None:
        try:
            task(self._scratch())
        except BaseException as error:  # an interrupt too: it reaches the caller as any other
            with self._changed:
                self._queue.clear()
                if self._failed is None or number < self._failed[0]:
                    self._failed = number, error
        finally:
            with self._changed:
                del self._running[number]
                self._changed.notify_all()

    def _scratch(self) -> memoryview:
        if not hasattr(self._own, "memory"):
            self._own.memory = memoryview(private_memory(PIECE))
        memory: memoryview = self._own.memory
        return memory


_KEPT = 64
"""Maximum number of idle files that stay open: with xser there is one for each tensor."""


def in_parallel(
    storage: Storage, keys: Sequence[_Key], inspect: Callable[[_Key], _Value]
) -> Iterator[_Value]:
    """Yield the result for each key. In a store, where each costs requests, as many at a time as it serves at once."""
    if storage.renames or len(keys) < 2:
        yield from map(inspect, keys)
        return
    with ReadPool(storage.concurrency) as pool:
        for first in range(0, len(keys), storage.concurrency):
            results: dict[_Key, _Value] = {}

            def look(scratch: object, key: _Key, results: dict[_Key, _Value] = results) -> None:
                results[key] = inspect(key)

            batch = keys[first : first + storage.concurrency]
            for key in batch:
                pool.submit(partial(look, key=key))
            pool.wait_for(pool.submitted)
            yield from (results[key] for key in batch)


def answers_of(storage: Storage, *looks: Callable[[], Any]) -> Sequence[Any]:
    """Return the results of different looks at a storage, made `in_parallel`."""
    return list(in_parallel(storage, looks, lambda look: look()))


class OpenFiles:
    """Files of ``files``, each opened once per thread that reads it. A context manager, or to be closed."""

    def __init__(self, files: TagFiles) -> None:
        self._files = files
        self._lock = effects.Lock()
        self._idle: deque[tuple[str, Reader]] = deque()  # the last used at the end

    def read_ranges(self, file: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memory with the file's bytes from its offset on. Thread-safe.

        Raises the errors of `TagFiles.read_ranges`.
        """
        with self._files.named(file):
            reader = self._take(file)
            try:
                reader.read_ranges(ranges)
            finally:
                self._give_back(file, reader)

    def close(self) -> None:
        """Close all files; nobody may be reading. A later read opens its file again."""
        while self._idle:
            self._idle.popleft()[1].close()

    def _take(self, file: str) -> Reader:
        with self._lock:
            for number in range(len(self._idle) - 1, -1, -1):
                if self._idle[number][0] == file:
                    reader = self._idle[number][1]
                    del self._idle[number]
                    return reader
        return self._files.open(file)

    def _give_back(self, file: str, reader: Reader) -> None:
        with self._lock:
            self._idle.append((file, reader))
            surplus = self._idle.popleft()[1] if len(self._idle) > _KEPT else None
        if surplus is not None:
            surplus.close()


_ALONE = 8 * 2**20
"""Bytes that one thread reads from a file system as soon as two, which wait for each other, and in less work."""

_TOGETHER = 500
"""Maximum number of ranges in a piece, for tiny tensors."""


class Range(NamedTuple):
    """Bytes to read into ``memory``, or to discard.

    ``expected`` is their CRC-32, if they have their own; else they may be the ``segment``-th of those that ``digest``
    covers. ``deliver`` is called with the bytes once they are verified.
    """

    offset: int
    nbytes: int
    memory: memoryview | None
    name: str
    expected: int | None = None
    digest: Digest | None = None
    segment: int = 0
    deliver: Callable[[memoryview], None] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch memory that it needs, rounded up so that the next range is aligned for any dtype."""
        return -(-self.nbytes // 16) * 16 if self.memory is None else 0


class RangeReader(Closing):
    """Reader of ranges of ``files`` on the storage's preferred number of threads, the caller's included.

    `add` and `call` return before anything is read, and raise the error of an earlier call. ``done`` counts the bytes.
    It must be closed.
    """

    def __init__(self, files: TagFiles) -> None:
        self._files = files
        self._open = OpenFiles(files)
        self._pool = ReadPool(files.storage.concurrency, _ALONE if files.storage.renames else 0)
        self.done: Counter = Counter()
        self._file = ""
        self._ranges: list[Range] = []
        self._nbytes = 0
        self._scratch_nbytes = 0
        self._longest = max(PIECE, files.storage.read_nbytes)
        self._step = files.storage.read_nbytes

    def add(self, file: str, item: Range) -> None:
        if file != self._file or len(self._ranges) >= _TOGETHER or not self._fits(item):
            self._flush()
        self._file = file
        self._nbytes += item.nbytes
        self._scratch_nbytes += item.scratch_nbytes
        self._ranges.append(item)

    def call(self, name: str, read: partial[None]) -> None:
        """Run ``read`` on one of the threads; errors name the tensor ``name``."""

        def task(scratch: memoryview) -> None:
            with naming(name):
                read()

        self._flush()
        self._pool.submit(task)

    def read_ranges(self, file: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read at once, on this thread, without a digest."""
        self._open.read_ranges(file, ranges)

    @property
    def requested(self) -> int:
        """Argument for `wait` that covers everything requested so far."""
        return self._pool.submitted + bool(self._ranges)

    def wait(self, requested: int) -> None:
        """Return when the first ``requested`` requests are read. Raises their errors."""
        if requested > self._pool.submitted:
            self._flush()
        self._pool.wait_for(requested)

    def close(self) -> None:
        """Stop reading and close the files. Returns when no thread reads any more."""
        self._pool.close()
        self._open.close()

    def _fits(self, item: Range) -> bool:
        """Return whether it is read together with those before it.

        Small ranges are, and adjacent ones up to the storage's preferred length.
        """
        if not self._ranges:
            return True
        if self._scratch_nbytes + item.scratch_nbytes > PIECE:
            return False
        follows = 0 <= item.offset - self._ranges[-1].end <= HOLE
        return self._nbytes + item.nbytes <= (self._longest if follows else PIECE)

    def _flush(self) -> None:
        if self._ranges:
            self._pool.submit(partial(self._read, self._file, self._ranges), self._nbytes)
            self._ranges = []
            self._nbytes = 0
            self._scratch_nbytes = 0

    def _read(self, file: str, ranges: Sequence[Range], scratch: memoryview) -> None:
        """Read the ranges, as many at once as the storage prefers, and compare their digests.

        What is read at once shares the scratch memory with what was read before: it stays in the cache.
        """
        begin = 0
        nbytes = 0
        for number, item in enumerate(ranges):
            if number > begin and nbytes + item.nbytes > self._step:
                self._read_together(file, ranges[begin:number], scratch)
                begin = number
                nbytes = 0
            nbytes += item.nbytes
        self._read_together(file, ranges[begin:], scratch)

    def _read_together(self, file: str, ranges: Sequence[Range], scratch: memoryview) -> None:
        if len(ranges) == 1 and ranges[0].nbytes > self._step:
            self._read_in_steps(file, ranges[0], scratch)
            return
        memories = []
        at = 0
        for item in ranges:
            memories.append(scratch[at : at + item.nbytes] if item.memory is None else item.memory)
            at += item.scratch_nbytes
        try:
            self._open.read_ranges(file, [(item.offset, memory) for item, memory in zip(ranges, memories, strict=True)])
        except MalformedFile:  # the file ends before one of them does
            for item, memory in zip(ranges, memories, strict=True):
                with naming(item.name):
                    self._open.read_ranges(file, [(item.offset, memory)])
            raise
        self.done.add(sum(item.nbytes for item in ranges))
        for item, memory in zip(ranges, memories, strict=True):
            if item.expected is not None or item.digest is not None:
                self._compare(file, item, crc32.crc32(memory))
            if item.deliver is not None:
                item.deliver(memory)

    def _read_in_steps(self, file: str, item: Range, scratch: memoryview) -> None:
        """Read a long range; the digest of each step is computed before the next one is read."""
        crc = 0
        is_compared = item.expected is not None or item.digest is not None
        is_kept = item.memory is not None or item.deliver is not None
        memory = scratch[: item.nbytes] if item.memory is None else item.memory
        with naming(item.name):
            for at in range(0, item.nbytes, self._step):
                count = min(self._step, item.nbytes - at)
                part = memory[at : at + count] if is_kept else memory[:count]
                self._open.read_ranges(file, [(item.offset + at, part)])
                crc = crc32.crc32(part, crc) if is_compared else crc
        self.done.add(item.nbytes)
        if is_compared:
            self._compare(file, item, crc)
        if item.deliver is not None:
            item.deliver(memory)

    def _compare(self, file: str, item: Range, crc: int) -> None:
        with naming(item.name):
            if item.digest is not None:
                item.digest.take(item.segment, crc, item.nbytes)
            elif crc != item.expected:
                where = f"{self._files.where(file)}, {item.nbytes} bytes from {item.offset} on"
                raise mismatch(where, item.expected or 0, crc)
