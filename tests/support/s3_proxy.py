"""A proxy before an S3 server that does to chosen requests what networks and busy stores do.

::

    with S3Proxy(server.address) as proxy:
        proxy.faults.append(Fault("PUT .*partNumber=2", "reset_request", times=2, nbytes=100_000))
        storage = open_storage("s3://bucket/run", storage_options=options_for(proxy.address))
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Literal

from tests.support.s3_server import error_body

_BLOCK = 64 * 2**10


@dataclass
class Fault:
    """What happens to the first ``times`` requests whose ``METHOD /bucket/key?query`` the regular expression matches.

    - ``refuse``: answered with ``status`` and ``code``; the server never sees it.
    - ``reset_request``: the connection breaks after ``nbytes`` bytes of the request's body.
    - ``corrupt``: byte ``nbytes`` of the request's body is another one.
    - ``reset_reply``: it breaks after ``nbytes`` bytes of the reply's body; ``short_reply``: it is closed there.
    - ``drop_reply``: the server does it, and the reply is lost.
    - ``delay``: it takes ``seconds`` longer.
    """

    pattern: str
    kind: Literal["refuse", "reset_request", "corrupt", "reset_reply", "short_reply", "drop_reply", "delay"]
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    nbytes: int = 0
    seconds: float = 0.0
    more: dict[str, str] = field(default_factory=dict)
    hits: int = 0


class S3Proxy:
    """Start it with ``with``. ``requests`` are those that came in, in order, repeated ones included."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.address: tuple[str, int] = self._socket.getsockname()
        self.faults: list[Fault] = []
        self.requests: list[str] = []

    def __enter__(self) -> S3Proxy:
        threading.Thread(target=self._accept, name="s3-proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(client,), name="s3-proxy-connection", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One request; the connection is closed after it."""
        with client, contextlib.suppress(OSError):
            head, body = _read_head(client)
            if not head:
                return
            request = " ".join(head.decode("latin-1").split("\r\n", 1)[0].split(" ")[:2])
            fault = self._fault(request)
            if fault.kind == "delay":
                time.sleep(fault.seconds)
            if b"100-continue" in head.lower():
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            length = int((re.search(rb"(?i)\r\ncontent-length: *(\d+)", head) or [b"", b"0"])[1])
            most = min(length, fault.nbytes) if fault.kind == "reset_request" else length
            while len(body) < most and (block := client.recv(_BLOCK)):
                body += block
            if fault.kind == "corrupt":
                body[fault.nbytes] ^= 1
            if fault.kind == "reset_request":
                _reset(client)
            elif fault.kind == "refuse":
                client.sendall(_refusal(fault, request.startswith("HEAD")))
            else:
                self._forward(client, head, body, fault)

    def _fault(self, request: str) -> Fault:
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.hits < fault.times and re.search(fault.pattern, request):
                    fault.hits += 1
                    return fault
        return Fault("", "delay")

    def _forward(self, client: socket.socket, head: bytes, body: bytearray, fault: Fault) -> None:
        with socket.create_connection(self._server) as server:
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"expect:", b"connection:"))]
            server.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            reply_head, rest = _read_head(server)
            reply_head = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", reply_head) + b"\r\nConnection: close\r\n\r\n"
            reply = bytearray(rest)
            while block := server.recv(_BLOCK):
                reply += block
        if fault.kind == "drop_reply":
            _reset(client)
        elif fault.kind == "short_reply":
            client.sendall(reply_head + reply[: fault.nbytes])
        elif fault.kind == "reset_reply":
            client.sendall(reply_head + reply[: fault.nbytes])
            _reset(client)
        else:
            client.sendall(reply_head + reply)


def _read_head(connection: socket.socket) -> tuple[bytes, bytearray]:
    """Up to the empty line, and what came after it; nothing where the other side hung up."""
    data = bytearray()
    while b"\r\n\r\n" not in data:
        block = connection.recv(_BLOCK)
        if not block:
            return b"", bytearray()
        data += block
    head, _, rest = bytes(data).partition(b"\r\n\r\n")
    return head, bytearray(rest)


def _reset(connection: socket.socket) -> None:
    """Close it so that the other side sees an error, not an end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _refusal(fault: Fault, is_head: bool) -> bytes:
    body = b"" if is_head else error_body(fault.code, **fault.more)
    return (
        f"HTTP/1.1 {fault.status} Refused\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    )
