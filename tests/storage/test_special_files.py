"""A local directory may hold what is no file: nothing blocks, and nothing outside of it is changed."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage import local_files
from nxd_ckpt.storage.base import DirEntry, can_rename
from nxd_ckpt.storage.local import LocalStorage


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # the name of a socket is short


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (Path.mkdir, "is a directory, expected a file"),
    "FIFO": (os.mkfifo, "is a FIFO, expected a file"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a file"),
    "socket": (make_socket, "is a socket, expected a file"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "leads nowhere"),
    "link to itself": (lambda path: path.symlink_to(path.name), "leads nowhere"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Whatever asks for its bytes is told what it is, at once; a listing shows it beside the others."""
    monkeypatch.chdir(tmp_path)
    make, what = KINDS[kind]
    make(tmp_path / "it")
    storage = LocalStorage(tmp_path)
    memory = memoryview(bytearray(1))
    for call in (storage.read, storage.open, lambda key: storage.read_into(key, 0, memory)):
        with pytest.raises(MalformedFile, match=f"{tmp_path}/it.*{what}"):
            call("it")
    if kind != "socket":  # stat(2) names it too
        with pytest.raises(MalformedFile, match=what):
            storage.size("it")
    assert not storage.is_file("it")
    assert [DirEntry("it", kind == "directory")] == storage.list()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """What is asked for below it is not there; a listing of it is refused."""
    storage = LocalStorage(tmp_path)
    storage.write("file", b"1")
    with pytest.raises(FileNotFoundError, match="file/below"):
        storage.read("file/below")
    with pytest.raises(MalformedFile, match="expected a directory"):
        storage.list("file")


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    """Sparse files claim any length: the limit is compared before memory is taken."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MalformedFile, match=f"has {2**40} bytes, at most {DOCUMENT} are"):
        LocalStorage(tmp_path).read("sparse")


def test_a_disk_that_is_full_when_renames_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the trial stays."""
    monkeypatch.setattr(local_files, "write_at", lambda *arguments: fail(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        can_rename(LocalStorage(tmp_path), "trial")
    assert [] == os.listdir(tmp_path)


def fail(error: OSError) -> None:
    raise error


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "/etc/passwd", "a//b", ".", "nul\0"])
def test_a_key_that_leaves_the_directory_is_refused(tmp_path: Path, key: str) -> None:
    storage = LocalStorage(tmp_path / "run")
    for call in (storage.read, storage.list, storage.is_file, storage.remove, lambda key: storage.write(key, b"")):
        with pytest.raises(MalformedFile, match="leaves the directory"):
            call(key)


def test_nothing_is_changed_through_a_link(tmp_path: Path) -> None:
    """What lies behind it is read, and stays as it is; the link itself can be moved and removed."""
    storage, outside = LocalStorage(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"1")
    storage.make_dir("")
    (tmp_path / "run" / "link").symlink_to(outside)
    for change in (
        lambda: storage.write("link/file", b"2"),
        lambda: storage.create("link/new", 1),
        lambda: storage.link_new("link/new", b"2"),
        lambda: storage.exchange("link/file", b"1", b"2"),
        lambda: storage.rename("link/file", "file"),
        lambda: storage.set_time("link/file", 1e9),
        lambda: storage.remove("link/file"),
        lambda: storage.make_dir("link"),
        lambda: storage.make_dir("link/folder"),
    ):
        with pytest.raises(OSError, match="run/link"):
            change()
    assert b"1" == storage.read("link/file")
    storage.rename("link", "moved")
    storage.remove("moved")
    assert [] == storage.list()
    assert ["file"] == os.listdir(outside)


@pytest.mark.parametrize("is_found", [False, True])
def test_directories_that_another_process_removes_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    """While they are empty: just after they were made, or just after they were found."""
    made = list[str]()

    def mkdir(path: str, real: Callable[[str], None] = os.mkdir) -> None:
        made.append(path)
        if len(made) > 1:
            real(path)
        elif is_found:
            raise FileExistsError(errno.EEXIST, "File exists", path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert LocalStorage(tmp_path).link_new("folder/file", b"content")
    assert {str(tmp_path / "folder")} == set(made)
    assert b"content" == (tmp_path / "folder" / "file").read_bytes()
