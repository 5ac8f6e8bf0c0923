"""A host's addresses for the servers of a job, and connecting to them."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from nxd_ckpt import effects
from nxd_ckpt.errors import InvalidArgument

T = TypeVar("T")

_SIOCGIFADDR = 0x8915
_PAUSE = 0.1
"""Seconds before a dropped connection is tried again."""


def address_of(interface: str) -> str:
    """Return the given address, or that of the network interface of this name (Linux).

    Raises InvalidArgument if this host has no such interface.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except (OSError, ImportError) as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise InvalidArgument(
            f"interface={interface!r}: expected an address of this host or one of its network interfaces with an IPv4 "
            f"address ({names})"
        ) from error


def group_addresses() -> list[str]:
    """Return addresses at which the other ranks of the process group can reach this host, the likeliest first.

    A job whose MASTER_ADDR is a loopback address is on one host: nobody else could reach its store.
    """
    master = os.environ.get("MASTER_ADDR", "192.0.2.1")
    if _is_loopback(master):
        return ["127.0.0.1"]
    addresses = list[str]()
    with suppress(OSError):
        family, _, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing: it asks the system which of its addresses leads there
            addresses.append(probe.getsockname()[0])
    with suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys([*addresses, "127.0.0.1"]))


def _is_loopback(master: str) -> bool:
    """Return whether it is a literal loopback address or "localhost"; other names may be loopback on their host alone.
    """
    try:
        return ipaddress.ip_address(master).is_loopback
    except ValueError:
        return master == "localhost"


def listen(addresses: Sequence[str]) -> dict[str, socket.socket]:
    """Return sockets that listen at these addresses of this host, all on one port; unusable ones are left out.

    Raises OSError if none can be used.
    """
    listeners: dict[str, socket.socket] = {}
    problem = OSError("this host has no address to listen to")
    port = 0
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listeners[address] = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            problem = error
            continue
        port = listeners[address].getsockname()[1]
    if not listeners:
        raise problem
    return listeners


def connect(
    hosts: Sequence[str],
    port: int,
    prove: Callable[[socket.socket, float], T],
    seconds: float,
    timeout: float | None = None,
) -> T:
    """Return the result of ``prove`` for a connection to the first of these addresses that answers.

    A connection that is dropped before it is proved, by a host that is busy with others, is tried again for
    ``seconds``. Connecting to one address takes at most ``timeout`` seconds, by default the rest of these.

    Raises the last OSError.
    """
    deadline = effects.monotonic() + seconds
    while True:
        problem, dropped = OSError("no answer"), False
        for host in hosts:
            within = max(deadline - effects.monotonic(), 0.1) if timeout is None else timeout
            try:
                connection = socket.create_connection((host, port), timeout=within)
            except OSError as error:
                problem = error
                continue
            try:
                return prove(connection, within)
            except OSError as error:
                connection.close()
                problem, dropped = error, True
        if not dropped or effects.monotonic() > deadline:
            raise problem
        effects.sleep(_PAUSE)
