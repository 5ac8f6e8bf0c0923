"""Files to be written, as images: all of a file's layout is known before the bytes of its tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class StorageRecord:
    """One tensor's place in the file: its ``nbytes`` tight, row-major bytes belong at ``offset``."""

    __slots__ = ("nbytes", "offset", "record_name")

    record_name: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Image(Protocol):
    """A file of ``nbytes`` bytes but for its tensors' contents.

    Those go where ``storages`` says, which are in file order; ``tensors`` are what belongs there. The first
    ``tensor_nbytes`` bytes are storages with whatever stands before each.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def storages(self) -> Sequence[StorageRecord]: ...

    @property
    def tensors(self) -> Sequence[Any]: ...

    @property
    def tensor_nbytes(self) -> int: ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """(offset, bytes) of each file in this one: it may be several, one behind the other."""

    def header(self, index: int, crcs: Sequence[int]) -> tuple[int, bytes]:
        """(offset, bytes) of what lies between the storage before number ``index`` and that itself.

        ``crcs`` are the CRC-32s of the storages up to that one, which may stand in it: it can only be written once
        these are hashed. Lengths and offsets do not depend on them.
        """

    def tail(self, crcs: Sequence[int]) -> bytes:
        """Everything from ``tensor_nbytes`` on; ``crcs`` are those of all storages, in order."""

    def holding(self, tensors: Sequence[Any]) -> Image:
        """The same file for other tensors, one of the same bytes for each storage."""
