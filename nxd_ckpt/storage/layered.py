"""Several storages that hold the same files, one nearer than the other, as one that is only read.

Which file is taken from which of them is decided before, and never changes: what was verified in one is not read from
another.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from nxd_ckpt.storage.base import DirEntry, Storage
from nxd_ckpt.storage.wrapper import RoutedStorage

T = TypeVar("T")


class LayeredStorage(RoutedStorage):
    """The first of ``places``, but for the files ``elsewhere``: each of these is read from the place of that number.

    It is listed there too, as if the first place had it. No other place is asked for anything.
    """

    def __init__(self, places: Sequence[Storage], elsewhere: Mapping[str, int]) -> None:
        super().__init__(places[0])
        self._places, self._elsewhere = places, elsewhere
        self.used = [places[number] for number in sorted({0, *elsewhere.values()})]
        self.renames = all(place.renames for place in self.used)
        self.concurrency = max(place.concurrency for place in self.used)
        self.read_nbytes = max(place.read_nbytes for place in self.used)

    def around(self, name: str, key: str, operation: Callable[[], T]) -> T:
        raise OSError(
            errno.EROFS, f"{name}: what is put together from several places is only read", f"{self.url}/{key}"
        )

    def _at(self, key: str) -> Storage:
        return self._places[self._elsewhere.get(key, 0)]

    def time(self, key: str) -> float:
        return self._at(key).time(key)

    def is_file(self, key: str) -> bool:
        return key in self._elsewhere or self.inner.is_file(key)

    def is_dir(self, key: str) -> bool:
        return self.inner.is_dir(key) or bool(self._taken_below(key))

    def list(self, key: str = "") -> list[DirEntry]:
        return sorted({*self.inner.list(key), *self._taken_below(key)})

    def _taken_below(self, key: str) -> set[DirEntry]:
        """What a listing of the directory ``key`` shows of the files that are elsewhere."""
        prefix = f"{key}/" if key else ""
        below = (one.removeprefix(prefix).partition("/") for one in self._elsewhere if one.startswith(prefix))
        return {DirEntry(name, bool(slash)) for name, slash, _ in below}
