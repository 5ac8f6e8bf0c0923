"""Servers of hosts and connections to them in a simulated world, in the terms of the product's own protocol.

From a message on, the caller's and the server's code are the real ones. Only the socket below it is simulated. Callers
need not prove that they know the job's secret.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from nxd_ckpt.storage.hosts.directory import OwnDirectory
from nxd_ckpt.storage.hosts.remote import RemoteDirectory
from nxd_ckpt.storage.hosts.server import CopyOut, _Conversation
from nxd_ckpt.storage.hosts.wire import Channel
from tests.simulation.world.threads import AtOnce
from tests.simulation.world.world import Process, Task, World

SECOND = 2e-4
"""How long a message takes on average."""

CONNECTING = 1.0
"""Seconds after which a connection to a host without power is given up. As the product's own, it is much shorter than
the time that a request may take."""


class Network:
    """The servers of a world, by port. ``silent`` are processes that lost power: nobody hears of their end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.servers: list[Server] = []
        self.silent: set[Process] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, hosts of a job meet by this network."""
        network = self

        def serve(
            directory: OwnDirectory, host: int, secret: bytes, addresses: Sequence[str], timeout: float, copy: CopyOut
        ) -> Server:
            network.servers.append(Server(network, directory, addresses, timeout, copy, len(network.servers)))
            return network.servers[-1]

        class Remote(RemoteDirectory):
            def _connect(self) -> Channel:
                return network.connect(self._address.port, self._timeout)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nxd_ckpt.tiers.hosts.HostServer", serve)
            patch.setattr("nxd_ckpt.storage.transfer.ThreadPoolExecutor", AtOnce)
            for name in ("yield_disk_to_others", "yield_processor_to_others"):
                patch.setattr(f"nxd_ckpt.storage.hosts.server.{name}", lambda: None)
            patch.setattr("nxd_ckpt.tiers.hosts.RemoteDirectory", Remote)
            patch.setattr("nxd_ckpt.tiers.hosts.group_addresses", lambda: ["simulated"])
            patch.setattr("nxd_ckpt.tiers.hosts.secrets.token_hex", lambda n: f"{self.world.random.getrandbits(64):x}")
            yield

    def connect(self, port: int, timeout: float) -> Channel:
        """A connection to a server. Raises ConnectionRefusedError, TimeoutError."""
        server, running = self.servers[port], self.world.current
        assert running is not None
        self.world.pause(self.world.duration(SECOND))
        if server.process in self.silent:
            self.world.pause(min(timeout, CONNECTING))
            raise TimeoutError("timed out")
        if server.is_closed or not server.process.alive:
            raise ConnectionRefusedError("Connection refused")
        near, far = Connection(self, running.process), Connection(self, server.process)
        near.peer, far.peer = far, near
        server.serve(far)
        return _Channel(near, timeout)


class Server:
    """As `nxd_ckpt.storage.hosts.server.HostServer`."""

    def __init__(
        self,
        network: Network,
        directory: OwnDirectory,
        addresses: Sequence[str],
        timeout: float,
        copy_out: CopyOut,
        port: int,
    ) -> None:
        assert network.world.current is not None
        self.process = network.world.current.process
        self.addresses, self.port, self.is_closed = list(addresses), port, False
        self._network, self._directory, self._timeout, self._copy_out = network, directory, timeout, copy_out
        self._connections: list[Connection] = []

    def serve(self, connection: Connection) -> None:
        self._connections.append(connection)

        def answer() -> None:
            try:
                _Conversation(self._directory, _Channel(connection, self._timeout), self._copy_out).serve()
            except OSError:
                connection.close()  # its caller has gone

        self._network.world.spawn(self.process, answer, "nxd_ckpt-host")

    def close(self) -> None:
        self.is_closed = True
        for connection in self._connections:
            connection.close()


class Connection:
    """One end of a connection, as a ``socket.socket``; ``peer`` is the other."""

    peer: Connection

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._world, self.process = network, network.world, process
        self._arrived = bytearray()
        self._timeout: float | None = None
        self._is_closed = False
        self._waiting = deque[Task]()
        process.when_killed.append(lambda: self.peer.wake())

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Nothing that matters here."""

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes | memoryview) -> None:
        self._world.pause(self._world.duration(SECOND))
        if self._is_closed or self._has_ended(self.peer):
            raise ConnectionResetError("Connection reset by peer")
        self.peer._arrived += bytes(data)
        self.peer.wake()

    def recv(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        return bytes(data[: self.recv_into(memoryview(data))])

    def recv_into(self, view: memoryview) -> int:
        ends = None if self._timeout is None else self._world.now + self._timeout
        while not self._arrived:
            if self._is_closed:
                raise OSError("Bad file descriptor")
            if self._has_ended(self.peer):
                return 0
            if ends is not None and self._world.now >= ends:
                raise TimeoutError("timed out")
            assert self._world.current is not None
            self._waiting.append(self._world.current)
            self._world.park(None if ends is None else ends - self._world.now)
        count = min(len(view), len(self._arrived))
        view[:count] = self._arrived[:count]
        del self._arrived[:count]
        return count

    def close(self) -> None:
        self._is_closed = True
        self.wake()
        self.peer.wake()

    def wake(self) -> None:
        """Let who waits for what arrives look again."""
        while self._waiting:
            self._world.wake(self._waiting.popleft())

    def _has_ended(self, end: Connection) -> bool:
        return end._is_closed or (not end.process.alive and end.process not in self._network.silent)


class _Channel(Channel):
    """A channel on a simulated connection; the files that it sends are on simulated disks."""

    def __init__(self, connection: Any, timeout: float) -> None:
        super().__init__(connection, timeout)

    def send_file(self, fd: int, ranges: Sequence[tuple[int, int]]) -> None:
        data = bytearray()
        for offset, length in ranges:
            part = memoryview(bytearray(length))
            done = 0
            while done < length:
                done += os.preadv(fd, [part[done:]], offset + done)
            data += part
        self.send({}, bytes(data))
