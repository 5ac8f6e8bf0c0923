"""Another host's directory, through its server."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple
from weakref import WeakSet

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.effects import in_forked_children
from nxd_ckpt.storage.base import DirEntry, Reader, Version, Writer
from nxd_ckpt.storage.hosts.server import PIECE
from nxd_ckpt.storage.hosts.wire import NAMED, Channel, Fields, connect

_CONNECTING = 10.0
"""Maximum seconds of connecting to a host."""
_RANGES = 1000
"""Maximum number of ranges of a file in one request."""


class Refused(OSError):
    """An error that a host answered with: the connection works."""


_ANSWERS = (Refused, *NAMED)
"""Errors that a host may answer with: the connection works."""


class Address(NamedTuple):
    """The address of a host's server: any of several addresses of the host, and the port."""

    hosts: Sequence[str]
    port: int


class RemoteDirectory:
    """The directory of host number ``host``. Safe for threads, each of which has a connection while it needs one.

    Any failure on the way is a ConnectionError or TimeoutError that names the host.
    """

    def __init__(self, host: int, name: str, address: Address, secret: bytes, timeout: float) -> None:
        self.host: int = host
        self.url: str = name
        self._where = f"host {host} ({name})"
        self.received: int = 0
        """Bytes of files that the host sent so far."""
        self._address = address
        self._secret = secret
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._channels: WeakSet[Channel] = WeakSet()
        _connected.add(self)

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        data = self._ask("read", key, limit=limit)[1]
        self._count(len(data))
        return data

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        lengths, data = self._ask("peek", keys=list(keys))
        with self.naming():
            _check(isinstance(lengths, list) and len(lengths) == len(keys))
            _check(sum(0 if length is None else _length(length) for length in lengths) == len(data))
        contents: list[bytes | None] = []
        begin = 0
        for length in lengths:
            contents.append(None if length is None else data[begin : begin + length])
            begin += length or 0
        return contents

    def open(self, key: str) -> Reader:
        version = self._ask("version", key)[0]
        with self.naming():
            _check(isinstance(version, list) and len(version) == 2 and isinstance(version[1], str))
            return RemoteReader(self, key, Version(_length(version[0]), version[1]))

    def read_ranges(self, key: str, version: Version, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill memory from the file of this ``version``; OSError if it is another by now."""
        fields = {"do": "read_ranges", "key": key, "version": version}
        with self._connected() as channel:
            channel.send({**fields, "ranges": [(offset, len(view)) for offset, view in ranges]})
            answer, lengths = channel.reply()
            _raise_of(self._where, answer)
            if lengths != [sum(len(view) for _, view in ranges)]:
                raise ConnectionError("sends another number of bytes than requested")
            for _, view in ranges:
                channel.fill(view)
        self._count(lengths[0])

    def size(self, key: str) -> int:
        nbytes = self._ask("size", key)[0]
        with self.naming():
            return _length(nbytes)

    def time(self, key: str) -> float:
        seconds = self._ask("time", key)[0]
        with self.naming():
            _check(type(seconds) in (int, float) and abs(seconds) < 2**63)  # nor NaN, nor infinite
        return float(seconds)

    def is_dir(self, key: str) -> bool:
        return bool(self._ask("is_dir", key)[0])

    def is_file(self, key: str) -> bool:
        return bool(self._ask("is_file", key)[0])

    def list(self, key: str = "") -> list[DirEntry]:
        names = self._ask("list", key)[1].decode(errors="surrogateescape")
        return sorted(DirEntry(name[1:], name[0] == "d") for name in names.split("\0") if name)

    def write(self, key: str, data: bytes) -> None:
        self._ask("write", key, data)

    def write_reserved(self, reserve: str, key: str, data: bytes) -> None:
        self._ask("write_reserved", key, data, reserve=reserve)

    def link_new(self, key: str, data: bytes) -> bool:
        return bool(self._ask("link_new", key, data)[0])

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        return bool(self._ask("exchange", key, expected, data)[0])

    def create(self, key: str, nbytes: int) -> Writer:
        with self.naming():
            channel = self._connect()
            try:
                _answer_to(self._where, channel, {"do": "create", "key": key, "nbytes": nbytes})
            except BaseException:
                channel.close()
                raise
        return RemoteWriter(self, key, channel)

    def copy_out(self, key: str, place: int, folder: str, name: str, expected: FileEntry) -> Generator[int, None, None]:
        """Let the host copy a file to a lower tier, see `HostsStorage.copy_out`.

        It has a connection of its own, whose end abandons the copy.
        """
        fields = {"key": key, "place": place, "folder": folder, "name": name, "expected": expected}
        with self.naming(), closing(self._connect()) as channel:
            nbytes = _answer_to(self._where, channel, {"do": "copy_out", **fields})[0]
            while nbytes is not None:
                yield _length(nbytes)
                nbytes = _answer_to(self._where, channel, {"do": "go_on"})[0]

    def make_dir(self, key: str) -> None:
        self._ask("make_dir", key)

    def sync_dir(self, key: str) -> None:
        self._ask("sync_dir", key)

    def rename(self, source: str, target: str) -> None:
        self._ask("rename", source, target=target)

    def remove(self, key: str) -> None:
        self._ask("remove", key)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for channel in idle:
            channel.close()

    def leave(self) -> None:
        """Close the parent's connections in a forked child; the parent keeps them open."""
        self._lock = threading.Lock()
        self._idle = []
        for channel in self._channels:
            channel.close()

    def finish(self, key: str, channel: Channel, operation: str) -> None:
        """Send a writer's closing request (settle, close or abort) on its own connection."""
        with self.naming():
            _answer_to(self._where, channel, {"do": operation, "key": key})

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Name the host in errors of the connection."""
        try:
            yield
        except _ANSWERS:
            raise
        except OSError as error:
            kind = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
            raise kind(f"{self._where} is away, stuck or wrong: {error}") from error

    def _ask(self, operation: str, key: str = "", *blobs: bytes, **fields: Any) -> tuple[Any, bytes]:
        with self._connected() as channel:
            return _answer_to(self._where, channel, {"do": operation, "key": key, **fields}, *blobs)

    @contextmanager
    def _connected(self) -> Iterator[Channel]:
        """Yield a connection for one request. It is kept for the next, unless the request did not finish."""
        with self.naming():
            channel = self._taken() or self._connect()
            try:
                yield channel
            except _ANSWERS:
                self._keep(channel)
                raise
            except BaseException:
                channel.close()
                raise
            self._keep(channel)

    def _taken(self) -> Channel | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, channel: Channel) -> None:
        with self._lock:
            self._idle.append(channel)

    def _connect(self) -> Channel:
        """Open a new connection. One that a busy host drops before admitting it is tried again for a while."""
        seconds = min(self._timeout, _CONNECTING)
        return connect(self._address.hosts, self._address.port, self._proved, seconds)

    def _proved(self, connection: socket.socket, within: float) -> Channel:
        Channel(connection, within).prove(self._secret, self.host)
        channel = Channel(connection, self._timeout)
        self._channels.add(channel)
        return channel

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.received += nbytes


_connected: WeakSet[RemoteDirectory] = WeakSet()


def _leave_to_parent() -> None:
    for directory in _connected:
        directory.leave()


in_forked_children(_leave_to_parent)


class RemoteReader:
    """A reader of another host's file in its version at the time of opening."""

    def __init__(self, directory: RemoteDirectory, key: str, version: Version) -> None:
        self._directory = directory
        self._key = key
        self._version = version

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        batch: list[tuple[int, memoryview]] = []
        nbytes = 0
        for offset, buffer in ranges:
            view = memoryview(buffer).cast("B")
            for begin in range(0, len(view), PIECE) or (0,):
                part = view[begin : begin + PIECE]
                if batch and (nbytes + len(part) > PIECE or len(batch) == _RANGES):
                    self._directory.read_ranges(self._key, self._version, batch)
                    batch = []
                    nbytes = 0
                batch.append((offset + begin, part))
                nbytes += len(part)
        if batch:
            self._directory.read_ranges(self._key, self._version, batch)

    def close(self) -> None:
        """Do nothing: nothing is kept open."""


class RemoteWriter:
    """A writer of a file on another host, with a connection of its own."""

    def __init__(self, directory: RemoteDirectory, key: str, channel: Channel) -> None:
        self._directory = directory
        self._key = key
        self._channel = channel

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with self._directory.naming():
            for begin in range(0, len(view), PIECE):
                part = view[begin : begin + PIECE]
                self._channel.send({"do": "write_at", "offset": offset + begin, "crc32": zlib.crc32(part)}, part)

    def settle(self) -> None:
        self._directory.finish(self._key, self._channel, "settle")

    def close(self) -> None:
        with closing(self._channel):
            self._directory.finish(self._key, self._channel, "close")

    def abort(self) -> None:
        with suppress(OSError), closing(self._channel):
            self._directory.finish(self._key, self._channel, "abort")


def _answer_to(where: str, channel: Channel, fields: Fields, *blobs: bytes) -> tuple[Any, bytes]:
    channel.send(fields, *blobs)
    answer, lengths = channel.reply()
    data = [channel.blob(length, DOCUMENT) for length in lengths]
    _raise_of(where, answer)
    return answer.get("value"), b"".join(data)


def _check(is_answer: bool) -> None:
    """Raise ConnectionError for an answer of the wrong form."""
    if not is_answer:
        raise ConnectionError("sends an invalid message")


def _length(value: Any) -> int:
    """Return ``value``, a number of bytes."""
    _check(type(value) is int and 0 <= value < 2**63)
    return int(value)


def _raise_of(where: str, answer: Fields) -> None:
    """Raise the error that a host answered with, if it did."""
    if "error" not in answer:
        return
    try:
        kind, number, message = answer["error"]
    except (TypeError, ValueError):
        raise ConnectionError("sends an invalid message") from None
    for named in NAMED:
        if kind == named.__name__:
            raise named(f"{where}: {message}")
    raise Refused(number, f"{where}: {message}") if isinstance(number, int) else Refused(f"{where}: {message}")
