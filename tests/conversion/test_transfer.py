"""Copying one file: its digests, whatever the pieces in which it is read."""

import random
import zlib
from pathlib import Path

import pytest

from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.storage import transfer
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.transfer import StoredFile, copy, digest
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, failing

PIECE, BLOCK = 64, 24


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and blocks of a few bytes, of which neither divides the other."""
    monkeypatch.setattr(transfer, "_PIECE", PIECE)
    monkeypatch.setattr(transfer, "CRC_BLOCK", BLOCK)


@pytest.mark.parametrize(
    ("nbytes", "records"),
    [
        (0, {}),
        (1, {0: 1}),
        (PIECE, {0: PIECE}),
        (PIECE + 1, {3: PIECE - 3}),
        (500, {0: 500}),
        (500, {7: 100, 107: 1, 120: 0, 130: 300}),
        (500, {63: 2, 127: 65, 499: 1}),
    ],
)
def test_digests_of_the_file_and_of_each_block_of_its_records(
    tmp_path: Path, nbytes: int, records: dict[int, int]
) -> None:
    """As if the whole file had been read at once; and a store that looks late into what it was given gets it right."""
    data = random.Random(nbytes).randbytes(nbytes)
    source, target, progress = LocalStorage(tmp_path), MemoryStorage(), list[int]()
    source.write("file", data)

    entry, blocks = copy(StoredFile(source, "file"), StoredFile(target, "copy"), records, progress.append)

    assert data == target.read("copy")
    assert FileEntry(nbytes, zlib.crc32(data)) == entry == digest(StoredFile(target, "copy"), progress.append)
    assert 2 * nbytes == sum(progress)
    assert blocks == {
        offset: [zlib.crc32(data[at : min(at + BLOCK, offset + size)]) for at in range(offset, offset + size, BLOCK)]
        for offset, size in records.items()
    }


def test_the_side_that_is_missing_is_named(tmp_path: Path) -> None:
    """A folder of the copy that somebody removes is not a file that the tag lost, and the reverse."""
    source, target = LocalStorage(tmp_path / "tag"), LocalStorage(tmp_path / "copy")
    source.write("file", b"x" * 500)
    gone = HookedStorage(target, failing("write_at", "file", FileNotFoundError(2, "gone", "copy/file")))
    with pytest.raises(FileNotFoundError, match="gone: 'copy/file'"):
        copy(StoredFile(source, "file"), StoredFile(gone, "file"), {}, lambda nbytes: None)
    lost = HookedStorage(source, failing("read_ranges", "file", FileNotFoundError(2, "gone", "tag/file")))
    with pytest.raises(PartNotFound, match="tag/file is missing: the tag lost files"):
        copy(StoredFile(lost, "file"), StoredFile(target, "file"), {}, lambda nbytes: None)


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path) -> None:

    def refuse(nbytes: int) -> None:
        raise OSError("no more")

    LocalStorage(tmp_path).write("file", b"x" * 500)
    target = MemoryStorage()
    with pytest.raises(OSError, match="no more"):
        copy(StoredFile(LocalStorage(tmp_path), "file"), StoredFile(target, "copy"), {}, refuse)
    assert ([], []) == (target.keys, target.unfinished)
