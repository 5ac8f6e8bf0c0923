"""Protection of data loaders' workers from signals that stop the training at a step, which needs them to end.

A scheduler signals all processes of a job. The training's own process sets a flag; a worker that died of the signal
would end the training in the middle of a step, by the loader's error. So a worker that starts while a signal is kept
ignores it, as long as the signal is kept and its parent lives. Its parent ends it as before: ``terminate()`` first says
that it is meant. Programs that a worker starts get signals as usual.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from nxd_ckpt import effects
from nxd_ckpt.core.suggestions import first_of

logger = logging.getLogger("nxd_ckpt")

_POLL_SECONDS = 1.0
_ENDING = 0
"""Index in a worker's bytes that tells that its parent ends it. All others are signals: 1 if kept from the worker."""


def keep(number: int) -> None:
    """Keep the signal from workers that start from now on, or started while it was kept before."""
    if not _kept and BaseProcess.start is _original_start:
        BaseProcess.start = _start  # type: ignore[method-assign,assignment]
    _kept[number] += 1
    for bytes_ in _workers.values():
        bytes_[number] = 1
    _warn_of_unshielded(number)


def release(number: int) -> None:
    """Undo one `keep`: after the last one, the signal ends workers as before."""
    _kept[number] -= 1
    if _kept[number] > 0:
        return
    del _kept[number]
    for bytes_ in _workers.values():
        bytes_[number] = 0
    if not _kept and BaseProcess.start is _start:
        BaseProcess.start = _original_start  # type: ignore[method-assign]


@contextmanager
def kept(number: int) -> Iterator[None]:
    """Keep the signal from workers during the block."""
    keep(number)
    try:
        yield
    finally:
        release(number)


def pass_on(before: Any, number: int, frame: FrameType | None) -> None:
    """Do what the handler ``before`` does at a signal."""
    if before == signal.SIG_IGN:
        return
    if callable(before):
        before(number, frame)
        return
    present = signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    signal.signal(number, present)  # the default was not to end


_kept: Counter[int] = Counter()
_workers: WeakKeyDictionary[BaseProcess, Any] = WeakKeyDictionary()
"""Bytes that each worker shares with this process."""
_blocked_in_forkserver: frozenset[int] = frozenset()
"""Signals that the server of the start method "forkserver", and so at first each of its children, has blocked."""
_original_start = BaseProcess.start


def _forget_parents() -> None:
    global _blocked_in_forkserver
    _kept.clear()
    _workers.clear()
    _blocked_in_forkserver = frozenset()
    if BaseProcess.start is _start:
        BaseProcess.start = _original_start  # type: ignore[method-assign]


effects.in_forked_children(_forget_parents)


def _start(process: BaseProcess) -> None:
    """Start a process in place of ``Process.start`` while a signal is kept."""
    target: Any = getattr(process, "_target", None)
    numbers = frozenset(_kept)
    method: Any = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    shielded = numbers and _is_of_a_loader(target)
    if not shielded and method != "forkserver":
        _original_start(process)
        return
    # What is started inherits the blocked signals, so that none comes before it can be handled.
    with _blocked(numbers):
        if method == "forkserver":
            _start_forkserver(numbers)
        if not shielded:
            process._unblocked = _Unblocked(_blocked_in_forkserver)  # type: ignore[attr-defined]
            _original_start(process)
            return
        bytes_ = multiprocessing.get_context(method).RawArray("b", max(signal.valid_signals()) + 1)
        for number in numbers:
            bytes_[number] = 1
        process._target = _Shielded(target, bytes_, numbers | _blocked_in_forkserver)  # type: ignore[attr-defined]
        _original_start(process)
    _workers[process] = bytes_
    popen: Any = process._popen  # type: ignore[attr-defined]
    popen.terminate = partial(_terminate, bytes_, popen.terminate)


def _is_of_a_loader(target: Any) -> bool:
    """Return whether a process that runs ``target`` is a worker of torch's data loader or a similar one."""
    module = getattr(target, "__module__", None) or ""
    return module.startswith(("torch.utils.data.", "torchdata.")) or getattr(target, "__name__", "") == "_worker_loop"


def _start_forkserver(numbers: frozenset[int]) -> None:
    """Start the fork server, with signals blocked: it is its workers' parent, and they would end with it."""
    global _blocked_in_forkserver
    server: Any = forkserver._forkserver
    before = server._forkserver_pid
    server.ensure_running()
    if server._forkserver_pid != before:
        _blocked_in_forkserver = numbers
    elif missing := numbers - _blocked_in_forkserver:
        _warn("multiprocessing's forkserver", [before], max(missing))


def _terminate(bytes_: Any, terminate: Callable[[], None]) -> None:
    bytes_[_ENDING] = 1
    terminate()


@contextmanager
def _blocked(numbers: frozenset[int]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _unblock(numbers: frozenset[int]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


class _Unblocked:
    """An attribute of a process that unblocks signals where the process is unpickled."""

    def __init__(self, numbers: frozenset[int]) -> None:
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return _unblock, (self._numbers,)


class _Shielded:
    """A worker's main function."""

    def __init__(self, target: Callable[..., Any], bytes_: Any, numbers: frozenset[int]) -> None:
        self._target, self._bytes, self._numbers = target, bytes_, numbers

    def __call__(self, *args: Any, **options: Any) -> Any:
        from torch.utils.data._utils import signal_handling

        torchs: Any = signal_handling
        self._pid, self._parent_pid = os.getpid(), os.getppid()
        self._before = {number: signal.getsignal(number) for number in self._numbers}
        self._has_torchs_handlers = self._was_kept = False
        self._set_torchs_handlers = torchs._set_worker_signal_handlers
        torchs._set_worker_signal_handlers = self._set_handlers
        self._install()
        effects.Thread(target=self._watch, name="nxd_ckpt-shield", daemon=True).start()
        _unblock(self._numbers)
        return self._target(*args, **options)

    def _set_handlers(self) -> None:
        """Set torch's handlers, which Python does not know of, and install ours over them."""
        with _blocked(self._numbers):
            self._set_torchs_handlers()
            self._has_torchs_handlers = True
            self._install()

    def _install(self) -> None:
        for number in self._numbers:
            signal.signal(number, self._handle)
            signal.siginterrupt(number, False)  # a library's reads continue

    def _handle(self, number: int, frame: FrameType | None) -> None:
        ours = os.getpid() == self._pid
        ending = ours and number == signal.SIGTERM and self._bytes[_ENDING]
        if ours and not ending and self._bytes[number] and os.getppid() == self._parent_pid:
            self._was_kept = True
        elif number == signal.SIGTERM and self._has_torchs_handlers:
            if ending:
                os._exit(0)  # as torch's handler does: for the parent it is no failure
            pass_on(signal.SIG_DFL, number, frame)
        else:
            pass_on(self._before[number], number, frame)

    def _watch(self) -> None:
        """End a worker whose parent died after a kept signal, or whose main thread does not handle its end."""
        parent = multiprocessing.parent_process()
        ending = False
        while not ending:
            effects.sleep(_POLL_SECONDS)
            if self._was_kept and (os.getppid() != self._parent_pid or not (parent and parent.is_alive())):
                break
            if self._has_torchs_handlers and self._bytes[_ENDING]:
                effects.sleep(_POLL_SECONDS)
                ending = True
        os._exit(0)


def _warn_of_unshielded(number: int) -> None:
    """Warn of workers that started before, with torch's handlers. Forked ones leave the process group at least."""
    early = [child for child in multiprocessing.active_children() if child.daemon and child not in _workers]
    pids = [child.pid for child in _of_loaders() if child in early] if early else []
    for pid in pids:
        with suppress(OSError):  # one that was spawned may not be moved
            os.setpgid(pid, pid)
    if pids:
        _warn("data loader workers", pids, number)


def _of_loaders() -> Iterator[Any]:
    """Yield the workers of all existing data loader iterators: a started process forgets its target."""
    for each in gc.get_objects():
        if type(each).__name__.endswith("MultiProcessingDataLoaderIter"):
            yield from getattr(each, "_workers", ())


def _warn(noun: str, pids: list[Any], number: int) -> None:
    logger.warning(
        "nxd_ckpt: preemption: %s (pid %s) started before the Checkpointer: if %s is sent to them too, the data loader "
        "ends the training before a step can save; make the Checkpointer before iter(loader)",
        noun,
        first_of(map(str, pids)),
        signal.Signals(number).name,
    )
