"""Several storages that have the same files, some nearer than others, as one that is only read.

The place of each file is chosen before and never changes: a file that was verified in one place is not read from
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
    """The first of ``places``, except for the files ``elsewhere``: each is read from the place of that number.

    They are also listed as if the first place had them. No other place is asked.
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
            errno.EROFS, f"{name}: a storage of several places is read-only", f"{self.url}/{key}"
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
        """Return the entries in the directory ``key`` of files that are elsewhere."""
        prefix = f"{key}/" if key else ""
        below = (file.removeprefix(prefix).partition("/") for file in self._elsewhere if file.startswith(prefix))
        return {DirEntry(name, bool(slash)) for name, slash, _ in below}
