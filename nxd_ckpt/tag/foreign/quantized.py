"""Quantized tensors of Hugging Face's files, read as if they were there in plain numbers.

Each has two parts, numbers and scales. Its plain numbers seem to be the content of a file of its own, which is computed
where it is read, in parts of a few MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Protocol

from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.storage.base import Reader, Storage
from nxd_ckpt.storage.wrapper import StorageWrapper


class QuantizedWeight(Protocol):
    """A tensor that files hold as ``numbers`` and ``scales``."""

    @property
    def numbers(self) -> TensorStub: ...

    @property
    def scales(self) -> TensorStub: ...

    def stub(self, file: str) -> TensorStub:
        """Return the stub of the plain tensor, as the only content of ``file``."""

    def reader(self, numbers: Reader, scales: Reader) -> Reader:
        """Return a reader of that file, which closes the readers of the parts' files."""


class PartsReader:
    """Base class of readers of plain numbers: it keeps and closes the readers of the two parts."""

    def __init__(self, numbers: Reader, scales: Reader) -> None:
        self.numbers, self.scales = numbers, scales

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.numbers.close()
        self.scales.close()


class DequantizedStorage(StorageWrapper):
    """Storage that seems to hold a file of each added tensor, with its plain numbers."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._weights: dict[str, tuple[QuantizedWeight, str, str]] = {}

    def add(self, key: str, numbers: str, scales: str, weight: QuantizedWeight) -> None:
        """Register ``key`` as the file of ``weight``, whose parts are in the files ``numbers`` and ``scales``."""
        self._weights[key] = weight, numbers, scales

    def open(self, key: str) -> Reader:
        if key not in self._weights:
            return self.inner.open(key)
        weight, numbers, scales = self._weights[key]
        return weight.reader(self.inner.open(numbers), self.inner.open(scales))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, buffer)])
