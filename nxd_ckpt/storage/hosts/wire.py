"""The network of a job's hosts: their addresses, and messages of a few JSON fields and blobs of bytes over TCP.

The caller proves that it knows the job's secret; so does the host, which also proves which host it is. Requests and
replies follow. Incoming data is never unpickled, lengths are limited, and every message has a time limit.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from nxd_ckpt import effects
from nxd_ckpt.errors import InvalidArgument, MalformedFile

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
    addresses: list[str] = []
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
        problem = OSError("no answer")
        dropped = False
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
                problem = error
                dropped = True
        if not dropped or effects.monotonic() > deadline:
            raise problem
        effects.sleep(_PAUSE)


_LENGTH = struct.Struct(">I")
_HEAD = 2**16
"""Maximum bytes of a message's fields. Longer data is a blob."""

NONCE = 32
"""Bytes of a random number, and of a proof."""
_BLOBS = 4

Fields = dict[str, Any]

NAMED = (MalformedFile, EOFError, FileNotFoundError, FileExistsError)
"""Errors that a host names to its caller, which raises the same class: the first that matches."""


class Channel:
    """One connection, used by one thread at a time.

    Every message must be complete ``timeout`` seconds after the wait for its first byte began; but the first byte of a
    request is waited for without a limit.

    All methods raise OSError if the other end is gone, silent, or sends invalid messages.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket = connection
        self._timeout = timeout
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._deadline = 0.0

    def send(self, fields: Fields, *blobs: bytes | memoryview) -> None:
        self._begin()
        self._put(self._head(fields, [len(blob) for blob in blobs]))
        for blob in blobs:
            self._put(blob)

    def send_file(self, fd: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Send existing (offset, length) ranges of a file as one blob."""
        self._begin()
        self._put(self._head({}, [sum(length for _, length in ranges)]))
        with open(fd, "rb", buffering=0, closefd=False) as file:
            for offset, length in ranges:
                self._socket.settimeout(self._left())
                if length and self._socket.sendfile(file, offset, length) != length:
                    raise EOFError("the file became shorter while it was sent")

    def request(self) -> tuple[Fields, list[int]]:
        """Return the fields of the next message, however late it comes, and the lengths of its blobs."""
        self._socket.settimeout(None)
        first = self._socket.recv(1)
        self._begin()
        return self._parsed(first + self._take(_LENGTH.size - 1) if first else b"")

    def reply(self) -> tuple[Fields, list[int]]:
        """Return the fields of the next message, within the time limit, and the lengths of its blobs."""
        self._begin()
        return self._parsed(self._take(_LENGTH.size))

    def blob(self, nbytes: int, limit: int) -> bytes:
        if nbytes > limit:
            raise ConnectionError(f"sends {nbytes} bytes, at most {limit} are expected")
        return self._take(nbytes)

    def fill(self, view: memoryview) -> None:
        """Read the next bytes into memory."""
        done = 0
        while done < len(view):
            self._socket.settimeout(self._left())
            count = self._socket.recv_into(view[done:])
            if not count:
                raise ConnectionError("closed the connection")
            done += count

    def close(self) -> None:
        self._socket.close()

    def prove(self, secret: bytes, host: int) -> None:
        """Prove, as the caller, to know the secret, and check the proof that the other end is that host."""
        self._begin()
        theirs = self._take(NONCE)
        ours = os.urandom(NONCE)
        self._put(ours + proof(secret, b"caller", host, theirs + ours))
        if not hmac.compare_digest(self._take(NONCE), proof(secret, b"host", host, theirs + ours)):
            raise ConnectionError(f"does not prove that it is host {host} of this job")

    def admit(self, secret: bytes, host: int) -> bool:
        """Check the caller's proof, and prove to be this host. False if the caller does not know the secret."""
        self._begin()
        ours = os.urandom(NONCE)
        self._put(ours)
        theirs = self._take(NONCE)
        caller_proof = self._take(NONCE)
        if not hmac.compare_digest(caller_proof, proof(secret, b"caller", host, ours + theirs)):
            return False
        self._put(proof(secret, b"host", host, ours + theirs))
        return True

    def _begin(self) -> None:
        self._deadline = effects.monotonic() + self._timeout

    def _left(self) -> float:
        left = self._deadline - effects.monotonic()
        if left <= 0:
            raise TimeoutError(f"did not answer within {self._timeout:.0f} s")
        return left

    def _head(self, fields: Fields, lengths: list[int]) -> bytes:
        head = json.dumps([fields, lengths]).encode()
        if len(head) > _HEAD:
            raise OSError(f"a message of {len(head)} bytes, at most {_HEAD} are sent")
        return _LENGTH.pack(len(head)) + head

    def _put(self, data: bytes | memoryview) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(data)

    def _take(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.fill(memoryview(data))
        return bytes(data)

    def _parsed(self, prefix: bytes) -> tuple[Fields, list[int]]:
        if not prefix:
            raise ConnectionError("closed the connection")
        (nbytes,) = _LENGTH.unpack(prefix)
        try:
            fields, lengths = json.loads(self.blob(nbytes, _HEAD))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConnectionError("sends an invalid message") from error
        if not isinstance(fields, dict) or not _are_lengths(lengths):
            raise ConnectionError("sends an invalid message")
        return fields, lengths


def _are_lengths(lengths: Any) -> bool:
    return (
        isinstance(lengths, list)
        and len(lengths) <= _BLOBS
        and all(type(length) is int and 0 <= length < 2**63 for length in lengths)
    )


def proof(secret: bytes, role: bytes, number: int, nonces: bytes) -> bytes:
    """Return the proof of knowing ``secret`` in this ``role``, to or as the host or rank of this number."""
    return hmac.digest(secret, role + b" " + str(number).encode() + b" " + nonces, "sha256")


def number(value: Any) -> int:
    """Return ``value``, an integer of a message. Raises MalformedFile for anything else, infinity included."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise MalformedFile(f"expected a number, found {value!r:.40}")
    return value
