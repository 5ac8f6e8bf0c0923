"""The contract of an open file: any ranges, in any order, in few operations; it stays the file that was opened."""

import os
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxd_ckpt.storage.local import LocalStorage

DATA = os.urandom(100_000)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    (tmp_path / "file").write_bytes(DATA)
    return LocalStorage(tmp_path)


def read(storage: LocalStorage, places: list[tuple[int, int]]) -> list[bytes]:
    """What lies at each (offset, length)."""
    memories = [bytearray(length) for _, length in places]
    with closing(storage.open("file")) as reader:
        reader.read_ranges([(offset, memoryview(memory)) for (offset, _), memory in zip(places, memories, strict=True)])
    return [bytes(memory) for memory in memories]


@given(st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 10_000)), max_size=20), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ranges_are_read(storage: LocalStorage, places: list[tuple[int, int]], ascending: bool) -> None:
    """Overlapping, empty, side by side or far apart, in their order or not."""
    places = sorted(places) if ascending else places
    assert [DATA[offset : offset + length] for offset, length in places] == read(storage, places)


@pytest.mark.parametrize("hole", [0, 1, 37])
def test_many_small_ranges_share_operations(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, hole: int) -> None:
    """2,500 neighbours, with holes between them or not, are few system calls."""
    calls: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    places = [(number * (2 + hole), 2) for number in range(2500)]
    assert [DATA[offset : offset + 2] for offset, _ in places] == read(storage, places)
    assert len(calls) <= 6


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_a_system_call_that_returns_early(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    pread = os.pread

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        left = most
        for buffer in buffers:
            data = pread(fd, min(left, len(buffer)), offset)
            buffer[: len(data)] = data
            left, offset = left - len(data), offset + len(data)
        return most - left

    monkeypatch.setattr(os, "preadv", short)
    places = [(10, 9), (19, 0), (19, 5), (30, 100), (5000, 3)]
    assert [DATA[offset : offset + length] for offset, length in places] == read(storage, places)


def test_reading_beyond_the_end_is_an_eof_error(storage: LocalStorage) -> None:
    with pytest.raises(EOFError, match="file: 3 bytes missing at byte 100000"):
        read(storage, [(0, 10), (len(DATA) - 5, 8)])
