"""What arrives over the network: strangers, hosts that say nothing or something wrong, keys that lead away."""

import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from nxd_ckpt.errors import InvalidArgument, MalformedFile
from nxd_ckpt.storage.base import Version
from nxd_ckpt.storage.hosts import remote as remote_module
from nxd_ckpt.storage.hosts import server as server_module
from nxd_ckpt.storage.hosts.remote import Address, Refused, RemoteDirectory
from nxd_ckpt.storage.hosts.wire import Channel, address_of
from nxd_ckpt.storage.system import tell_room
from tests.hosts.views import SECRET, World
from tests.protocol.job import until

SHORT = 0.5
"""Seconds that a host may be silent, where it is to be silent."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, 2)
    world.own[1].write("t/file", b"0123456789")
    yield world
    world.close()


def connected(world: World) -> socket.socket:
    """A connection of a stranger to host 1."""
    return socket.create_connection(("127.0.0.3", world.servers[1].port))


class Impostor:
    """Proves to be host 1, and then does something else than a host would."""

    def __init__(self, act: Callable[[Channel, socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._act = act
        self.remote = RemoteDirectory(
            1, "host 1", Address(["127.0.0.1"], self._listener.getsockname()[1]), SECRET, SHORT
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    channel = Channel(connection, SHORT)
                    if channel.admit(SECRET, 1):
                        channel.request()
                        self._act(channel, connection)

    def close(self) -> None:
        self._listener.close()
        self.remote.close()


def test_who_does_not_know_the_secret_gets_nothing(world: World) -> None:
    """Not even the length of a file; the server goes on."""
    with pytest.raises(ConnectionError, match="host 1"):
        world.remote(1, secret=b"x" * 32, timeout=SHORT).read("t/file")
    assert b"0123456789" == world.remote(1).read("t/file")


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(10_000)])
def test_strangers_are_dropped(world: World, said: bytes) -> None:
    """What they get is a number that is new each time, and then the end."""
    got = []
    for _ in range(2):
        with connected(world) as stranger, suppress(OSError):  # the host may hang up before all was said
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            got.append(stranger.recv(1000))
            assert b"" == stranger.recv(1000)
    assert len(set(got)) == len(got)
    assert all(len(answer) == 32 for answer in got)


def test_strangers_that_say_nothing_keep_nobody_out(world: World) -> None:
    """Hundreds at once: they are dropped after a few seconds, the rest at once."""
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(world))
        assert b"0123456789" == world.remote(1).read("t/file")


def test_a_host_that_may_have_no_more_threads_serves_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes meanwhile is dropped, and comes again."""
    refused: list[object] = []

    class Refused(threading.Thread):
        def start(self) -> None:
            if len(refused) < 2:
                refused.append(self)
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(threading, "Thread", Refused)
    assert b"0123456789" == world.remote(1).read("t/file")
    assert 2 == len(refused)


def test_a_host_without_descriptors_waits_for_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not take the processor from the training until there are."""
    tried: list[object] = []

    def accept(listener: socket.socket) -> None:
        tried.append(listener)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(server_module, "_PAUSE", 600.0)
    world = World(tmp_path, 1)
    until(lambda: bool(tried))
    world.close()
    assert 1 == len(tried)


def test_another_host_of_the_job_is_not_taken_for_this_one(world: World) -> None:
    """Though it knows the secret: its address may have been a wrong one."""
    wrong = RemoteDirectory(0, "host 0", Address(["127.0.0.3"], world.servers[1].port), SECRET, SHORT)
    with pytest.raises(ConnectionError, match="host 0"):
        wrong.read("t/file")


@pytest.mark.parametrize("key", ["../outside", "t/../../outside", "/etc/passwd", "t//file", "."])
def test_no_key_leads_out_of_the_directory(world: World, key: str) -> None:
    """To read, to write, or to remove."""
    (world.paths[1].parent / "outside").write_bytes(b"secret")
    remote = world.remote(1)
    for act in (remote.read, remote.list, remote.remove, remote.open, lambda key: remote.write(key, b"x")):
        with pytest.raises(MalformedFile, match="leaves the directory"):
            act(key)
    with pytest.raises(OSError, match="the directory itself"):
        remote.remove("")
    assert b"secret" == (world.paths[1].parent / "outside").read_bytes()


def test_no_link_leads_out_of_the_directory(world: World) -> None:
    """Neither one that is a file, nor one that is a folder: another process may have put it there."""
    outside = world.paths[1].parent / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    (world.paths[1] / "t" / "link").symlink_to(outside / "file")
    (world.paths[1] / "folder").symlink_to(outside)
    remote = world.remote(1)
    for key in ("t/link", "folder/file"):
        for act in (remote.read, remote.open, remote.size, lambda key: remote.write(key, b"x")):
            with pytest.raises(MalformedFile, match="leads out of the directory"):
                act(key)
    with pytest.raises(MalformedFile, match="leads out of the directory"):
        remote.list("folder")
    asked = ["t/link", "t/file", "folder/file", "t/absent"]
    assert [b"", world.own[1].read("t/file"), b"", None] == remote.peek(asked)
    with pytest.raises(MalformedFile):
        remote.peek(["t/file", "../outside/file"])
    assert {"file": b"secret"} == {path.name: path.read_bytes() for path in outside.iterdir()}


@pytest.mark.parametrize(
    "fields",
    [
        '{"do": "read", "key": "t/file", "limit": Infinity}',
        '{"do": "read", "key": "t/file", "limit": 1e400}',
        '{"do": "read", "key": "t/file", "limit": NaN}',
        '{"do": "read", "key": "t/file", "limit": "7"}',
        '{"do": "create", "key": "t/new", "nbytes": -Infinity}',
        '{"do": "read_ranges", "key": "t/file", "version": [10, "x"], "ranges": [[Infinity, 1]]}',
        '{"do": "copy_out", "key": "t/file", "place": 1e999, "folder": "f", "name": "n", "expected": [1, 2]}',
    ],
)
def test_a_number_that_is_none_is_refused(world: World, fields: str, caplog: pytest.LogCaptureFixture) -> None:
    """The caller is told; nothing unexpected happens on the host, which answers the next request."""
    with connected(world) as connection:
        channel = Channel(connection, 60.0)
        channel.prove(SECRET, 1)
        for text in (fields, '{"do": "size", "key": "t/file"}'):
            head = f"[{text}, []]".encode()
            connection.sendall(struct.pack(">I", len(head)) + head)
            answer, _ = channel.reply()
            if text == fields:
                assert "error" in answer
        assert {"value": 10} == answer
    assert not caplog.records


def test_bytes_that_were_changed_on_the_way_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica's bytes are proved on arrival, and no file is left."""
    writer = world.remote(1).create("t/other", 10)
    monkeypatch.setattr(remote_module, "zlib", _WrongDigest)
    writer.write_at(0, b"0123456789")
    with pytest.raises(OSError, match="bytes changed on their way"):
        writer.settle()
    writer.abort()
    assert not world.own[1].is_file("t/other")


class _WrongDigest:
    @staticmethod
    def crc32(data: object) -> int:
        return 1


def test_a_writer_whose_host_dies_leaves_no_file(world: World) -> None:
    """The connection ends, and what it wrote goes with it."""
    remote = world.remote(1)
    writer = remote.create("t/other", 10)
    writer.write_at(0, b"01234")
    writer.settle()
    assert world.own[1].is_file("t/other")
    remote.leave()  # closes its end, as the end of its process does
    until(lambda: not world.own[1].is_file("t/other"))


def _wait(connection: socket.socket) -> None:
    """Until the other end has had enough."""
    connection.recv(1)


WRONG: dict[str, Callable[[Channel, socket.socket], None]] = {
    "nothing": lambda channel, connection: _wait(connection),
    "the end": lambda channel, connection: None,
    "no message": lambda channel, connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n"),
    "no object": lambda channel, connection: connection.sendall(b"\0\0\0\4[[]]"),
    "too much": lambda channel, connection: channel.send({"value": 1}, b"x" * 100),
    "half of it": lambda channel, connection: connection.sendall(b"\0\0\0\x0b[{}, [1000]]"),
    "no error": lambda channel, connection: channel.send({"error": 7}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_host_that_answers_wrongly_is_named(what: str) -> None:
    """In time, and without anything of it being believed."""
    impostor = Impostor(WRONG[what])
    memory = memoryview(bytearray(10))
    try:
        with pytest.raises((ConnectionError, TimeoutError), match=r"host 1 \(host 1\) is away, stuck or wrong"):
            impostor.remote.read_ranges("t/file", Version(10, "mark"), [(0, memory)])
    finally:
        impostor.close()


def test_an_interface_is_an_address_or_a_name() -> None:
    """Of this host."""
    assert ["127.0.0.1", "127.0.0.1", "::1"] == [address_of("lo"), address_of("127.0.0.1"), address_of("::1")]
    with pytest.raises(InvalidArgument, match=r"interface='nxd9'.*lo"):
        address_of("nxd9")


def test_a_full_disk_of_another_host_is_not_told_the_room_of_this_one() -> None:
    """The error as the other host gave it, though this process was to write the bytes."""
    told = [kind(errno.ENOSPC, "No space left on device") for kind in (OSError, Refused)]
    for error in told:
        tell_room(error, "/", 1600)
    assert [True, False] == ["are free" in str(error) for error in told]
