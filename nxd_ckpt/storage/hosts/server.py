"""A host's server, through which the other hosts of the job read and write its directory.

A connection has a thread of its own. A caller that does not prove in time to belong to the job is dropped. All requests
go through the host's own directory, whose keys lead nowhere else.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.effects import in_forked_children, logger, yield_disk_to_others, yield_processor_to_others
from nxd_ckpt.errors import CheckpointError, MalformedFile
from nxd_ckpt.storage.base import Version, Writer
from nxd_ckpt.storage.hosts.directory import OwnDirectory
from nxd_ckpt.storage.hosts.wire import NAMED, Channel, Fields, listen, number
from nxd_ckpt.storage.local_files import open_regular, version_of

PIECE = 8 * 2**20
"""Maximum bytes of a file in one message."""

_ADMITTING = 5.0
"""Seconds within which a caller must prove to belong to the job."""
_MAX_UNPROVED = 64
"""Maximum number of connections without a proof yet; the oldest gives way to a new one."""
_PAUSE = 0.1
"""Seconds before the next connection is looked for, if this process has no descriptor left."""

Answer = tuple[Fields, bytes]

CopyOut = Callable[[str, int, str, str, FileEntry], Generator[int, None, None]]
"""A function that copies a file of this host to a lower tier, see `HostsStorage.copy_out`."""


def copy_nothing(key: str, place: int, folder: str, name: str, expected: FileEntry) -> Generator[int, None, None]:
    """Refuse to copy: there is no tier to copy to."""
    raise OSError("this host copies nothing")


_ANSWERED = (OSError, CheckpointError, EOFError, ValueError, TypeError, KeyError, IndexError, RuntimeError)
"""Errors that are sent to the caller, which may then send other requests.

RuntimeError: an exiting process starts no threads.
"""

_BY_KEY = {"version", "size", "time", "is_dir", "is_file", "write", "link_new", "exchange", "make_dir", "sync_dir"}
"""Requests that are methods of the directory, called with a key and the message's blobs."""

_serving: WeakSet[HostServer] = WeakSet()


def _leave_to_parent() -> None:
    for server in _serving:
        server.leave()


in_forked_children(_leave_to_parent)


class HostServer:
    """A server of ``directory``, as host number ``host`` of a job, on the given addresses, until it is closed.

    ``timeout``: seconds that a message may take. ``copy_out`` copies files to lower tiers. Raises OSError if none of
    the addresses can be used.
    """

    def __init__(
        self,
        directory: OwnDirectory,
        host: int,
        secret: bytes,
        addresses: Sequence[str],
        timeout: float,
        copy_out: CopyOut,
    ) -> None:
        self._directory = directory
        self._host = host
        self._secret = secret
        self._timeout = timeout
        self._copy_out = copy_out
        self._listeners = listen(addresses)
        self._unproved: dict[socket.socket, None] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        _serving.add(self)
        for listener in self._listeners.values():
            threading.Thread(target=self._listen, args=(listener,), name="nxd_ckpt-host", daemon=True).start()

    @property
    def addresses(self) -> list[str]:
        """Addresses at which it listens."""
        return list(self._listeners)

    @property
    def port(self) -> int:
        port: int = next(iter(self._listeners.values())).getsockname()[1]
        return port

    def close(self) -> None:
        """Stop serving. Safe to call again."""
        with self._lock:
            self._closed.set()
            connections = [*self._listeners.values(), *self._connections, *self._unproved]
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            connection.close()

    def leave(self) -> None:
        """Close the parent's connections in a forked child; the parent keeps them open."""
        for connection in (*self._listeners.values(), *self._connections, *self._unproved):
            connection.close()

    def _listen(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                self._closed.wait(_PAUSE)
                continue
            with self._lock:
                oldest = next(iter(self._unproved)) if len(self._unproved) >= _MAX_UNPROVED else None
                if oldest is not None:
                    del self._unproved[oldest]
                self._unproved[connection] = None
            if oldest is not None:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for its proof, which closes it
            if not self._is_met(connection):
                self._forget(connection)
                connection.close()

    def _is_met(self, connection: socket.socket) -> bool:
        """Start serving a connection; False if this process may have no more threads. The caller will try again."""
        try:
            threading.Thread(target=self._meet, args=(connection,), name="nxd_ckpt-host", daemon=True).start()
        except RuntimeError:
            return False
        return True

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproved.pop(connection, None)

    def _meet(self, connection: socket.socket) -> None:
        with connection:
            is_admitted = False
            try:
                with suppress(OSError):
                    is_admitted = Channel(connection, _ADMITTING).admit(self._secret, self._host)
            finally:
                self._forget(connection)
            if not is_admitted or not self._keep(connection):
                return
            try:
                with suppress(OSError):  # its caller has gone
                    _Conversation(self._directory, Channel(connection, self._timeout), self._copy_out).serve()
            except Exception:
                logger.exception("nxd_ckpt: unexpected error in a host's server")
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _keep(self, connection: socket.socket) -> bool:
        with self._lock:
            if not self._closed.is_set():
                self._connections.add(connection)
            return not self._closed.is_set()


class _Conversation:
    """The requests of one connection, one after the other."""

    def __init__(self, directory: OwnDirectory, channel: Channel, copy_out: CopyOut) -> None:
        self._directory = directory
        self._channel = channel
        self._copy_out = copy_out
        self._root = os.path.realpath(directory.path(""))
        self._writer: Writer | None = None
        self._copied: Generator[int, None, None] = (number for number in range(0))
        self._memory: memoryview | None = None
        self._failed: Exception | None = None
        """Error of the file that is being written, until its caller asks."""

    def serve(self) -> None:
        try:
            while True:
                fields, lengths = self._channel.request()
                self._answer(fields, lengths)
        finally:
            self._copied.close()
            if self._writer is not None:
                self._writer.abort()

    def _answer(self, fields: Fields, lengths: list[int]) -> None:
        operation = fields.get("do")
        if operation == "write_at":
            self._write_at(fields, lengths)
            return
        blobs = [self._channel.blob(length, DOCUMENT) for length in lengths]
        try:
            if operation == "read_ranges":
                fd, ranges = self._opened(fields)
            else:
                answer, blob = self._done(operation, fields, blobs)
        except _ANSWERED as error:
            self._channel.send({"error": _in_words(error)})
            return
        if operation != "read_ranges":
            self._channel.send(answer, blob)
            return
        try:
            self._channel.send_file(fd, ranges)
        finally:
            os.close(fd)

    def _done(self, operation: Any, fields: Fields, blobs: list[bytes]) -> Answer:
        if operation in _BY_KEY:
            return {"value": getattr(self._directory, operation)(self._key(fields), *blobs)}, b""
        do: Callable[[Fields, list[bytes]], Answer | None] | None = getattr(self, f"_do_{operation}", None)
        if do is None:
            raise OSError(f"unknown request {operation!r:.40}")
        return do(fields, blobs) or ({}, b"")

    def _key(self, fields: Fields, name: str = "key") -> str:
        """Return a key of the message. Raises MalformedFile for one that leads out of the directory, also by a link."""
        key = _text(fields[name])
        if os.path.commonpath((self._root, os.path.realpath(self._directory.path(key)))) != self._root:
            raise MalformedFile(f"{self._directory.url}/{key} leads out of the directory, by a link")
        return key

    def _do_read(self, fields: Fields, blobs: list[bytes]) -> Answer:
        return {}, self._directory.read(self._key(fields), number(fields["limit"]))

    def _do_peek(self, fields: Fields, blobs: list[bytes]) -> Answer:
        contents = [self._peeked(_text(key)) for key in fields["keys"]]
        return {"value": [None if data is None else len(data) for data in contents]}, b"".join(filter(None, contents))

    def _peeked(self, key: str) -> bytes | None:
        """Return a small file. Anything else, such as a link to elsewhere, counts as empty, so that other keys succeed.
        """
        self._directory.path(key)  # raises for an invalid key
        try:
            return self._directory.peek([self._key({"key": key})])[0]
        except MalformedFile:
            return b""

    def _do_list(self, fields: Fields, blobs: list[bytes]) -> Answer:
        names = [f"{'d' if entry.is_dir else 'f'}{entry.name}" for entry in self._directory.list(self._key(fields))]
        return {}, "\0".join(names).encode(errors="surrogateescape")

    def _do_write_reserved(self, fields: Fields, blobs: list[bytes]) -> None:
        self._directory.write_reserved(self._key(fields, "reserve"), self._key(fields), blobs[0])

    def _do_rename(self, fields: Fields, blobs: list[bytes]) -> None:
        self._directory.rename(self._key(fields), self._key(fields, "target"))

    def _do_remove(self, fields: Fields, blobs: list[bytes]) -> None:
        key = self._key(fields)
        if not key:
            raise OSError("the directory itself cannot be removed")
        self._directory.remove(key)

    def _do_copy_out(self, fields: Fields, blobs: list[bytes]) -> Answer:
        """Copy the first piece. The caller has this connection, and so this thread, for the copy alone."""
        yield_disk_to_others()
        yield_processor_to_others()
        where = number(fields["place"]), _text(fields["folder"]), _text(fields["name"])
        self._copied.close()
        self._copied = self._copy_out(self._key(fields), *where, FileEntry(*map(number, fields["expected"])))
        return self._do_go_on(fields, blobs)

    def _do_go_on(self, fields: Fields, blobs: list[bytes]) -> Answer:
        """Copy the next piece and return its bytes; None after the last."""
        return {"value": next(self._copied, None)}, b""

    def _do_create(self, fields: Fields, blobs: list[bytes]) -> None:
        self._do_abort(fields, blobs)
        self._directory.make_dir(self._key(fields).rpartition("/")[0])
        self._writer = self._directory.create(self._key(fields), number(fields["nbytes"]))

    def _do_settle(self, fields: Fields, blobs: list[bytes]) -> None:
        """Confirm that everything sent has arrived unchanged, or raise."""
        failed = self._failed
        self._failed = None
        if failed is not None:
            self._do_abort(fields, blobs)
            raise failed

    def _do_close(self, fields: Fields, blobs: list[bytes]) -> None:
        self._do_settle(fields, blobs)
        if self._writer is None:
            raise OSError("no file is being written")
        self._writer.close()
        self._writer = None
        self._directory.sync_dir(self._key(fields).rpartition("/")[0])

    def _do_abort(self, fields: Fields, blobs: list[bytes]) -> None:
        writer = self._writer
        self._writer = None
        self._failed = None
        if writer is not None:
            writer.abort()

    def _write_at(self, fields: Fields, lengths: list[int]) -> None:
        """Write a piece, without a reply: ``settle`` and ``close`` report errors."""
        if sum(lengths) > PIECE:
            raise ConnectionError(f"sends {sum(lengths)} bytes, at most {PIECE} are expected")
        self._memory = self._memory or memoryview(mmap.mmap(-1, PIECE))  # aligned, as direct writes need it
        data = self._memory[: sum(lengths)]
        self._channel.fill(data)
        try:
            if zlib.crc32(data) != fields["crc32"]:
                raise OSError("bytes changed on their way: by the network, or one of its ends")
            if self._writer is None:
                raise OSError("no file is being written")
            self._writer.write_at(number(fields["offset"]), data)
            self._writer.settle()
        except _ANSWERED as error:
            self._failed = self._failed or error

    def _opened(self, fields: Fields) -> tuple[int, list[tuple[int, int]]]:
        """Open the file in the requested version; return it and its requested ranges, which exist."""
        key = self._key(fields)
        version = Version(*fields["version"])
        ranges = [(number(offset), number(length)) for offset, length in fields["ranges"]]
        where = f"{self._directory.url}/{key}"
        fd, _ = open_regular(self._directory.path(key))
        try:
            if version_of(os.fstat(fd)) != version:
                raise OSError(f"{where} was replaced while it was read")
            for offset, length in ranges:
                if min(offset, length) < 0 or length > PIECE:
                    raise OSError(f"{where}: cannot read {length} bytes at byte {offset}")
                if offset + length > version.nbytes:
                    raise EOFError(f"{where}: {offset + length - version.nbytes} bytes missing at byte {offset}")
        except BaseException:
            os.close(fd)
            raise
        return fd, ranges


def _text(key: Any) -> str:
    if not isinstance(key, str):
        raise MalformedFile(f"expected a key, found {key!r:.80}")
    return key


def _in_words(error: Exception) -> list[Any]:
    """Return the error in the form that the caller raises again, see remote._raise_of."""
    for kind in NAMED:
        if isinstance(error, kind):
            return [kind.__name__, None, str(error)]
    if isinstance(error, OSError) and error.errno is not None:
        return ["OSError", error.errno, f"{error.strerror}: {error.filename}" if error.filename else error.strerror]
    return ["OSError", None, str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"]
