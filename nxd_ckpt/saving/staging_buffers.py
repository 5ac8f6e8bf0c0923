"""The staging buffers of this process, which all its Checkpointers share: an idle directory's is handed on to the next.

A buffer is in use from the moment at which a save begins to fill it until this rank's bytes are written, whatever the
other ranks do. Usually there is one. A save that meets another directory's in flight gets a second one, if both fit the
cap; else it waits for the first.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from nxd_ckpt import effects
from nxd_ckpt.coordination.waiting import pause_after
from nxd_ckpt.saving.options import local_world_size
from nxd_ckpt.saving.staging import Stager
from nxd_ckpt.storage.arena import Arena, default_cap, whole_pages

_AT_ONCE = 2
"""Buffers that may be in use at the same time."""

_PASSED_OVER = 2
"""Saves that need only one buffer, after which a second one is given back to the system."""


@dataclass(eq=False)
class _Use:
    """A buffer of ``nbytes`` that is in use, or about to be. ``thread`` fills it; None once it is full."""

    nbytes: int
    thread: int | None
    stager: Stager | None = None


class StagingBuffers:
    """The buffers of one process, in use and idle.

    There is no lock: signal handlers save too, and every change of the lists is atomic.
    """

    def __init__(self) -> None:
        self._idle: list[Stager] = []
        self._in_use: list[_Use] = []
        self._users: set[object] = set()
        self._caps: dict[int, int] = {}

    def cap(self, world_size: int) -> int:
        """Return the bytes that all buffers may take by default, with so many ranks on all hosts.

        It is the same as long as there are buffers, which are not free memory.
        """
        local = local_world_size(world_size)
        if not (self._idle or self._in_use):
            self._caps.clear()
        if local not in self._caps:
            self._caps[local] = default_cap(local)  # reads files
        return self._caps[local]

    def take(self, user: object, nbytes: int, cap: int, former: Stager | None) -> Stager:
        """Return a buffer for ``nbytes``, at most ``cap``; the ``user``'s ``former`` one if that is idle.

        Waits while others have so many, or so large ones, that the cap allows no further one.
        """
        self._users.add(user)
        began = effects.monotonic()
        while (stager := self._taken(nbytes, cap, former)) is None:
            effects.sleep(pause_after(effects.monotonic() - began))
        stager.arena.cap = whole_pages(cap)
        return stager

    def filled(self, stager: Stager) -> None:
        """Note that the buffer only waits to be written."""
        for use in self._in_use:
            if use.stager is stager:
                use.thread = None

    def give_back(self, stager: Stager) -> None:
        """Make the buffer idle: all of it is written."""
        stager.passed_over = 0
        self._idle.append(stager)
        for use in list(self._in_use):
            if use.stager is stager:
                self._in_use.remove(use)

    def leave(self, user: object) -> None:
        """Let the ``user`` need no buffer any more; it has none in use. Without users the memory is released."""
        self._users.discard(user)
        while not self._users and self._idle:
            self._idle.pop().release()

    def _taken(self, nbytes: int, cap: int, former: Stager | None) -> Stager | None:
        mine = _Use(nbytes, effects.get_ident())
        self._in_use.append(mine)
        try:
            idle = list(self._idle)
            stager = former if former in idle else max(idle, key=_nbytes, default=None)
            if (stager is None or nbytes > _nbytes(stager)) and not self._allows(mine, cap):
                return None
            if stager is None:
                stager = Stager(Arena(cap))
            else:
                self._idle.remove(stager)
                self._trim()
            mine.nbytes, mine.stager = max(nbytes, _nbytes(stager)), stager
            return stager
        except ValueError:  # another thread was faster
            return None
        finally:
            if mine.stager is None:
                self._in_use.remove(mine)

    def _allows(self, mine: _Use, cap: int) -> bool:
        """Return whether there may be another buffer, beside those of uses before it."""
        before = list(self._in_use)
        before = before[: before.index(mine)]
        # To wait for what this very thread fills, which a signal handler has interrupted, would be for ever.
        if all(use.thread == mine.thread for use in before):
            return True
        return len(before) < _AT_ONCE and sum(use.nbytes for use in before) + mine.nbytes <= cap

    def _trim(self) -> None:
        """Give buffers back to the system that nobody has needed for long."""
        for stager in list(self._idle):
            stager.passed_over += 1
            if stager.passed_over >= _PASSED_OVER:
                with suppress(ValueError):  # another thread was faster
                    self._idle.remove(stager)
                    stager.release()


def _nbytes(stager: Stager) -> int:
    return stager.arena.nbytes


_of_ranks: dict[tuple[int, int], StagingBuffers] = {}
"""By process and rank: a forked child has none of its parent's, and a process may act as several ranks."""

effects.in_forked_children(_of_ranks.clear)


def buffers_of(rank: int) -> StagingBuffers:
    """Return the staging buffers of this process, as this rank of the job."""
    return _of_ranks.setdefault((effects.pid(), rank), StagingBuffers())
