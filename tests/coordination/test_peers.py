"""The end of a process is told by its connection."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from nxd_ckpt.coordination import peers
from nxd_ckpt.coordination.peers import ConnectionToRank0, Rank0Connections, _Lines
from nxd_ckpt.storage.hosts.wire import NONCE

SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def _no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is dropped for a good reason is not to be waited for."""
    monkeypatch.setattr(peers, "_JOINING", 0.0)


def comes_true(what: Callable[[], bool]) -> bool:
    """Whether it does so within ten minutes."""
    deadline = time.monotonic() + 600
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def test_an_end_that_closes_is_gone() -> None:
    """Rank 0 learns which rank ended, and only that."""
    hub = Rank0Connections(SECRET)
    first, second = ConnectionToRank0(1, hub.address(), SECRET), ConnectionToRank0(2, hub.address(), SECRET)
    second.leave()
    assert comes_true(lambda: hub.is_gone(2))
    assert (False, False, False) == (hub.is_gone(1), hub.is_gone(3), first.is_gone(0))


def test_a_forked_child_does_not_keep_its_parent_alive() -> None:
    """Neither end: a child that outlives the process closes its copies at its beginning."""
    hub = Rank0Connections(SECRET)
    source, sink = os.pipe()
    ended, end = os.pipe()
    pid = os.fork()
    if pid == 0:  # a rank whose child outlives it
        spoke = ConnectionToRank0(1, hub.address(), SECRET)
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
    """Without the secret nobody is admitted, and nobody who has another one is taken for rank 0."""
    hub = Rank0Connections(SECRET)
    with pytest.raises(OSError, match="no answer"):
        ConnectionToRank0(1, hub.address(), b"guessed")
    assert not hub.is_gone(1)
    ConnectionToRank0(1, hub.address(), SECRET).leave()  # the next is admitted
    assert comes_true(lambda: hub.is_gone(1))


def test_what_a_rank_said_proves_nothing_a_second_time() -> None:
    """A stranger that heard the proof of a rank, and says the same, is not admitted: each connection has its number."""
    hub = Rank0Connections(SECRET)
    recorder = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def relay() -> None:
        rank, _ = recorder.accept()
        recorder.close()
        with rank, socket.create_connection(("127.0.0.1", hub.address()["port"])) as there:
            rank.sendall(there.recv(NONCE))
            heard.append(rank.recv(1000))

    relaying = threading.Thread(target=relay, daemon=True)
    relaying.start()
    with pytest.raises(OSError, match=r"no answer|refused"):
        ConnectionToRank0(1, {"hosts": ["127.0.0.1"], "port": recorder.getsockname()[1]}, SECRET)
    relaying.join()
    with socket.create_connection(("127.0.0.1", hub.address()["port"])) as again:
        again.recv(NONCE)
        again.sendall(heard[0])
        with suppress(ConnectionResetError):
            assert b"" == again.recv(NONCE)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(1000), b"\xff" * 100], ids=len)
def test_what_strangers_say_is_not_believed(said: bytes) -> None:
    """Nor answered, but with the end; ranks are served on."""
    hub = Rank0Connections(SECRET)
    with socket.create_connection(("127.0.0.1", hub.address()["port"])) as stranger:
        stranger.recv(NONCE)
        stranger.sendall(said)
        with suppress(ConnectionResetError):
            assert b"" == stranger.recv(NONCE)
    ConnectionToRank0(1, hub.address(), SECRET).leave()
    assert comes_true(lambda: hub.is_gone(1))


def test_strangers_hold_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connect: the oldest go for the newest, and ranks are admitted in between."""
    monkeypatch.setattr(peers, "_JOINING", 600.0)
    hub = Rank0Connections(SECRET)
    silent = [socket.create_connection(("127.0.0.1", hub.address()["port"])) for _ in range(300)]
    ConnectionToRank0(1, hub.address(), SECRET).leave()
    assert comes_true(lambda: hub.is_gone(1))
    assert len(hub._unproved) <= 64
    for connection in silent:
        connection.close()
    assert comes_true(lambda: not hub._unproved)


def test_a_stranger_that_drips_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says must be over in time, though no one else connects."""
    monkeypatch.setattr(peers, "_CONNECTING", 0.2)
    hub = Rank0Connections(SECRET)
    with socket.create_connection(("127.0.0.1", hub.address()["port"])) as stranger:
        stranger.recv(NONCE)
        assert comes_true(lambda: len(hub._unproved) == 1)
        stranger.sendall(b"1")
        assert comes_true(lambda: not hub._unproved)


@pytest.mark.parametrize(
    ("master", "hosts"), [("127.0.0.1", ["127.0.0.1"]), ("localhost", ["127.0.0.1"]), ("::1", ["127.0.0.1"])]
)
def test_a_job_on_one_host_is_not_reached_from_others(
    monkeypatch: pytest.MonkeyPatch, master: str, hosts: list[str]
) -> None:
    """Its store cannot be, either. Nobody listens on all addresses, in any case."""
    monkeypatch.setenv("MASTER_ADDR", master)
    assert hosts == Rank0Connections(SECRET).address()["hosts"]
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname())
    addresses = [door.getsockname()[0] for door in Rank0Connections(SECRET)._doors.values()]
    assert addresses
    assert not {"0.0.0.0", "::"} & set(addresses)


@pytest.mark.parametrize(
    "line",
    [b"nonsense\n", b"\xff\n", b"1\n", b"[[], 1]\n", b"[" * 200_000 + b"\n", b"x" * (2**20 + 2**16)],
    ids=lambda line: repr(line[:10]),
)
def test_who_sends_no_words_is_gone(line: bytes) -> None:
    """On both ends; the thread goes on, and notices the end of others."""
    hub = Rank0Connections(SECRET)
    first, second = ConnectionToRank0(1, hub.address(), SECRET), ConnectionToRank0(2, hub.address(), SECRET)
    first._connection.setblocking(True)
    with suppress(OSError):
        first._connection.sendall(line)
    assert comes_true(lambda: hub.is_gone(1))
    for connection in list(hub._ranks):
        connection.setblocking(True)
        with suppress(OSError):  # the other end has had enough before the end of it
            connection.sendall(line)
    assert comes_true(lambda: second.is_gone(0))
    second.leave()
    assert comes_true(lambda: hub.is_gone(2))


def test_a_word_told_while_a_rank_connects_comes_after() -> None:
    """It does not take the word for the answer to its own."""
    hub = Rank0Connections(SECRET)
    tellers: list[threading.Thread] = []

    class Telling(set[int]):
        def discard(self, rank: object) -> None:  # in the middle of the admission
            tellers.append(threading.Thread(target=hub.tell, args=(1, "word")))
            tellers[0].start()
            tellers[0].join(0.2)

    hub._gone = Telling()
    spoke = ConnectionToRank0(1, hub.address(), SECRET)
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
