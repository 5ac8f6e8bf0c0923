"""A directory of another library's files that appears as a whole: with tags in it, and digests of all other files.

The order is derived from *visible means complete*: the library's files are written out of sight, sealed (synced, their
digests taken) and named in a tag's user content. When the last tag is complete and durable, they are joined, and one
rename makes the directory visible. What it replaces stays until then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from threading import Event

from nxd_ckpt.errors import DigestMismatch, PartLost
from nxd_ckpt.formats.crc32 import BLOCK, crc32
from nxd_ckpt.layout.names import DONE
from nxd_ckpt.runtime.coordination.replacement import Replacement
from nxd_ckpt.runtime.save.pending import PendingSave
from nxd_ckpt.storage.local import LocalStorage

_INCOMPLETE = ".incomplete"
"""Where directories are written, in the root of those that they are published to."""


class SealedDirectory:
    """One directory, ``name`` in ``root``, on its way from where it is written to where it is seen.

    Rank 0 calls :meth:`begin`, :meth:`seal`, :meth:`publish` and :meth:`retire`.
    """

    def __init__(self, root: str, name: str) -> None:
        self._storage = LocalStorage(os.path.abspath(root))
        self._name, self._staged = name, f"{_INCOMPLETE}/{os.path.basename(name)}"
        self._saves: list[PendingSave] = []
        self._tried: Event | None = None
        """Set on rank 0 when it is visible, or failed to become so: a save is done a moment earlier."""
        self._error: BaseException | None = None
        self.path = os.path.join(self._storage.url, name)
        self.staged = os.path.join(self._storage.url, self._staged)
        """Where the library writes its files."""
        self.tags = os.path.join(self._storage.url, _INCOMPLETE, "tags")
        """The directory that tags are saved to, before they become part of this one."""

    def begin(self) -> None:
        """Remove what killed runs left, and make room."""
        for entry in self._storage.list(_INCOMPLETE):
            if entry.name != "tags":
                self._storage.remove(f"{_INCOMPLETE}/{entry.name}")
        self._storage.make_dir(self._staged)

    def seal(self) -> dict[str, list[int]]:
        """Size in bytes and CRC-32 of every file that is there, by its path; all are on the disk then."""
        return {name: _digest(os.path.join(self.staged, name), sync=True) for name in _files(self.staged)}

    def publish_after(self, saves: Sequence[PendingSave], is_rank_0: bool) -> None:
        """Make it visible as soon as these tags are."""
        self._saves = list(saves)
        if is_rank_0:
            self._tried = Event()
            self._saves[-1].add_done_callback(self._publish)

    def wait(self) -> None:
        """Until it is visible. Raises what failed; nothing is visible then but what was before."""
        for save in self._saves:
            save.wait()
        if self._tried is not None:
            self._tried.wait()
        if self._error is not None:
            raise self._error

    def retire(self, pattern: str, limit: int | None, stay: Sequence[str] = ()) -> None:
        """Remove the oldest of the directories beside it whose whole name ``pattern`` matches, down to ``limit`` (None
        or 0: none), but this one and those called as in ``stay``: each is out of sight at once.

        The first group of ``pattern`` is the number that tells the order.
        """
        folder, own = os.path.split(self._name)
        found = (re.fullmatch(pattern, entry.name) for entry in self._storage.list(folder) if entry.is_dir)
        names = [match[0] for match in sorted(filter(None, found), key=lambda match: int(match[1]))]
        kept = {own, *stay} & {*names}
        surplus = [name for name in names if name not in kept] if limit else []
        for name in surplus[: max(len(names) - max(limit or 0, len(kept)), 0)]:
            self._storage.rename(os.path.join(folder, name), f"{_INCOMPLETE}/{name}")
            self._storage.remove(f"{_INCOMPLETE}/{name}")

    def _publish(self, saved: Future[None]) -> None:
        """On the thread that wrote the last tag."""
        assert self._tried is not None
        try:
            if all(save.error is None for save in self._saves):
                self._make_visible()
        except OSError as error:
            self._error = error
        finally:
            self._tried.set()

    def _make_visible(self) -> None:
        storage, folder, aside = self._storage, os.path.dirname(self._name), f"{self._staged}.replaced"
        for save in self._saves:
            storage.rename(f"{_INCOMPLETE}/tags/{save.tag}", f"{self._staged}/{save.tag}")
        storage.sync_dir(self._staged)
        storage.make_dir(folder)
        Replacement(storage, self._staged, self._name, aside).make()
        storage.sync_dir(folder)
        storage.remove(aside)


def is_sealed(directory: str, tag: str) -> bool:
    """Whether it holds that tag, and so is one of ours."""
    return os.path.isfile(os.path.join(directory, tag, DONE))


def verify_files(directory: str, tag: str, files: Mapping[str, Sequence[int]]) -> None:
    """Raise PartLost or DigestMismatch where the files are not what :meth:`SealedDirectory.seal` saw."""
    for name, (size, crc) in files.items():
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            raise PartLost(f"{path} was saved, and is gone: the checkpoint is damaged; resume from another one")
        if [size, crc] != _digest(path):
            raise DigestMismatch(
                f"{path}: its bytes are not those that were saved ({size} bytes, CRC-32 {crc:08x}). Resume from "
                f"another checkpoint. If it was changed on purpose, remove {os.path.join(directory, tag)}, and "
                "with it the optimizer"
            )


def _files(top: str) -> list[str]:
    """Every file below, by its path from there."""
    found = (os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)
    return sorted(os.path.relpath(path, top) for path in found)


def _digest(path: str, sync: bool = False) -> list[int]:
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), crc32(block, crc)
        if sync:
            os.fsync(file.fileno())
    return [size, crc]
