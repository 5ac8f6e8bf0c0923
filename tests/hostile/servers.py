"""What the ends of a job's connections read: requests to a host's server, its answers, words between ranks.

Who sends them has proved to belong to the job; what is sent may be anything all the same.
"""

import json
import os
import random
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from nxd_ckpt.coordination.agreement import SingleProcessAgreement
from nxd_ckpt.coordination.peers import _HELLO, Heard, Rank0Connections, _Lines, _UnprovedConnection
from nxd_ckpt.coordination.stopping import Stopping
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.base import Version
from nxd_ckpt.storage.hosts.directory import OwnDirectory
from nxd_ckpt.storage.hosts.remote import Address, RemoteDirectory
from nxd_ckpt.storage.hosts.server import _Conversation, copy_nothing
from nxd_ckpt.storage.hosts.wire import NONCE, Channel, proof
from tests.hostile.damage import damaged, damaged_json

SECRET = b"s" * 32
_HEAD = struct.Struct(">I")
_OUTSIDE = b"of nobody's business"


class Connection:
    """A socket whose other end has sent ``data`` and has closed its side. ``sent`` is what this end sends."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at, self.sent = data, 0, bytearray()

    def recv(self, nbytes: int) -> bytes:
        begin, self._at = self._at, min(self._at + nbytes, len(self._data))
        return self._data[begin : self._at]

    def recv_into(self, memory: memoryview) -> int:
        data = self.recv(len(memory))
        memory[: len(data)] = data
        return len(data)

    def sendall(self, data: bytes | memoryview) -> None:
        self.sent += data

    def sendfile(self, file: BinaryIO, offset: int, count: int) -> int:
        data = os.pread(file.fileno(), count, offset)
        self.sent += data
        return len(data)

    def settimeout(self, seconds: float | None) -> None:
        """It never waits."""

    def setsockopt(self, *option: int) -> None:
        """It has none."""

    def close(self) -> None:
        """Nothing is open."""


def _as_socket(data: bytes) -> tuple[Connection, socket.socket]:
    connection = Connection(data)
    return connection, cast("socket.socket", connection)


class Unexpected(Exception):
    """What no message may lead to."""


def message(fields: Any, *blobs: bytes) -> bytes:
    """As one end sends it."""
    head = json.dumps([fields, [len(blob) for blob in blobs]]).encode()
    return _HEAD.pack(len(head)) + head + b"".join(blobs)


def damaged_message(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """The fields of the first message changed, as those of a document."""
    if len(data) < _HEAD.size:
        return damaged(rng, data, other)
    end = _HEAD.size + _HEAD.unpack(data[: _HEAD.size])[0]
    head = damaged_json(rng, data[_HEAD.size : end], other)
    return _HEAD.pack(len(head)) + head + data[end:]


def damaged_line(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One of the words changed."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = damaged_json(rng, lines[at], other)
    return b"\n".join(lines)


def requests(scratch: Path) -> Callable[[bytes], None]:
    """A host's server, whose directory is below ``scratch``: it answers, or ends the connection; nothing outside of
    the directory is read or changed."""

    def read(data: bytes) -> None:
        place = scratch / f"{os.getpid()}-host"
        outside = place / "outside"
        own = OwnDirectory(place / "own", durable=False)
        (own.root / "t").mkdir(parents=True, exist_ok=True)
        outside.mkdir(exist_ok=True)
        (outside / "file").write_bytes(_OUTSIDE)
        (own.root / "t" / "file").write_bytes(b"0123456789")
        for link in (own.root / "link", own.root / "t" / "link"):
            if not link.is_symlink():
                link.symlink_to(outside)
        connection, as_socket = _as_socket(data)
        with suppress(OSError):  # the caller has gone
            _Conversation(own, Channel(as_socket, 60.0), copy_nothing).serve()
        if _OUTSIDE in connection.sent and _OUTSIDE not in data:
            raise Unexpected("a file outside of the directory was sent")
        if ["file"] != os.listdir(outside) or (outside / "file").read_bytes() != _OUTSIDE:
            raise Unexpected("something outside of the directory was changed")

    return read


ASKED: Sequence[Callable[[RemoteDirectory], object]] = (
    lambda remote: remote.read("t/file"),
    lambda remote: remote.peek(["t/file", "t/absent"]),
    lambda remote: remote.open("t/file"),
    lambda remote: remote.read_ranges("t/file", Version(10, "mark"), [(0, memoryview(bytearray(4)))]),
    lambda remote: remote.list("t"),
    lambda remote: remote.size("t/file"),
    lambda remote: remote.time("t/file"),
    lambda remote: remote.write("t/file", b"1"),
    lambda remote: remote.create("t/file", 4).close(),
    lambda remote: next(remote.copy_out("t/file", 1, "t", "file", None), None),  # type: ignore[arg-type]
)


def answers(data: bytes) -> None:
    """Whatever a host answers with, and whatever it was asked: a value, or an error that a caller expects."""
    for ask in ASKED:
        _, as_socket = _as_socket(data)
        remote = _Asking(as_socket)
        with suppress(OSError, EOFError, CheckpointError):
            ask(remote)


class _Asking(RemoteDirectory):
    def __init__(self, connection: socket.socket) -> None:
        super().__init__(1, "host 1", Address(["127.0.0.1"], 1), SECRET, 60.0)
        self._answering = connection

    def _connect(self) -> Channel:
        return Channel(self._answering, 60.0)


def words(data: bytes) -> None:
    """What a rank sends to rank 0, and rank 0 to it: both make something of it, or take the other for gone."""
    told: list[Any] = []
    for rank in (0, 1):
        peers = _Heard()
        Stopping(_Member(peers, rank, told), lambda: None, 1.0)
        lines = _Lines(_as_socket(data)[1])
        while lines.read(partial(peers.hear, 1 - rank)):
            pass


class _Heard:
    """One end of the connections; words of any channel reach who listens."""

    def __init__(self) -> None:
        self._listeners: list[Heard] = []

    def is_gone(self, rank: int) -> bool:
        return False

    def listen(self, channel: int, heard: Heard | None) -> None:
        if heard is not None:
            self._listeners.append(heard)

    def tell(self, channel: int, word: Any) -> None:
        json.dumps([channel, word])

    def hear(self, rank: int, channel: int, word: Any) -> None:
        for heard in self._listeners:
            heard(rank, word)


class _Member(SingleProcessAgreement):
    """One of two ranks. Rank 1 is told what rank 0 was, which comes first."""

    def __init__(self, peers: _Heard, rank: int, told: list[Any]) -> None:
        self.peers, self.rank, self.world_size, self._told = peers, rank, 2, told

    def gather(self, value: Any) -> list[Any] | None:
        return [value, value] if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self._told.append(value)
            return value
        return self._told.pop(0)


def hello(rank: int) -> bytes:
    """What a rank proves by that it is one."""
    ours = bytes([rank]) * NONCE
    return _HELLO.pack(rank, ours, proof(SECRET, b"rank", rank, bytes(NONCE) + ours))


HELLOS = [hello(rank) for rank in (1, 2, 255)]


def admission(data: bytes) -> None:
    """Rank 0 admits who proves to know the secret, and nobody else; words may follow at once."""
    hub, (connection, as_socket) = object.__new__(Rank0Connections), _as_socket(data)
    hub._secret, hub._telling, hub._selector = SECRET, threading.RLock(), cast("Any", _Selector())
    hub._ranks, hub._lines, hub._gone, hub._listeners = {}, {}, set(), {1: lambda rank, word: None}
    hub._unproved = {as_socket: _UnprovedConnection(0.0, bytes(NONCE), bytearray())}
    while as_socket in hub._unproved:
        hub._admit(as_socket)
    if bool(hub._ranks) != (data[: _HELLO.size] in HELLOS) or bool(connection.sent) != bool(hub._ranks):
        raise Unexpected(f"admitted: {hub._ranks.values()}")
    while hub._ranks and hub._lines[as_socket].read(partial(hub._hear, hub._ranks[as_socket])):
        pass


class _Selector:
    def register(self, connection: socket.socket, events: int) -> None:
        """Nothing is waited for."""

    def unregister(self, connection: socket.socket) -> None:
        """The same."""


_FILE = {"key": "t/file"}
REQUESTS = [
    message({"do": "read", **_FILE, "limit": 100}) + message({"do": "size", **_FILE}),
    message({"do": "peek", "keys": ["t/file", "t/absent", "link/file"]}),
    message({"do": "list", "key": "t"}) + message({"do": "is_dir", "key": "t"}) + message({"do": "time", **_FILE}),
    message({"do": "version", **_FILE}) + message({"do": "is_file", "key": "t/link/file"}),
    message({"do": "read_ranges", **_FILE, "version": [10, "x"], "ranges": [[0, 4], [6, 2]]}),
    message({"do": "write", "key": "t/small"}, b"abc")
    + message({"do": "rename", "key": "t/small", "target": "t/moved"}),
    message({"do": "link_new", "key": "t/new"}, b"abc") + message({"do": "exchange", "key": "t/new"}, b"abc", b"def"),
    message({"do": "make_dir", "key": "u"})
    + message({"do": "sync_dir", "key": "u"})
    + message({"do": "remove", "key": "u"}),
    message({"do": "create", "key": "t/large", "nbytes": 4})
    + message({"do": "write_at", "offset": 0, "crc32": zlib.crc32(b"abcd")}, b"abcd")
    + message({"do": "settle", "key": "t/large"})
    + message({"do": "close", "key": "t/large"}),
    message({"do": "create", "key": "t/given up", "nbytes": 4}) + message({"do": "abort", "key": "t/given up"}),
    message({"do": "copy_out", **_FILE, "place": 1, "folder": "t", "name": "x", "expected": [1, 2]})
    + message({"do": "go_on"}),
]
ANSWERS = [
    message({"value": [10, "mark"]}),
    message({"value": [3, None]}, b"abc"),
    message({}, b"0123"),
    message({}, b"ft/file\0dt/folder"),
    message({"value": 10.5}),
    message({"value": True}),
    message({"value": None}) + message({"value": 7}),
    message({"error": ["OSError", 28, "No space left on device"]}),
    message({"error": ["MalformedFile", None, "t/file is a directory, expected a file"]}),
]
WORDS = [
    b'[1, ["preempted", "SIGTERM"]]\n[1, ["passed", 7]]\n',
    b'[1, ["asked", 0, "SIGTERM"]]\n[1, ["stop_at", 9]]\n',
    b'[1, ["asked", 1, "maintenance"]]\n[1, ["lost", [1]]]\n[2, null]\n',
]
