"""The body of a request: a file-like object over several pieces of memory, without copies."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import SEEK_CUR, SEEK_END, SEEK_SET

from nxd_ckpt.storage.throttle import Throttle

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # no wheel for this platform
    from zlib import crc32 as _crc32


class Body:
    """Pieces of memory as one file. `read` returns views of the pieces."""

    def __init__(self, views: Sequence[memoryview], throttle: Throttle) -> None:
        self._views, self._throttle = views, throttle
        self._nbytes = sum(map(len, views))
        self._position = 0

    def read(self, size: int | None = -1) -> bytes | memoryview:
        """Return at most ``size`` bytes, or a block of a whole piece if that is more.

        The HTTP library asks for 16 KiB at a time, at which sending costs a fifth more.
        """
        offset = self._position
        for view in self._views:
            if offset < len(view):
                block = view[offset : offset + self._throttle.block]
                self._position += len(block)
                self._throttle.take(len(block))
                return block
            offset -= len(view)
        return b""

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._position = offset + {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._nbytes}[whence]
        return self._position

    def tell(self) -> int:
        return self._position


def crc32(views: Sequence[memoryview]) -> str:
    """Return the CRC-32 of all pieces, one after the other, in S3's form."""
    value = 0
    for view in views:
        value = _crc32(view, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()
