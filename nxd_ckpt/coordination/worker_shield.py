"""Protection of data loaders' workers from signals that stop the training at a step, which needs them to end.

A scheduler signals all processes of a job. The training's own process sets a flag; a worker that died of the signal
would end the training in the middle of a step, by the loader's error. So workers ignore the signal while their parent
lives. A thread in each of them waits for its end: its parent is gone, or has called ``terminate()``, which tells it so
through a pipe. Programs that a worker starts get signals as usual.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import WeakSet

from nxd_ckpt import effects
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.effects import logger

_POLL_SECONDS = 1.0

_ignored: set[int] = set()
_shielded: WeakSet[BaseProcess] = WeakSet()
_server: int | None = None
"""The pid of the server of the start method "forkserver", once it was started with the signals blocked."""
_original_start = BaseProcess.start


def shield(number: int) -> None:
    """Let the workers that start from now on ignore a signal, and warn of those that started before."""
    from torch.utils.data._utils import signal_handling

    early = [child.pid for child in multiprocessing.active_children() if child.daemon and child not in _shielded]
    if early and signal_handling._SIGCHLD_handler_set:  # there was a loader with workers
        _warn("data loader workers", early, {number})
    _ignored.add(number)
    BaseProcess.start = _start  # type: ignore[method-assign,assignment]


def _start(process: BaseProcess) -> None:
    """Start a process in place of ``Process.start``."""
    target: Any = getattr(process, "_target", None)
    method: Any = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    shielded = _is_of_a_loader(target)
    if not shielded and method != "forkserver":
        _original_start(process)
        return
    # What is started inherits the blocked signals, so that none comes before it can be handled.
    with _blocked(_ignored):
        if method == "forkserver":
            _start_forkserver()
        if not shielded:
            process._unblocks = _Unblocks()  # type: ignore[attr-defined]
            _original_start(process)
            return
        ending, sender = multiprocessing.Pipe(duplex=False)
        process._target = _Shielded(target, ending, frozenset(_ignored))  # type: ignore[attr-defined]
        _original_start(process)
    _shielded.add(process)
    process._popen.terminate = partial(_end, sender)  # type: ignore[attr-defined]


def _is_of_a_loader(target: Any) -> bool:
    """Return whether a process that runs ``target`` is a worker of torch's data loader or a similar one."""
    module = getattr(target, "__module__", None) or ""
    return module.startswith(("torch.utils.data.", "torchdata.")) or getattr(target, "__name__", "") == "_worker_loop"


def _start_forkserver() -> None:
    """Start the fork server, with signals blocked: it is its workers' parent, and they would end with it."""
    global _server
    server: Any = forkserver._forkserver
    before = server._forkserver_pid
    server.ensure_running()
    if before == server._forkserver_pid != _server:
        _warn("multiprocessing's forkserver", [before], _ignored)
    _server = server._forkserver_pid


def _end(sender: Connection) -> None:
    with suppress(OSError):  # it has ended by itself
        sender.send_bytes(b"end")


@contextmanager
def _blocked(numbers: Set[int]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Unblocks:
    """An attribute of a process that is no worker: unblocks where it is unpickled what the fork server has blocked."""

    def __reduce__(self) -> Any:
        return signal.pthread_sigmask, (signal.SIG_UNBLOCK, frozenset(_ignored))


class _Shielded:
    """A worker's main function."""

    def __init__(self, target: Callable[..., Any], ending: Connection, numbers: frozenset[int]) -> None:
        self._target = target
        self._ending = ending
        self._numbers = numbers

    def __call__(self, *args: Any, **options: Any) -> Any:
        from torch.utils.data._utils import signal_handling

        torchs: Any = signal_handling
        torchs._set_worker_signal_handlers = partial(self._set_handlers, torchs._set_worker_signal_handlers)
        effects.Thread(target=self._watch, args=(os.getppid(),), name="nxd_ckpt-shield", daemon=True).start()
        self._ignore()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        return self._target(*args, **options)

    def _set_handlers(self, set_torchs_handlers: Callable[[], None]) -> None:
        """Set torch's handlers, which would end the worker, and ours over them."""
        with _blocked(self._numbers):
            set_torchs_handlers()
            self._ignore()

    def _ignore(self) -> None:
        for number in self._numbers:
            signal.signal(number, _do_nothing)  # programs that the worker starts would inherit SIG_IGN
            signal.siginterrupt(number, False)  # a library's reads continue

    def _watch(self, parent: int) -> None:
        """End the worker with its parent, or when its parent says so. To torch, exit code 0 is no failure."""
        while os.getppid() == parent and not self._ending.poll(_POLL_SECONDS):
            pass
        os._exit(0)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _warn(noun: str, pids: list[Any], numbers: Set[int]) -> None:
    logger.warning(
        "nxd_ckpt: preemption: %s (pid %s) started before the Checkpointer: if %s is sent to them too, the data loader "
        "ends the training before a step can save; make the Checkpointer before iter(loader)",
        noun,
        first_of(map(str, pids)),
        " or ".join(signal.Signals(number).name for number in sorted(numbers)),
    )
