"""A store as one survey shows it: what directories hold directly is known.

Listing tags, and judging which of them stay, asks of each what it holds: several requests of some 30 ms. A survey lists
a hundred tags in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.storage.base import DirEntry, ListedFile, Storage
from nxd_ckpt.storage.wrapper import StorageWrapper
from nxd_ckpt.tag.range_reader import in_parallel

_TOGETHER = 124
"""Directories of one survey: with eight entries each, and one of the next, they fill a request."""

_RANKS = "/dp_rank_"
"""Beginning of the names of ranks' files, which may be thousands: a survey shows only that there are some."""


def surveyed(storage: Storage) -> Storage:
    """Return the storage as it is now, for reading many of its tags once; itself, if it offers no surveys.

    A file that is replaced later counts as missing. What is asked of directories below those of the root is asked of
    the storage itself.
    """
    if storage.renames or not storage.surveys:
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
        if file is None:
            return self.inner.read(key, limit)
        return self.inner.read_listed(key, file.mark, limit)

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
