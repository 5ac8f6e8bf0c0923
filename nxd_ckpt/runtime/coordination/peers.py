"""Which ranks of the job are gone, by their connections.

Every other rank keeps one connection to rank 0, over which nothing is sent once it stands. When a process ends, in
whatever way, its system closes the connection, and the other end learns of it at once. A process that is stopped, or
gets no time to run, keeps its connection, so that it is not taken for dead. A host that loses its power is silent, and
counts as lost after the timeout; so does a rank that could not be connected.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
from contextlib import suppress
from typing import Any

Address = dict[str, Any]
"""What another rank needs to connect to rank 0 (JSON)."""

_CONNECTING = 2.0
"""Seconds that connecting to one address may take."""


class Hub:
    """Rank 0's end of the connections, watched by a thread of its own."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ranks: dict[socket.socket, int] = {}
        self._gone: set[int] = set()
        threading.Thread(target=self._watch, name="nxd_ckpt-peers", daemon=True).start()

    def address(self) -> Address:
        return {"hosts": _own_hosts(), "port": self._listener.getsockname()[1], "token": self._token}

    def is_gone(self, rank: int) -> bool:
        """Whether that rank was connected and has ended."""
        return rank in self._gone

    def leave(self) -> None:
        """In a forked child: close what is the parent's, which keeps it open."""
        for held in (*self._ranks, self._listener):
            held.close()

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select():
                ready: Any = key.fileobj
                if ready is self._listener:
                    self._admit()
                elif not _read(ready):
                    self._selector.unregister(ready)
                    rank = self._ranks.pop(ready)
                    if rank not in self._ranks.values():  # else it has connected anew
                        self._gone.add(rank)
                    ready.close()

    def _admit(self) -> None:
        with suppress(OSError, ValueError):
            connection, _ = self._listener.accept()
            connection.settimeout(_CONNECTING)
            token, _, rank = connection.recv(64).partition(b" ")
            if not hmac.compare_digest(token, self._token.encode()):
                connection.close()
                return
            connection.sendall(b"1")
            connection.setblocking(False)
            self._ranks[connection] = int(rank)
            self._gone.discard(int(rank))  # another process group, in the same processes
            self._selector.register(connection, selectors.EVENT_READ)


class Spoke:
    """Another rank's end of its connection to rank 0."""

    def __init__(self, rank: int, address: Address) -> None:
        """Raises OSError where rank 0 cannot be reached."""
        self._connection = self._connect(rank, address)
        self._ended = False

    def is_gone(self, rank: int) -> bool:
        """Whether rank 0 ended; this end knows nothing of others."""
        if rank == 0 and not self._ended:
            self._ended = not _read(self._connection)
        return rank == 0 and self._ended

    def leave(self) -> None:
        """In a forked child: close what is the parent's, which keeps it open."""
        self._connection.close()

    def _connect(self, rank: int, address: Address) -> socket.socket:
        problem: OSError | None = None
        for host in address["hosts"]:
            try:
                connection = socket.create_connection((host, address["port"]), timeout=_CONNECTING)
                connection.sendall(f"{address['token']} {rank}".encode())
                if connection.recv(1) == b"1":
                    connection.setblocking(False)
                    return connection
                connection.close()
            except OSError as error:
                problem = error
        raise problem or OSError("no answer")


def _read(connection: socket.socket) -> bool:
    """Whether the other end is still there."""
    try:
        return bool(connection.recv(64))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _own_hosts() -> list[str]:
    """Addresses of this host, as others may reach it; its own processes reach all of them."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it asks the system which of its addresses leads there.
        probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), 9))
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys([*found, "127.0.0.1"]))
