"""Connections between rank 0 and the other ranks: they show which ranks are gone, and carry words.

Every other rank keeps one connection to rank 0, over which hardly anything is sent. When a process ends, in any way,
its system closes the connection, and the other end learns of it at once. A process that is stopped, or gets no time to
run, keeps its connection, so that it does not count as dead. A host that loses its power is silent, and counts as lost
after the timeout; so does a rank that could not be connected.

Both ends prove that they know the job's secret. Connections that have not proved it yet are few, and are dropped soon.

A word is any JSON value. It goes to the listener of its channel, a number that both ends know, on a thread of its own.

News are such words: a rank tells the others which file it has written for them. An object store charges for every look
of every rank, and each takes tens of milliseconds. So ranks that wait for a file in one are told when it is there, and
hardly look meanwhile. News decide nothing: what counts is the file. News that are lost, with a connection, only delay a
rank until it looks.
"""

from __future__ import annotations

import hmac
import itertools
import json
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from nxd_ckpt import effects
from nxd_ckpt.effects import logger
from nxd_ckpt.storage.hosts.wire import NONCE, connect, group_addresses, listen, proof

Address = dict[str, Any]
"""Addresses at which another rank can connect to rank 0 (JSON)."""

_CONNECTING = 2.0
"""Seconds that connecting to one address may take."""
_JOINING = 10.0
"""Seconds for which a dropped connection is tried again."""
_NO_ROOM = 0.1
"""Seconds to wait if no connection can be accepted."""
_MAX_UNPROVED = 64
"""Maximum number of connections that have not proved yet to be a rank's; the oldest gives way to a new one."""
_LINE = 2**20
"""Maximum bytes of a word."""
_HELLO = struct.Struct(f">I{NONCE}s{NONCE}s")
"""The rank, its random number, and its proof."""

Heard = Callable[[int, Any], None]
"""A function that gets the rank of a word, and the word; None once that rank is gone. It must be quick."""


WHEREABOUTS = 0
"""Channel on which rank 0 asks how far the others are."""

_channels = itertools.count(1)


def new_channel() -> int:
    """Return the number of a channel, on rank 0: no two channels get each other's words."""
    return next(_channels)


class Peers(Protocol):
    """One end of the connections: rank 0's, or another rank's."""

    def is_gone(self, rank: int) -> bool:
        """Return whether that rank is known to have ended."""

    def listen(self, channel: int, heard: Heard | None) -> None:
        """Pass words of this channel to ``heard`` from now on; None ends that."""

    def tell(self, channel: int, word: Any) -> None:
        """Send a word: rank 0 to all others, the others to rank 0. A rank that is gone does not get it."""


class _Listeners:
    """Listeners of one end, by channel."""

    def __init__(self) -> None:
        self._listeners: dict[int, Heard] = {}

    def listen(self, channel: int, heard: Heard | None) -> None:
        if heard is None:
            self._listeners.pop(channel, None)
        else:
            self._listeners[channel] = heard

    def _hear(self, rank: int, channel: int, word: Any) -> None:
        heard = self._listeners.get(channel)
        try:
            if heard is not None:
                heard(rank, word)
        except Exception:  # a defect of ours must not end the thread that notices the end of ranks
            logger.exception("nxd_ckpt: unexpected error while handling a word of rank %d", rank)


@dataclass
class _UnprovedConnection:
    """A connection that has not proved yet to be a rank's."""

    since: float
    nonce: bytes
    received: bytearray


class Rank0Connections(_Listeners):
    """Rank 0's end of the connections, watched by a thread of its own."""

    def __init__(self, secret: bytes) -> None:
        """Listen. Raises OSError if this host does not allow it."""
        super().__init__()
        self._secret = secret
        self._doors = listen(group_addresses())
        self._selector = selectors.DefaultSelector()
        for door in self._doors.values():
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ)
        self._unproved: dict[socket.socket, _UnprovedConnection] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._telling = threading.RLock()  # signal handlers make steps too
        self._lines: dict[socket.socket, _Lines] = {}
        self._gone: set[int] = set()
        threading.Thread(target=self._watch, name="nxd_ckpt-peers", daemon=True).start()

    def address(self) -> Address:
        return {"hosts": list(self._doors), "port": next(iter(self._doors.values())).getsockname()[1]}

    def is_gone(self, rank: int) -> bool:
        """Return whether that rank was connected and has ended."""
        return rank in self._gone

    def tell(self, channel: int, word: Any) -> None:
        with self._telling:
            for connection in list(self._ranks):
                _send(connection, channel, word)

    def leave(self) -> None:
        """Close the parent's connections in a forked child; the parent keeps them open."""
        for connection in (*self._unproved, *self._ranks, *self._doors.values()):
            connection.close()

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select(_CONNECTING if self._unproved else None):
                ready: Any = key.fileobj
                if ready in self._unproved:
                    self._admit(ready)
                elif ready in self._ranks:
                    if not self._lines[ready].read(partial(self._hear, self._ranks[ready])):
                        self._lose(ready)
                elif ready in self._doors.values():
                    self._meet(ready)
            self._forget_silent()

    def _lose(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        rank = self._ranks.pop(connection)
        del self._lines[connection]
        connection.close()
        if rank not in self._ranks.values():  # else it has connected again
            self._gone.add(rank)
            for channel in list(self._listeners):
                self._hear(rank, channel, None)

    def _meet(self, door: socket.socket) -> None:
        """Accept a connection; with too many unproved ones, drop the oldest. Waits for nobody."""
        try:
            connection, _ = door.accept()
        except BlockingIOError:  # the other end has gone
            return
        except OSError:  # no descriptors are left; the connection stays ready
            effects.sleep(_NO_ROOM)
            return
        if len(self._unproved) >= _MAX_UNPROVED:
            self._forget(next(iter(self._unproved))).close()
        connection.setblocking(False)
        nonce = os.urandom(NONCE)
        self._unproved[connection] = _UnprovedConnection(effects.monotonic(), nonce, bytearray())
        self._selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):
            connection.send(nonce)

    def _admit(self, connection: socket.socket) -> None:
        """Read from an unproved connection. It is a rank's if it proves to know the secret."""
        unproved = self._unproved[connection]
        try:
            data = connection.recv(_HELLO.size - len(unproved.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        unproved.received += data
        if data and len(unproved.received) < _HELLO.size:
            return
        self._forget(connection)
        if not (data and self._is_admitted(connection, unproved)):
            connection.close()

    def _is_admitted(self, connection: socket.socket, unproved: _UnprovedConnection) -> bool:
        rank, nonce, proven = _HELLO.unpack(unproved.received)
        if not hmac.compare_digest(proven, proof(self._secret, b"rank", rank, unproved.nonce + nonce)):
            return False
        with self._telling, suppress(OSError):
            connection.sendall(proof(self._secret, b"hub", rank, unproved.nonce + nonce))
            self._lines[connection] = _Lines(connection)  # from now on it gets every word
            self._ranks[connection] = rank
            self._gone.discard(rank)  # another process group, in the same processes
            self._selector.register(connection, selectors.EVENT_READ)
            return True
        return False

    def _forget(self, unproved: socket.socket) -> socket.socket:
        del self._unproved[unproved]
        self._selector.unregister(unproved)
        return unproved

    def _forget_silent(self) -> None:
        now = effects.monotonic()
        for silent in [key for key, unproved in self._unproved.items() if now - unproved.since > _CONNECTING]:
            self._forget(silent).close()


class ConnectionToRank0(_Listeners):
    """Another rank's end of its connection to rank 0."""

    def __init__(self, rank: int, address: Address, secret: bytes) -> None:
        """Connect to rank 0. Raises OSError if it cannot be reached."""
        super().__init__()
        self._connection = _connected(rank, address, secret)
        self._lines = _Lines(self._connection)
        self._ended = False
        self._watched = False

    def is_gone(self, rank: int) -> bool:
        """Return whether rank 0 ended; this end knows nothing of other ranks."""
        if rank == 0 and not self._ended and not self._watched and not self._lines.read(partial(self._hear, 0)):
            self._ended = True
        return rank == 0 and self._ended

    def listen(self, channel: int, heard: Heard | None) -> None:
        super().listen(channel, heard)
        if not self._watched:
            self._watched = True
            selector = selectors.DefaultSelector()
            selector.register(self._connection, selectors.EVENT_READ)
            threading.Thread(target=self._watch, args=(selector,), name="nxd_ckpt-peers", daemon=True).start()

    def tell(self, channel: int, word: Any) -> None:
        _send(self._connection, channel, word)

    def leave(self) -> None:
        """Close the parent's connection in a forked child; the parent keeps it open."""
        self._connection.close()

    def _watch(self, selector: selectors.BaseSelector) -> None:
        with selector:
            while not self._ended:
                selector.select()
                if not self._lines.read(partial(self._hear, 0)):
                    self._ended = True


def _connected(rank: int, address: Address, secret: bytes) -> socket.socket:
    """Connect to rank 0. A dropped connection (rank 0 may have too many unproved ones) is tried again for a while."""

    def prove(connection: socket.socket, within: float) -> socket.socket:
        _prove(connection, rank, secret)
        connection.setblocking(False)
        return connection

    return connect(address["hosts"], address["port"], prove, _JOINING, _CONNECTING)


def _prove(connection: socket.socket, rank: int, secret: bytes) -> None:
    """Prove to know the secret, and check the other end's proof. Raises OSError if it is wrong."""
    theirs = _take(connection, NONCE)
    ours = os.urandom(NONCE)
    connection.sendall(_HELLO.pack(rank, ours, proof(secret, b"rank", rank, theirs + ours)))
    if not hmac.compare_digest(_take(connection, NONCE), proof(secret, b"hub", rank, theirs + ours)):
        raise OSError("the process that answers there does not prove to be rank 0 of this job")


def _take(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            raise OSError("no answer")
        data += part
    return data


class _Lines:
    """Incoming words of a connection, one line each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = bytearray()
        self._reading = threading.Lock()

    def read(self, heard: Callable[[int, Any], None]) -> bool:
        """Pass the words that have arrived to ``heard``, as channel and word. False if the other end is gone.

        An end that sends anything but words counts as gone: nothing after that could be understood.
        """
        if not self._reading.acquire(blocking=False):
            return True  # another thread is reading
        try:
            return self._read(heard)
        finally:
            self._reading.release()

    def _read(self, heard: Callable[[int, Any], None]) -> bool:
        try:
            data = self._connection.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        first, *others = data.split(b"\n")
        self._rest += first
        if len(self._rest) > _LINE:
            return False
        if not others:
            return bool(data)
        *lines, rest = [bytes(self._rest), *others]
        self._rest = bytearray(rest)
        for line in lines:
            match _parsed(line):
                case [int(channel), word]:
                    heard(channel, word)
                case _:
                    return False
        return bool(data)


def _parsed(line: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _send(connection: socket.socket, channel: int, word: Any) -> None:
    with suppress(OSError):  # it is gone, which the watching thread notices
        connection.sendall(json.dumps([channel, word]).encode() + b"\n")


LONGEST = 5.0
"""Seconds after which a rank looks although nothing was told."""

_SLICE = 0.25
"""Seconds of a wait, after which to check whether there is a reason to end it."""


class News:
    """The news of one session on one rank; none without connections."""

    def __init__(self, peers: Peers | None = None, channel: int = 0, world_size: int = 1) -> None:
        """Listen to the ``channel``, of which rank 0 chose the number."""
        self._peers = peers
        self._channel = channel
        self._most = 4 * world_size + 16
        """Number of keys after which the oldest are forgotten: each rank writes a few for each save."""
        self._keys: dict[str, None] = {}
        self._changed = effects.Condition()
        self.count: int = 0
        """How often anything was told."""
        if peers is not None:
            peers.listen(channel, self._hear)

    @property
    def come(self) -> bool:
        """True if all ranks are connected, so that a rank which waits may rely on being told."""
        return self._peers is not None

    def tell(self, key: str) -> None:
        """Tell the others, or on another rank than 0 rank 0, that there is a file ``key`` now."""
        if self._peers is not None:
            self._peers.tell(self._channel, key)

    def has(self, key: str) -> bool:
        """Return whether it was told that there is a file ``key``."""
        return key in self._keys

    def wait(self, count: int, until: float, is_over: Callable[[], bool]) -> None:
        """Wait for other news than the first ``count``, or until ``is_over``.

        It ends at the time ``until`` at the latest (seconds, as effects.monotonic()).
        """
        with self._changed:
            while self.count == count and (left := until - effects.monotonic()) > 0:
                self._changed.wait(min(left, _SLICE))
                if is_over():
                    return

    def close(self) -> None:
        """Listen no longer."""
        if self._peers is not None:
            self._peers.listen(self._channel, None)
            self._peers = None

    def _hear(self, rank: int, word: Any) -> None:
        """Handle a word, or None from a rank that is gone. Runs on the thread of the connections."""
        with self._changed:
            self.count += 1
            if isinstance(word, str):
                self._keys[word] = None
                while len(self._keys) > self._most:
                    del self._keys[next(iter(self._keys))]
            self._changed.notify_all()
