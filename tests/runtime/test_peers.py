"""The end of a process is told by its connection."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from nxd_ckpt.runtime.coordination.peers import Hub, Spoke

pytestmark = [pytest.mark.plain, pytest.mark.once]


def comes_true(what: Callable[[], bool]) -> bool:
    """Whether it does so within ten minutes."""
    deadline = time.monotonic() + 600
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def test_an_end_that_closes_is_gone() -> None:
    """Rank 0 learns which rank ended, and only that."""
    hub = Hub()
    first, second = Spoke(1, hub.address()), Spoke(2, hub.address())
    second.leave()
    assert comes_true(lambda: hub.is_gone(2))
    assert (False, False, False) == (hub.is_gone(1), hub.is_gone(3), first.is_gone(0))


def test_a_forked_child_does_not_keep_its_parent_alive() -> None:
    """Neither end: a child that outlives the process closes its copies at its beginning."""
    hub = Hub()
    source, sink = os.pipe()
    ended, end = os.pipe()
    pid = os.fork()
    if pid == 0:  # a rank whose child outlives it
        spoke = Spoke(1, hub.address())
        if os.fork() == 0:
            spoke.leave()
            os.write(sink, b"1")
            os.read(ended, 1)
        else:
            os.read(source, 1)
        os._exit(0)
    os.waitpid(pid, 0)
    gone = comes_true(lambda: hub.is_gone(1))
    os.write(end, b"1")
    assert gone


def test_strangers_are_not_ranks() -> None:
    """Without the token nobody is admitted."""
    hub = Hub()
    for token in ("guessed", "\N{SNOWMAN}"):
        with pytest.raises(OSError, match="no answer"):
            Spoke(1, {**hub.address(), "token": token})
    assert not hub.is_gone(1)
    Spoke(1, hub.address()).leave()  # the next is admitted
    assert comes_true(lambda: hub.is_gone(1))
