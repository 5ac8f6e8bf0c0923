"""Images of files to be written: the layout of a file before the bytes of its tensors are there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import Self

from nxd_ckpt.formats.recorded_tree import RecordedTree


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One tensor's place in the file: its ``nbytes`` tight, row-major bytes go to ``offset``."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Image(ABC):
    """A file of ``nbytes`` bytes, complete except for its tensors' contents.

    These go to ``storages``, which are in file order; ``tensors`` are the tensors for them.
    """

    nbytes: int
    storages: Sequence[StorageRecord] = field(repr=False)
    tensors: Sequence[Any] = field(repr=False)

    @property
    def tensor_nbytes(self) -> int:
        """Length of the first part of the file: all storages, with the bytes before each."""
        return self.storages[-1].end if self.storages else self.begin

    @property
    def begin(self) -> int:
        """Length of the `head`; 0 without one."""
        return 0

    def head(self, blocks: Sequence[Sequence[int]]) -> bytes:
        """Return the bytes before `begin`; ``blocks`` are the CRC-32s of the blocks of all storages, in order."""
        return b""

    @property
    def recorded(self) -> RecordedTree | None:
        """The file's tree for an index; None if only the file can tell it."""
        return None

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """(offset, bytes) of each file in this one: it may consist of several files."""
        return [(0, self.nbytes)]

    @abstractmethod
    def header(self, index: int, crcs: Sequence[int]) -> tuple[int, bytes]:
        """Return (offset, bytes) of the bytes between storage ``index`` and the one before it.

        ``crcs`` are the CRC-32s of the storages up to this one, which the header may contain, so it can only be written
        after these are hashed. Lengths and offsets do not depend on them.
        """

    @abstractmethod
    def tail(self, crcs: Sequence[int]) -> bytes:
        """Return everything from ``tensor_nbytes`` on; ``crcs`` are the CRC-32s of all storages, in order."""

    def holding(self, tensors: Sequence[Any]) -> Self:
        """Return the same file for other tensors, one of equal size for each storage."""
        return replace(self, tensors=tensors)
