"""A store as one survey shows it: what directories hold directly is known, and small files are read once.

Listing tags, and judging which of them stay, asks of each what it holds, and for its small files: two to fifteen
requests of some 30 ms. A survey lists a hundred tags in one. Small files are kept for the whole process, by the mark
that a listing has of each: a file with another mark is read again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from sys import intern

from nxd_ckpt import effects
from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.storage.base import DirEntry, ListedFile, Storage, Surveying
from nxd_ckpt.storage.wrapper import StorageWrapper
from nxd_ckpt.tag.range_reader import in_parallel

_TOGETHER = 124
"""Directories of one survey: with eight entries each, and one of the next, they fill a request."""

_RANKS = "/dp_rank_"
"""Beginning of the names of ranks' files, which may be thousands: a survey shows only that there are some."""

_SMALL, _ALL = 2**20, 32 * 2**20
"""Bytes of a file that is kept, and of all of them."""

_ENTRY = 400
"""Bytes of an entry beside its content."""


def surveyed(storage: Storage) -> Storage:
    """Return the storage as it is now, for reading many of its tags once; itself, if it offers no surveys.

    A file that is replaced later counts as missing. What is asked of directories below those of the root is asked of
    the storage itself.
    """
    if storage.renames or not isinstance(storage, Surveying):
        return storage
    top = storage.list()
    folders = [entry.name for entry in top if entry.is_dir and entry.name[0] != "."]
    firsts = range(0, len(folders), _TOGETHER)

    def survey(first: int) -> Mapping[str, Mapping[str, ListedFile | None]]:
        return storage.survey(folders[first : first + _TOGETHER], _RANKS)

    content = {folder: names for part in in_parallel(storage, firsts, survey) for folder, names in part.items()}
    return SurveyedStorage(storage, top, content)


class SurveyedStorage(StorageWrapper):
    """A store of which the directories in ``content`` were surveyed, with what the survey showed of each."""

    def __init__(
        self, inner: Storage, top: Sequence[DirEntry], content: Mapping[str, Mapping[str, ListedFile | None]]
    ) -> None:
        super().__init__(inner)
        self._top, self._content = top, dict(content)

    def forget(self, folder: str) -> None:
        """Ask the store itself about this directory, which has changed."""
        self._content.pop(folder, None)

    def list(self, key: str = "") -> list[DirEntry]:
        if not key:
            return list(self._top)
        names = self._content.get(key)
        if names is not None:
            return sorted(DirEntry(name, file is None) for name, file in names.items())
        folder, _, name = key.rpartition("/")
        return self.inner.list(key) if name in self._content.get(folder, (name,)) else []

    def is_file(self, key: str) -> bool:
        folder, _, name = key.rpartition("/")
        names = self._content.get(folder)
        return self.inner.is_file(key) if names is None else names.get(name) is not None

    def is_dir(self, key: str) -> bool:
        folder, _, name = key.rpartition("/")
        if key in self._content:
            return bool(self._content[key])
        names = self._content.get(folder)
        return self.inner.is_dir(key) if names is None else name in names and names[name] is None

    def size(self, key: str) -> int:
        file = self._file(key)
        return self.inner.size(key) if file is None else file.nbytes

    def time(self, key: str) -> float:
        file = self._file(key)
        return self.inner.time(key) if file is None else file.time

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        file = self._file(key)
        if file is None or not isinstance(self.inner, Surveying):
            return self.inner.read(key, limit)
        place = self.url, key, file.mark
        data = contents.get(place) if file.nbytes <= limit else None
        if data is None:
            data = self.inner.read_listed(key, file.mark, limit)
            contents.put(place, data)
        return data

    def stamp(self, folder: str, files: Sequence[str]) -> Hashable | None:
        names = self._content.get(folder)
        if names is None or any("/" in file for file in files):
            return None
        listing = "\0".join(name if file is not None else f"{name}/" for name, file in names.items())
        return (intern(listing), *map(names.get, files))

    def _file(self, key: str) -> ListedFile | None:
        """Return the file as it was listed; None if it is unknown. Raises FileNotFoundError if there was none."""
        folder, _, name = key.rpartition("/")
        names = self._content.get(folder)
        if names is None:
            return None
        file = names.get(name)
        if file is None:
            raise FileNotFoundError(f"{self.url}/{key} does not exist")
        return file


class _Contents:
    """Contents of small files by their place and mark. The oldest make room for others."""

    def __init__(self) -> None:
        self._lock = effects.Lock()
        self.clear()

    def clear(self) -> None:
        self._files, self._nbytes = dict[tuple[str, str, str], bytes](), 0

    def get(self, place: tuple[str, str, str]) -> bytes | None:
        return self._files.get(place)

    def put(self, place: tuple[str, str, str], data: bytes) -> None:
        if len(data) > _SMALL:
            return
        with self._lock:
            self._nbytes += len(data) + _ENTRY - self._drop(place)
            self._files[place] = data
            while self._nbytes > _ALL:
                self._nbytes -= self._drop(next(iter(self._files)))

    def _drop(self, place: tuple[str, str, str]) -> int:
        data = self._files.pop(place, None)
        return 0 if data is None else len(data) + _ENTRY


contents = _Contents()
"""Of this process: a mark belongs to one content, so it does not matter which storage has shown it."""
