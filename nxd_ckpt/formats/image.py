"""Files to be written, as images: all of a file's layout is known before the bytes of its tensors are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One tensor's place in the file: its ``nbytes`` tight, row-major bytes belong at ``offset``."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Image(ABC):
    """A file of ``nbytes`` bytes but for its tensors' contents.

    Those go where ``storages`` says, which are in file order; ``tensors`` are what belongs there.
    """

    nbytes: int
    storages: Sequence[StorageRecord] = field(repr=False)
    tensors: Sequence[Any] = field(repr=False)

    holds_crcs: ClassVar[bool] = True
    """Whether the CRC-32s of its storages stand in it. Of a file without them they are not needed, nor computed."""

    @property
    def tensor_nbytes(self) -> int:
        """The first bytes of the file, which are storages with whatever stands before each."""
        return self.storages[-1].end if self.storages else 0

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """(offset, bytes) of each file in this one: it may be several, one behind the other."""
        return [(0, self.nbytes)]

    @abstractmethod
    def header(self, index: int, crcs: Sequence[int]) -> tuple[int, bytes]:
        """(offset, bytes) of what lies between the storage before number ``index`` and that itself.

        ``crcs`` are the CRC-32s of the storages up to that one, which may stand in it: it can only be written once
        these are hashed. Lengths and offsets do not depend on them.
        """

    @abstractmethod
    def tail(self, crcs: Sequence[int]) -> bytes:
        """Everything from ``tensor_nbytes`` on; ``crcs`` are those of all storages, in order."""

    def holding(self, tensors: Sequence[Any]) -> Self:
        """The same file for other tensors, one of the same bytes for each storage."""
        return replace(self, tensors=tensors)
