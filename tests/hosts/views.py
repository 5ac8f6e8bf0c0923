"""Hosts of a job in one process: each has a directory, a server on a loopback address of its own, and a view of all."""

from collections.abc import Sequence
from pathlib import Path

from nxd_ckpt.coordination.control_files import ON_HOSTS
from nxd_ckpt.storage.hosts.directory import OwnDirectory
from nxd_ckpt.storage.hosts.hosts_storage import Directory, Hosts, HostsStorage
from nxd_ckpt.storage.hosts.remote import Address, RemoteDirectory
from nxd_ckpt.storage.hosts.server import HostServer, copy_nothing

SECRET = b"s" * 32
TIMEOUT = 60.0


class World:
    """Hosts whose directories are ``path/0``, ``path/1``, ..., served on 127.0.0.2, 127.0.0.3, ..."""

    def __init__(self, path: Path, hosts: int, replicas: int = 1, timeout: float = TIMEOUT) -> None:
        self.paths = [path / str(number) for number in range(hosts)]
        self.own = [OwnDirectory(path) for path in self.paths]
        self.servers = [
            HostServer(own, number, SECRET, [f"127.0.0.{number + 2}"], timeout, copy_nothing)
            for number, own in enumerate(self.own)
        ]
        self.timeout = timeout
        self.remotes: list[RemoteDirectory] = []
        self.views = [self._view(here, replicas) for here in range(hosts)]

    def remote(self, host: int, secret: bytes = SECRET, timeout: float | None = None) -> RemoteDirectory:
        """A host as another one sees it."""
        address = Address([f"127.0.0.{host + 2}"], self.servers[host].port)
        remote = RemoteDirectory(host, f"host {host}", address, secret, timeout or self.timeout)
        self.remotes.append(remote)
        return remote

    def lose(self, host: int) -> None:
        """Its process ends; its disk stays."""
        self.servers[host].close()

    def close(self) -> None:
        for server in self.servers:
            server.close()
        for remote in self.remotes:
            remote.close()

    def _view(self, here: int, replicas: int) -> HostsStorage:
        numbers = range(len(self.own))
        directories: Sequence[Directory] = [
            self.own[here] if number == here else self.remote(number) for number in numbers
        ]
        view = HostsStorage(self.own[here], ON_HOSTS)
        view.join(Hosts(directories, here, [(here + step) % len(numbers) for step in range(1, replicas)]))
        return view
