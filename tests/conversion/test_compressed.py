"""Compressed archives: unpacked once for all processes of a host, as a whole or not at all, and never beyond limits."""

import bz2
import gzip
import io
import lzma
import shutil
import signal
import tarfile
import tracemalloc
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import zstandard

from nxd_ckpt import convert, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.errors import CorruptCheckpoint, InvalidArgument
from nxd_ckpt.storage import archive_unpacking
from nxd_ckpt.storage.urls import open_storage
from tests.conversion.tags import model, save_example
from tests.support.processes import run_program
from tests.tag.equality import difference

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".tar.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".tgz": gzip.compress,
    ".tar.bz2": bz2.compress,
    ".tar.xz": lzma.compress,
    ".tar.lzma": partial(lzma.compress, format=lzma.FORMAT_ALONE),
}
DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".tar.zst": lambda data: zstandard.ZstdDecompressor().decompress(data),
    ".tgz": gzip.decompress,
    ".tar.bz2": bz2.decompress,
    ".tar.xz": lzma.decompress,
    ".tar.lzma": lzma.decompress,
}

KILLED = """
import os, signal, sys, tempfile
from nxd_ckpt.storage import archive_unpacking
from nxd_ckpt.storage.urls import open_storage

def dying(*given):
    yield bytes(2000)
    os.kill(os.getpid(), signal.SIGKILL)

archive_unpacking.decompressed, tempfile.tempdir = dying, sys.argv[2]
open_storage(sys.argv[1]).list()
"""


def tree(work_dir: Path) -> list[str]:
    """The files of unpacked archives that are there, locks left out."""
    return sorted(path.name for path in work_dir.rglob("*") if path.is_file() and "lock" not in path.name)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_it_is_the_plain_archive_compressed(tmp_path: Path, suffix: str) -> None:
    """The same bytes each time; other programs find the plain archive in it."""
    tag = save_example(tmp_path, 1)
    for name in ("one.tar", f"one{suffix}", f"two{suffix}"):
        convert(tag, tmp_path / name, to="tar")
    packed = (tmp_path / f"one{suffix}").read_bytes()
    assert packed == (tmp_path / f"two{suffix}").read_bytes()
    assert (tmp_path / "one.tar").read_bytes() == DECOMPRESS[suffix](packed)


def test_archives_of_other_programs_are_read(tmp_path: Path, work_dir: Path) -> None:
    """Of several frames or members, as parallel compressors write them, also ones that hold no data."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(save_example(tmp_path, 1), "./step_3")
    plain, skipped = data.getvalue(), b"\x50\x2a\x4d\x18\x05\x00\x00\x00hello"
    for suffix, pack in COMPRESS.items():
        between = skipped if suffix == ".tar.zst" else b""
        (tmp_path / f"x{suffix}").write_bytes(between + pack(plain[:5000]) + between + pack(plain[5000:]))
        state: dict[str, Any] = {}
        load_checkpoint(tmp_path / f"x{suffix}", model=state)
        assert None is difference(model(), state)


@pytest.mark.parametrize(("written", "name"), [(".tar", "x.tar.gz"), (".tgz", "x.tar"), (".tar.zst", "x.tar.xz")])
def test_its_bytes_tell_how_it_is_compressed(tmp_path: Path, work_dir: Path, written: str, name: str) -> None:
    """Not its name, which a browser or a script may have changed: it was called truncated."""
    convert(save_example(tmp_path, 1), tmp_path / f"packed{written}", to="tar")
    state: dict[str, Any] = {}
    load_checkpoint((tmp_path / f"packed{written}").rename(tmp_path / name), model=state)
    assert None is difference(model(), state)


def test_an_archive_goes_through_a_store(work_dir: Path) -> None:
    """Packed into it, and loaded from there; nothing of the packing stays on this host."""
    store = f"memory://{uuid.uuid4().hex}"
    save_checkpoint(f"{store}/run", "step_1", model(), run_id="one")
    before = tree(work_dir)
    done = convert(f"{store}/run/step_1", f"{store}/packed/one.tar.zst", to="tar")
    assert before == tree(work_dir)
    assert done.nbytes == fsspec.filesystem("memory").size(f"{store.removeprefix('memory:/')}/packed/one.tar.zst")
    state: dict[str, Any] = {}
    load_checkpoint(f"{store}/packed/one.tar.zst", model=state)
    assert None is difference(model(), state)


def test_it_is_unpacked_once(tmp_path: Path, work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all that open it, at once or later; anew when it changed; and the one before goes when nobody has it open."""
    unpacked: list[str] = []
    decompressed = archive_unpacking.decompressed

    def counting(kind: str, pieces: Any, where: str) -> Any:
        unpacked.append(Path(where).name)
        return decompressed(kind, pieces, where)

    monkeypatch.setattr(archive_unpacking, "decompressed", counting)
    one, two = tmp_path / "one.tgz", tmp_path / "two.tgz"
    convert(save_example(tmp_path, 1), one, to="tar")
    with ThreadPoolExecutor(4) as threads:
        assert 4 * [["step_3"]] == [
            [entry.name for entry in found] for found in threads.map(lambda _: open_storage(one).list(), range(4))
        ]
    kept = open_storage(one)
    assert kept.is_dir("step_3")
    assert ["one.tgz"] == unpacked
    convert(tmp_path / "step_3", two, to="tar")
    assert open_storage(two).is_dir("step_3")
    assert ["archive.tar", "archive.tar"] == tree(work_dir)  # both: one is open
    assert kept.read("step_3/done") == open_storage(one).read("step_3/done")
    del kept
    convert(save_example(tmp_path, 1, "step_4", step=4), one, to="tar", overwrite=True)
    assert open_storage(one).is_dir("step_4")
    assert ["one.tgz", "two.tgz", "one.tgz"] == unpacked
    assert ["archive.tar"] == tree(work_dir)


def test_what_a_killed_process_began_does_not_count(tmp_path: Path, work_dir: Path) -> None:
    """The next one unpacks all of it."""
    archive = tmp_path / "one.tar.gz"
    convert(save_example(tmp_path, 1), archive, to="tar")
    assert -signal.SIGKILL == run_program(KILLED, archive, work_dir).returncode
    assert ["part"] == tree(work_dir)
    assert "step_3" == open_checkpoint(archive).tag
    assert ["archive.tar"] == tree(work_dir)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_damage_is_one_clear_error(tmp_path: Path, work_dir: Path, suffix: str) -> None:
    """Truncated anywhere, of no kind, or a hostile archive inside; nothing stays of it."""
    convert(save_example(tmp_path, 1), tmp_path / f"one{suffix}", to="tar")
    data, archive = (tmp_path / f"one{suffix}").read_bytes(), tmp_path / f"x{suffix}"
    cut = [data[:length] for length in (*range(0, len(data), len(data) // 9), len(data) - 1)]
    other = [b"neither" * 99, data + b"trailing"]
    for damaged in cut + other:
        archive.write_bytes(damaged)
        with pytest.raises(CorruptCheckpoint, match=f"x{suffix}: not a whole [a-z]+2? file: .*restore it"):
            open_checkpoint(archive)
        assert [] == tree(work_dir)
    hostile = io.BytesIO()
    with tarfile.open(fileobj=hostile, mode="w") as members:
        members.addfile(tarfile.TarInfo("../../outside"))
    archive.write_bytes(COMPRESS[suffix](hostile.getvalue()))
    with pytest.raises(CorruptCheckpoint, match="lies outside"):
        open_checkpoint(archive)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_no_changed_bit_goes_unnoticed(tmp_path: Path, work_dir: Path, suffix: str) -> None:
    """But for those that mean nothing: what is read, if anything, is what was packed."""
    convert(save_example(tmp_path, 1), tmp_path / f"one{suffix}", to="tar")
    data = (tmp_path / f"one{suffix}").read_bytes()
    kind, plain, refused = archive_unpacking.SUFFIXES[suffix], DECOMPRESS[suffix](data), 0
    positions = range(0, len(data), 23)
    for at in positions:
        changed = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        try:
            assert plain == b"".join(archive_unpacking.decompressed(kind, [memoryview(changed)], "x"))
        except CorruptCheckpoint:
            refused += 1
    assert refused > 0.9 * len(positions)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_bomb_is_refused(
    tmp_path: Path, work_dir: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more is written than the limit, and memory stays small, whatever it holds; a full disk is told too."""
    monkeypatch.setattr(archive_unpacking, "LEAST", 2**20)
    bomb = tmp_path / f"bomb{suffix}"
    bomb.write_bytes(COMPRESS[suffix](bytes(100 * 2**20)))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match=r"more than .* of content.*decompress it first"):
            open_checkpoint(bomb)
        assert tracemalloc.get_traced_memory()[1] < 80 * 2**20
    finally:
        tracemalloc.stop()
    assert [] == tree(work_dir)
    monkeypatch.setattr(archive_unpacking, "RATIO", 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(OSError, match="set TMPDIR"):
        open_checkpoint(bomb)
    assert [] == tree(work_dir)


def test_zstandard_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, packing and reading name it; nothing was begun."""
    monkeypatch.setattr(archive_unpacking, "find_spec", lambda _: None)
    (tmp_path / "some.tar.zst").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"pip install zstandard"):
        open_checkpoint(tmp_path / "some.tar.zst")
    with pytest.raises(InvalidArgument, match=r"pip install zstandard"):
        convert(save_example(tmp_path, 1), tmp_path / "new.tar.zst", to="tar")
    assert ["some.tar.zst"] == [path.name for path in tmp_path.iterdir() if "tar" in path.name]
