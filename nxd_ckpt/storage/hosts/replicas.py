"""Writing a file on this host and on others at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from nxd_ckpt.storage.base import Writer
from nxd_ckpt.storage.hosts.directory import Directory

_BESIDE = 2**20
"""Bytes of a write from which sending runs in a thread: less is sent before a thread would have begun."""


class ReplicatedWriter:
    """A writer to ``own`` and to a file of the same key on each other host: closed means complete on all."""

    def __init__(self, own: Writer, others: Sequence[tuple[Directory, str, int]]) -> None:
        self._own = own
        self._others: list[Writer] = []
        self._sender: ThreadPoolExecutor | None = None
        self._sending: list[Future[None]] = []
        try:
            for directory, key, nbytes in others:
                self._others.append(directory.create(key, nbytes))
        except BaseException:
            self.abort()
            raise

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        if len(memoryview(data).cast("B")) >= _BESIDE:
            self._sender = self._sender or ThreadPoolExecutor(1, "nxd_ckpt-replica")
        if self._sender is None:
            self._send(offset, data)
        else:
            self._sending.append(self._sender.submit(self._send, offset, data))
        self._own.write_at(offset, data)

    def settle(self) -> None:
        self._await_sent()
        self._own.settle()

    def close(self) -> None:
        try:
            self._await_sent()
            for writer in self._others:
                writer.close()
            self._own.close()
        finally:
            self._end()

    def abort(self) -> None:
        for sending in self._sending:
            sending.cancel()
        self._end()  # nothing looks into memory afterwards
        for writer in (*self._others, self._own):
            with suppress(OSError):
                writer.abort()

    def _send(self, offset: int, data: bytes | memoryview) -> None:
        for writer in self._others:
            writer.write_at(offset, data)

    def _await_sent(self) -> None:
        """Return once everything was sent and verified on arrival; raise earlier failures."""
        sending, self._sending = self._sending, []
        for future in sending:
            future.result()
        for writer in self._others:
            writer.settle()

    def _end(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()
        self._sender = None
