"""The end of a process is told by its connection."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from nxd_ckpt.runtime.coordination.peers import Hub, Spoke, _Lines

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


def test_strangers_that_say_nothing_hold_up_nobody() -> None:
    """Neither a rank that connects, nor that the end of one is noticed."""
    hub = Hub()
    address = ("127.0.0.1", hub.address()["port"])
    first = Spoke(1, hub.address())
    silent = [socket.create_connection(address) for _ in range(20)]
    for number in range(2, 5):
        Spoke(number, hub.address()).leave()
        assert comes_true(lambda number=number: hub.is_gone(number))  # type: ignore[misc]
    assert (False, False) == (hub.is_gone(1), first.is_gone(0))
    for connection in silent:
        connection.close()


@pytest.mark.parametrize("line", [b"nonsense\n", b"\xff\n", b"1\n", b"[[], 1]\n"], ids=repr)
def test_who_sends_no_words_is_gone(line: bytes) -> None:
    """On both ends; the thread goes on, and notices the end of others."""
    hub = Hub()
    first, second = Spoke(1, hub.address()), Spoke(2, hub.address())
    first._connection.sendall(line)
    assert comes_true(lambda: hub.is_gone(1))
    for connection in hub._ranks:
        connection.sendall(line)
    assert comes_true(lambda: second.is_gone(0))
    second.leave()
    assert comes_true(lambda: hub.is_gone(2))


def test_a_word_told_while_a_rank_connects_comes_after() -> None:
    """It does not take the word for the answer to its own."""
    hub = Hub()
    tellers: list[threading.Thread] = []

    class Telling(set[int]):
        def discard(self, rank: object) -> None:  # in the middle of the admission
            tellers.append(threading.Thread(target=hub.tell, args=(1, "word")))
            tellers[0].start()
            tellers[0].join(0.2)

    hub._gone = Telling()
    spoke = Spoke(1, hub.address())
    heard: list[Any] = []
    spoke.listen(1, lambda rank, word: heard.append(word))
    assert comes_true(lambda: heard == ["word"])


def test_two_threads_read_one_after_the_other() -> None:
    """Words keep their order, and whole."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    lines, heard = _Lines(ours), []
    in_it, go_on = threading.Event(), threading.Event()

    def hear(channel: int, word: Any) -> None:
        in_it.set()
        go_on.wait(600)
        heard.append(word)

    theirs.sendall(b'[1, "first"]\n[1, "sec')
    thread = threading.Thread(target=lines.read, args=(hear,))
    thread.start()
    in_it.wait(600)
    theirs.sendall(b'ond"]\n')
    assert lines.read(lambda channel, word: heard.append(word))
    go_on.set()
    thread.join()
    assert lines.read(hear)
    assert ["first", "second"] == heard
    theirs.close()
    assert not lines.read(hear)
    ours.close()
