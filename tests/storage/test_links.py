"""A local directory on a file system without hard links still writes a name only if it is free."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.local_files import LocalWriter


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    """Where link(2) is not supported."""

    def link(source: object, target: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    return LocalStorage(tmp_path)


def test_of_several_that_try_at_once_one_succeeds(storage: LocalStorage) -> None:
    for number in range(20):
        start, won = threading.Barrier(4), list[int]()

        def take(who: int, name: str = str(number), start: threading.Barrier = start, won: list[int] = won) -> None:
            start.wait()
            if storage.link_new(name, b"%d" % who):
                won.append(who)

        threads = [threading.Thread(target=take, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [b"%d" % who for who in won] == [storage.read(str(number))]


def at_the_second_file(patched: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """When it is complete: the first has the content, beside the name; the second has the name."""
    closed, close = [0], LocalWriter.close

    def counted(writer: LocalWriter) -> None:
        closed[0] += 1
        if closed[0] == 2:
            happens()
        close(writer)

    patched.setattr(LocalWriter, "close", counted)


def test_a_name_that_cannot_be_filled_is_free_again(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was claimed, and then not written, must not pass for a file."""

    def fails() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        at_the_second_file(patched, fails)
        with pytest.raises(OSError, match="Input/output"):
            storage.link_new("done", b"1")
    assert storage.link_new("done", b"2")


def test_who_stood_still_replaces_nothing(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was taken for dead while it claimed a name finds out that another has it now."""

    def taken_over() -> None:
        storage.remove("lease")
        storage.write("lease", b"of another")

    with monkeypatch.context() as patched:
        at_the_second_file(patched, taken_over)
        assert not storage.link_new("lease", b"of one")
    assert storage.read("lease") == b"of another"
