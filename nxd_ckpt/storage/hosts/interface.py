"""On which of a host's addresses the servers of a job listen."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from nxd_ckpt.errors import InvalidArgument

_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """The address that is named, or that of the network interface of this name (Linux).

    Raises InvalidArgument where this host has no such interface.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    except (OSError, ImportError) as error:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise InvalidArgument(
            f"interface={interface!r}: expected an address of this host or one of its network interfaces with an IPv4 "
            f"address ({there})"
        ) from error


def group_addresses() -> list[str]:
    """Addresses of this host at which the other ranks of its process group can reach it, the likeliest first.

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
    """True for the literal address or "localhost"; a host's own name may be a loopback address on that host alone."""
    try:
        return ipaddress.ip_address(master).is_loopback
    except ValueError:
        return master == "localhost"


def listen(addresses: Sequence[str]) -> dict[str, socket.socket]:
    """Sockets that listen at these addresses of this host, all on one port. Addresses that cannot be used are left out.

    Raises OSError if none of them can be listened to.
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
