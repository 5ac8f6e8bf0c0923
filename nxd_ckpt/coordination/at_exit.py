"""The end of open objects: of those that nobody holds any more, and of all at the end of the process.

A failure that nobody was told of becomes the exit code.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, process
from contextlib import suppress
from functools import wraps
from multiprocessing import current_process, parent_process, util
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import ref

from nxd_ckpt import effects
from nxd_ckpt.effects import logger

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_PAUSE = 0.01

_FIRST, _LAST = 1000, -1000
"""Priorities among what a child of multiprocessing does at its end; queues are flushed in between."""


class Closable(Protocol):
    """The methods of a Checkpointer that end it."""

    def close(self) -> None:
        """Finish, and raise failures that were not raised before."""

    def release(self) -> None:
        """Do the same, but it can be used again."""

    def abandon(self) -> None:
        """Finish this rank's part after an exception; never raises."""


_open: dict[int, Callable[[], Closable | None]] = {}
_ending: set[int] = set()
"""Keys of ``_open`` whose objects end in the background, since nobody holds them any more."""


def close_at_exit(closable: Closable, *, while_held: bool = False) -> None:
    """Close it when the process ends, unless `forget` comes first; with ``while_held`` if somebody still holds it."""
    _end_with_child()
    _open[id(closable)] = ref(closable) if while_held else lambda: closable


def open_objects() -> list[Closable]:
    """Return what is to be closed, in the order in which it was opened."""
    return [closable for get in list(_open.values()) if (closable := get()) is not None]


class ClosesUnheld:
    """Base of an object that closes itself once nobody holds it any more."""

    def abandon(self, grace: float | None = None) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():  # else modules have lost their content, and all was closed before
            _close_unheld(self, lambda: self.abandon(None))


def _close_unheld(closable: Closable, close: Callable[[], None]) -> None:
    """Close it in the background, since nobody holds it any more. Its finalizer calls this, on any thread, at any time.

    ``close`` does not raise a save's failure.
    """
    if id(closable) in _open:
        close_at_exit(closable)
        _ending.add(id(closable))
        try:
            # A Thread takes locks, which the interrupted code may hold.
            effects.start_new_thread(_end, (id(closable), close))
        except RuntimeError:  # the interpreter exits, and closes it
            _ending.discard(id(closable))


def _end(number: int, close: Callable[[], None]) -> None:
    try:
        close()
    except Exception:  # nobody else would tell of it
        logger.exception("nxd_ckpt: unexpected error")
    finally:
        _ending.discard(number)


def settle_unheld(sign: Callable[[], None]) -> bool:
    """Wait until everything is closed that nobody holds any more; ``sign`` is called again and again meanwhile.

    Returns whether there was anything.
    """
    gc.collect()
    had_any = bool(_ending)
    while _ending:
        sign()
        effects.sleep(_PAUSE)
    return had_any


def forget(closable: Closable) -> None:
    """Do not close ``closable`` at the end of the process: it is closed."""
    _open.pop(id(closable), None)


_is_over = _is_lost = False


def is_over() -> bool:
    """Return whether the end of the process has come so far that nothing is waited for any more."""
    return _is_over


def counts_at_exit(save: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Let a ``save`` that fails in another exit handler, whose exceptions are only printed, make the exit code 1."""

    @wraps(save)
    def counted(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return save(*args, **kwargs)
        except Exception as error:
            if effects.is_exiting():
                _lose(error)
                if _is_over:
                    _exit_if_lost()
            raise

    return counted


class ToldFuture(Future[_Result]):
    """A future of the same outcome, whose failure makes the exit code 1 unless somebody asks for it."""

    def __init__(self, future: Future[_Result]) -> None:
        super().__init__()
        self._is_told = False
        self.set_running_or_notify_cancel()
        close_at_exit(self)
        future.add_done_callback(self._settle)

    def result(self, timeout: float | None = None) -> _Result:
        self.exception(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._is_told = True
        forget(self)
        return error

    def close(self) -> None:
        """Wait for it. Raises its failure, unless somebody was told."""
        if not self._is_told:
            self.result()

    release = close

    def abandon(self) -> None:
        """Do nothing: the interpreter waits for it anyway."""

    def _settle(self, future: Future[_Result]) -> None:
        error = future.exception()
        if error is None:
            forget(self)
            self.set_result(future.result())
        else:
            logger.error("nxd_ckpt: %s: %s", type(error).__name__, error)
            self.set_exception(error)


def _lose(error: BaseException) -> None:
    global _is_lost
    _is_lost = True
    logger.critical("nxd_ckpt: a checkpoint was not saved: %s: %s", type(error).__name__, error)


def _close_all() -> None:
    """Close everything, once; after an exception give the other ranks only a short grace."""
    crashed = _has_crashed()
    closables = open_objects()
    _open.clear()  # a process has several exits, and what was given up in one of them is not waited for in the next
    for closable in closables:
        if crashed:
            closable.abandon()
            continue
        try:
            closable.close()
        except BaseException as error:  # torch's, and an interrupt of the wait, must reach the exit code too
            _lose(error)


def _exit_if_lost() -> None:
    """End the process with code 1 if something was lost.

    An exception in an exit handler is only printed: a scheduler would take the job for a success.
    """
    if _is_lost:
        logging.shutdown()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


@atexit.register
def _at_exit() -> None:
    global _is_over
    _close_all()
    _is_over = True
    if _end_of_child is None or not _end_of_child.still_active():
        _exit_if_lost()


def _has_crashed() -> bool:
    """Return whether the process ends by an exception; torch's spawn() makes each an exit with code 1."""
    error = sys.exc_info()[1]
    is_raised = error is not None and (not isinstance(error, SystemExit) or error.code == 1)
    return _has_failed or is_raised or (getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"))


def _note_failure() -> None:
    """Note whether this child of multiprocessing failed. From Python 3.13 on its end comes after the exception's."""
    global _has_failed
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
        frame = frame.f_back
    _has_failed = frame is not None and frame.f_locals.get("exitcode") == 1


_has_failed = False
_end_of_child: util.Finalize | None = None


def _end_with_child() -> None:
    global _end_of_child
    if _end_of_child is None and parent_process() is not None:
        # A child calls no functions of atexit before Python 3.13, and later none that were there before a fork.
        util.Finalize(None, _close_all, exitpriority=_FIRST)
        _end_of_child = util.Finalize(None, _exit_if_lost, exitpriority=_LAST)
        effects.before_exit_handlers(_note_failure)
        _tell_pool()


def _tell_pool() -> None:
    """Let each task of a process pool finish its saves, and raise their failures, before its result goes back.

    Nobody looks at the exit code of a pool's process. torch_xla.launch runs the ranks in such processes.
    """
    worker: Any = current_process()
    if worker._target is process._process_worker:
        _, results, *_ = worker._args
        send = results.put

        def finish_and_send(result: object) -> None:
            if getattr(result, "exception", None) is None:
                _finish_task()  # what it raises is sent in place of the result
            send(result)

        results.put = finish_and_send


def _finish_task() -> None:
    """Finish all saves; raise the first failure, and let others be the exit code."""
    settle_unheld(lambda: None)
    failures: list[BaseException] = []
    for closable in open_objects():
        try:
            closable.release()
        except BaseException as error:
            failures.append(error)
    for failure in failures[1:]:
        _lose(failure)
    if failures:
        raise failures[0]


def _forget_parents() -> None:
    """Forget, in a forked child, the open objects, which are its parent's, as their threads are."""
    global _end_of_child
    _end_of_child = None
    _open.clear()
    _ending.clear()


effects.in_forked_children(_forget_parents)
