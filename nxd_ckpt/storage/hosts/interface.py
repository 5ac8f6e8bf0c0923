"""On which of a host's addresses its server listens."""

from __future__ import annotations

import ipaddress
import socket
import struct

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
