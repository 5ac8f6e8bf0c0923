"""Files of a tag, kept open while a load reads from them in many places and threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nxd_ckpt import effects
from nxd_ckpt.storage.base import Reader
from nxd_ckpt.tag.files import TagFiles

_KEPT = 64
"""Maximum number of idle files that stay open: with xser there is one for each tensor."""


class OpenFiles:
    """Files of ``files``, each opened once per thread that reads it. A context manager, or to be closed."""

    def __init__(self, files: TagFiles) -> None:
        self._files = files
        self._lock = effects.Lock()
        self._idle: deque[tuple[str, Reader]] = deque()  # the last used at the end

    def read_ranges(self, file: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memory with the file's bytes from its offset on. Thread-safe.

        Raises the errors of `TagFiles.read_ranges`.
        """
        with self._files.named(file):
            reader = self._take(file)
            try:
                reader.read_ranges(ranges)
            finally:
                self._give_back(file, reader)

    def close(self) -> None:
        """Close all files; nobody may be reading. A later read opens its file again."""
        while self._idle:
            self._idle.popleft()[1].close()

    def _take(self, file: str) -> Reader:
        with self._lock:
            for number in range(len(self._idle) - 1, -1, -1):
                if self._idle[number][0] == file:
                    reader = self._idle[number][1]
                    del self._idle[number]
                    return reader
        return self._files.open(file)

    def _give_back(self, file: str, reader: Reader) -> None:
        with self._lock:
            self._idle.append((file, reader))
            surplus = self._idle.popleft()[1] if len(self._idle) > _KEPT else None
        if surplus is not None:
            surplus.close()
