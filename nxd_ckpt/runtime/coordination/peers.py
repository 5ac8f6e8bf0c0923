"""Which ranks of the job are gone, by their connections; and words between rank 0 and the others, over the same.

Every other rank keeps one connection to rank 0, over which hardly anything is sent. When a process ends, in whatever
way, its system closes the connection, and the other end learns of it at once. A process that is stopped, or gets no
time to run, keeps its connection, so that it is not taken for dead. A host that loses its power is silent, and counts
as lost after the timeout; so does a rank that could not be connected.

A word is any JSON value. It goes to who listens to its channel, a number that both ends know, on a thread of its own.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from nxd_ckpt import host

logger = logging.getLogger("nxd_ckpt")

Address = dict[str, Any]
"""What another rank needs to connect to rank 0 (JSON)."""

_CONNECTING = 2.0
"""Seconds that connecting to one address may take."""
_NO_ROOM = 0.1
"""Seconds to wait where no connection can be taken."""


Heard = Callable[[int, Any], None]
"""Is called with the rank that a word came from, and the word: None once that rank is gone. It must be quick."""


class Peers(Protocol):
    """One end of the connections: rank 0's, or another rank's."""

    def is_gone(self, rank: int) -> bool:
        """Whether that rank is known to have ended."""

    def listen(self, channel: int, heard: Heard | None) -> None:
        """From now on words of this channel go to ``heard``; None ends that."""

    def tell(self, channel: int, word: Any) -> None:
        """Send a word: rank 0 to all others, the others to rank 0. Who is gone does not get it."""


class Hub:
    """Rank 0's end of the connections, watched by a thread of its own."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, float] = {}
        """Who has not said who it is, and since when."""
        self._ranks: dict[socket.socket, int] = {}
        self._telling = threading.RLock()  # signal handlers make steps too
        self._lines: dict[socket.socket, _Lines] = {}
        self._gone: set[int] = set()
        self._listeners: dict[int, Heard] = {}
        threading.Thread(target=self._watch, name="nxd_ckpt-peers", daemon=True).start()

    def address(self) -> Address:
        return {"hosts": own_hosts(), "port": self._listener.getsockname()[1], "token": self._token}

    def is_gone(self, rank: int) -> bool:
        """Whether that rank was connected and has ended."""
        return rank in self._gone

    def listen(self, channel: int, heard: Heard | None) -> None:
        _set(self._listeners, channel, heard)

    def tell(self, channel: int, word: Any) -> None:
        with self._telling:
            for connection in list(self._ranks):
                _send(connection, channel, word)

    def leave(self) -> None:
        """In a forked child: close what is the parent's, which keeps it open."""
        for held in (*self._strangers, *self._ranks, self._listener):
            held.close()

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select():
                ready: Any = key.fileobj
                if ready is self._listener:
                    self._meet()
                elif ready in self._strangers:
                    self._admit(ready)
                elif ready in self._ranks and not self._lines[ready].read(partial(self._hear, self._ranks[ready])):
                    self._lose(ready)

    def _hear(self, rank: int, channel: int, word: Any) -> None:
        _call(self._listeners.get(channel), rank, word)

    def _lose(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        rank = self._ranks.pop(connection)
        del self._lines[connection]
        connection.close()
        if rank not in self._ranks.values():  # else it has connected anew
            self._gone.add(rank)
            for channel in list(self._listeners):
                self._hear(rank, channel, None)

    def _meet(self) -> None:
        """Take a connection, and give up those that have said nothing for long. Nobody is waited for."""
        now = host.monotonic()
        for silent in [one for one, since in self._strangers.items() if now - since > _CONNECTING]:
            self._forget(silent)
            silent.close()
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptors are left; who connects stays ready
            host.sleep(_NO_ROOM)
            return
        connection.setblocking(False)
        self._strangers[connection] = now
        self._selector.register(connection, selectors.EVENT_READ)

    def _admit(self, connection: socket.socket) -> None:
        """A rank, if it knows the token."""
        self._forget(connection)
        with suppress(OSError, ValueError):
            token, _, rank = connection.recv(64).partition(b" ")
            if hmac.compare_digest(token, self._token.encode()):
                number = int(rank)
                with self._telling:
                    connection.sendall(b"1")  # from now on it gets every word
                    self._lines[connection] = _Lines(connection)
                    self._ranks[connection] = number
                    self._gone.discard(number)  # another process group, in the same processes
                    self._selector.register(connection, selectors.EVENT_READ)
                return
        connection.close()

    def _forget(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)


class Spoke:
    """Another rank's end of its connection to rank 0."""

    def __init__(self, rank: int, address: Address) -> None:
        """Raises OSError where rank 0 cannot be reached."""
        self._connection = self._connect(rank, address)
        self._lines = _Lines(self._connection)
        self._ended = False
        self._listeners: dict[int, Heard] = {}
        self._watched = False

    def is_gone(self, rank: int) -> bool:
        """Whether rank 0 ended; this end knows nothing of others."""
        if rank == 0 and not self._ended and not self._watched and not self._lines.read(self._hear):
            self._ended = True
        return rank == 0 and self._ended

    def listen(self, channel: int, heard: Heard | None) -> None:
        _set(self._listeners, channel, heard)
        if not self._watched:
            self._watched = True
            selector = selectors.DefaultSelector()
            selector.register(self._connection, selectors.EVENT_READ)
            threading.Thread(target=self._watch, args=(selector,), name="nxd_ckpt-peers", daemon=True).start()

    def tell(self, channel: int, word: Any) -> None:
        _send(self._connection, channel, word)

    def leave(self) -> None:
        """In a forked child: close what is the parent's, which keeps it open."""
        self._connection.close()

    def _watch(self, selector: selectors.BaseSelector) -> None:
        with selector:
            while not self._ended:
                selector.select()
                if not self._lines.read(self._hear):
                    self._ended = True

    def _hear(self, channel: int, word: Any) -> None:
        _call(self._listeners.get(channel), 0, word)

    def _connect(self, rank: int, address: Address) -> socket.socket:
        problem: OSError | None = None
        for name in address["hosts"]:
            try:
                connection = socket.create_connection((name, address["port"]), timeout=_CONNECTING)
                connection.sendall(f"{address['token']} {rank}".encode())
                if connection.recv(1) == b"1":
                    connection.setblocking(False)
                    return connection
                connection.close()
            except OSError as error:
                problem = error
        raise problem or OSError("no answer")


class _Lines:
    """What arrives over a connection: a line for each word."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""
        self._reading = threading.Lock()

    def read(self, heard: Callable[[int, Any], None]) -> bool:
        """Give what has arrived to ``heard``: channel and word. Whether the other end is still there.

        One that sends what is no word counts as gone: nothing after it could be understood.
        """
        if not self._reading.acquire(blocking=False):
            return True  # another thread reads, and will see
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
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            match _parsed(line):
                case [int(channel), word]:
                    heard(channel, word)
                case _:
                    return False
        return bool(data)


def _parsed(line: bytes) -> Any:
    with suppress(ValueError):
        return json.loads(line)
    return None


def _send(connection: socket.socket, channel: int, word: Any) -> None:
    with suppress(OSError):  # it is gone, which is noticed by itself
        connection.sendall(json.dumps([channel, word]).encode() + b"\n")


def _set(listeners: dict[int, Heard], channel: int, heard: Heard | None) -> None:
    if heard is None:
        listeners.pop(channel, None)
    else:
        listeners[channel] = heard


def _call(heard: Heard | None, rank: int, word: Any) -> None:
    try:
        if heard is not None:
            heard(rank, word)
    except Exception:  # a defect of ours must not end the thread, by which the end of ranks is noticed
        logger.exception("nxd_ckpt: unexpected error at a word of rank %d", rank)


def own_hosts() -> list[str]:
    """Addresses of this host, as others may reach it; its own processes reach all of them."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it asks the system which of its addresses leads there.
        probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), 9))
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys([*found, "127.0.0.1"]))
