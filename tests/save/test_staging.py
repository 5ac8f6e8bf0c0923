"""Waves: every byte of every file exactly once, never more than the cap, cut where digests allow."""

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from threading import Event

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import CheckpointError, StagingTooLarge
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.saving.pending import Helpers
from nxd_ckpt.saving.planned_file import PlannedFile, plan_waves
from nxd_ckpt.saving.staging import Stager
from nxd_ckpt.saving.writing import FileWriter
from nxd_ckpt.storage import local_files
from nxd_ckpt.storage.arena import PAGE, Arena
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.transfer import SavePace

pytestmark = pytest.mark.both

MIB = 2**20


@pytest.fixture
def threads() -> Iterator[Executor]:
    helpers = Helpers(2, "test")
    yield helpers
    helpers.shutdown()


def planned(sizes: list[list[int]]) -> list[PlannedFile]:
    """Files of tensors of these sizes in bytes; memory is not touched."""
    return [
        PlannedFile(
            f"model/{n}.pt", image_of({f"t{i}": torch.empty(size, dtype=torch.uint8) for i, size in enumerate(s)})
        )
        for n, s in enumerate(sizes)
    ]


@given(
    st.lists(st.lists(st.integers(0, 12 * MIB), max_size=4), max_size=3),
    st.integers(CRC_BLOCK, 20 * MIB).map(lambda cap: cap // PAGE * PAGE),
)
def test_waves_hold_every_storage_once_and_fit(sizes: list[list[int]], cap: int) -> None:
    """Storages are covered without gap or overlap, spans of a wave do not overlap, and cuts lie between blocks."""
    files = planned(sizes)
    covered: dict[tuple[int, int], int] = {}
    for wave in plan_waves(files, cap):
        end = 0
        for span in wave:
            assert (span.at - span.start) % PAGE == 0
            assert span.at >= end
            end = span.at + span.stop - span.start
            image = files[span.file].image
            for number, first, last, place in span.tensors(image):
                assert first == covered.get((span.file, number), 0)
                assert first % CRC_BLOCK == 0
                assert last == image.storages[number].nbytes or span.is_part
                assert span.start + place == image.storages[number].offset + first
                covered[span.file, number] = last
        assert end <= cap
    every = {
        (number, index): storage.nbytes
        for number, file in enumerate(files)
        for index, storage in enumerate(file.image.storages)
        if storage.nbytes
    }
    assert every == {key: count for key, count in covered.items() if count}


def test_what_fits_goes_at_once() -> None:
    """One wave of whole files."""
    (wave,) = plan_waves(planned([[100, 200], [300]]), MIB)
    assert [(0, range(2)), (1, range(1))] == [(span.file, span.storages) for span in wave]


def test_a_tensor_beyond_the_cap_needs_a_block(tmp_path: Path) -> None:
    """Below 4 MiB it cannot be cut; the error names the file, both sizes and the remedy."""
    with pytest.raises(StagingTooLarge, match=rf"model/0\.pt: a tensor of {2 * MIB} bytes.*{MIB} bytes.*memory_cap"):
        plan_waves(planned([[2 * MIB]]), MIB)


class Counted(SavePace):
    """A pace that nobody has to keep to."""

    def __init__(self) -> None:
        super().__init__(1.0, Event())
        self.digested, self.written = list[int](), list[int]()

    def digest(self, nbytes: int) -> None:
        self.digested.append(nbytes)

    def write(self, nbytes: int) -> None:
        self.written.append(nbytes)


def test_progress_and_bytes_are_counted(tmp_path: Path, threads: Executor) -> None:
    """After each chunk; at the end, all bytes of all files. Each waits for the pace of digests and of writes."""
    files = planned([[1000], [2000, 3000], [5 * MIB]])
    seen: list[int] = []
    writer, pace = FileWriter(LocalStorage(tmp_path), "tag", files, seen.append, threads), Counted()
    for wave in plan_waves(files, 6 * MIB):
        writer.write(wave, Stager(Arena(6 * MIB)).stage(files, wave), pace)
    writer.finish()
    assert [1000, 2000, 3000, MIB, 4 * MIB] == sorted(pace.digested)
    assert sorted(filter(None, seen)) == sorted(pace.written)
    assert writer.nbytes == sum(seen) == sum(file.image.nbytes for file in files)
    assert writer.nbytes == sum(path.stat().st_size for path in tmp_path.rglob("*.pt"))


def test_abort_leaves_no_file_open_or_behind(tmp_path: Path, threads: Executor) -> None:
    """What was begun is removed: it must not be taken for a file that was finished."""
    files = planned([[9 * MIB]])
    writer = FileWriter(LocalStorage(tmp_path), "tag", files, lambda nbytes: None, threads)
    wave, *_ = plan_waves(files, 4 * MIB)
    writer.write(wave, Stager(Arena(4 * MIB)).stage(files, wave))
    writer.abort()
    assert [] == list(tmp_path.rglob("*.pt"))


def test_a_file_that_cannot_be_synced_later_is_named_and_removed(
    tmp_path: Path, threads: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at the end at the latest; a file that was closed stays."""
    monkeypatch.setattr(local_files, "sync_file", lambda fd: _fail(os.readlink(f"/proc/self/fd/{fd}")))
    files = planned([[1000], [2000]])
    writer = FileWriter(LocalStorage(tmp_path), "tag", files, lambda nbytes: None, threads, closes_later=True)
    for wave in ([span] for span in plan_waves(files, MIB)[0]):
        writer.write(wave, Stager(Arena(MIB)).stage(files, wave))
    with pytest.raises(CheckpointError, match=r"writing model/1\.pt: OSError: the disk failed"):
        writer.finish()
    writer.abort()
    assert {"0.pt"} == {path.name for path in tmp_path.rglob("*.pt")}


def _fail(path: str) -> None:
    if path.endswith("1.pt"):
        raise OSError("the disk failed")
