"""A bar for what takes long, on a terminal only; and lines in the log."""

import io
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Partition, Topology
from nxd_ckpt.formats.memory import copy_values
from nxd_ckpt.saving import staging
from nxd_ckpt.storage import progress
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.progress import Counter, watched
from nxd_ckpt.testing.storage import HookedStorage, chained, delaying
from tests.interop.saving import save_as_every_rank
from tests.support.terminal import Terminal

SLOWLY = (delaying("write_at", "*/model/*", 0.2), delaying("read_ranges", "*/model/*", 0.2))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes too long."""
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_BETWEEN", 0.01)


def shown(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, shown: bool = True) -> str:
    """What is written to ``stderr`` while 3 of 4 MiB are done."""
    monkeypatch.setattr("sys.stderr", stderr)
    counter = Counter()
    with watched("load", 4 * 2**20, lambda: counter.nbytes, shown):
        counter.add(3 * 2**20)
        deadline = time.monotonic() + 600
        while "load" not in stderr.getvalue() and time.monotonic() < deadline and shown and stderr.isatty():
            time.sleep(0.01)
    return stderr.getvalue()


def test_a_bar_says_how_much_is_done(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), monkeypatch)
    assert "load:  75%" in text
    assert "3.00M/4.00M" in text


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, object(), closed()], ids=["none", "of the program", "closed"])
def test_a_program_without_standard_error(stderr: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a service, of a notebook, or one that writes its own log: it saves and loads as any other."""
    monkeypatch.setattr("sys.stderr", stderr)
    loaded: dict[str, Any] = {}
    with Checkpointer(tmp_path, progress=True) as saver:
        saver.save("1", {"weight": torch.ones(2)})
        saver.load("1", loaded)
    assert [1.0, 1.0] == loaded["weight"].tolist()


@pytest.mark.parametrize("wanted", [True, False])
def test_no_bar_where_nobody_looks(impatient: None, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """Not in a log, and not where it is not wanted: not a byte, and no thread."""
    before = set(threading.enumerate())
    assert "" == shown(io.StringIO() if wanted else Terminal(), monkeypatch, shown=wanted)
    assert not set(threading.enumerate()) - before


def test_what_is_done_soon_needs_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    with watched("load", 1, lambda: 1, True):
        pass
    assert "" == stderr.getvalue()


def test_a_save_leaves_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On one rank for all of them: the tag, the bytes of all ranks, the seconds until it was visible."""
    caplog.set_level(logging.INFO, "nxd_ckpt")
    halves = [{"weight": torch.zeros(2**20)}, {"weight": torch.ones(2**20)}]
    partitions = {"weight": Partition(0, num_partitions=2)}
    topologies = [Topology(tp=2, rank=rank) for rank in range(2)]

    def what(rank: int) -> dict[str, Any]:
        return {"model": halves[rank], "partitions": partitions}

    save_as_every_rank(tmp_path, "one", topologies, what)
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert re.fullmatch(rf"saved {re.escape(str(tmp_path))}/one: 8\.0 MiB in \d+\.\d\d s", line)


def test_bars_of_a_save_and_a_load(impatient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both show one on a terminal, unless told not to."""
    state, texts = {"weight": torch.ones(2**20)}, []
    for wanted in (True, False):
        stderr = Terminal()
        monkeypatch.setattr("sys.stderr", stderr)
        slow = HookedStorage(LocalStorage(tmp_path / str(wanted)), chained(*SLOWLY))
        with Checkpointer("unused", storage=slow, progress=wanted) as checkpointer:
            checkpointer.save("one", state)
            checkpointer.load("one", state)
        texts.append(stderr.getvalue())
    assert [True, True, True] == [f"{phase}: " in texts[0] for phase in ("save", "verify", "load")]
    assert "" == texts[1]


def test_a_bar_of_the_copying(impatient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The caller waits for it, too: here the second tensor is copied once a bar shows that the first one is."""
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)

    def patient(target: torch.Tensor, source: torch.Tensor) -> None:
        deadline = time.monotonic() + 600
        while source.any() and "stage:  50%" not in stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        copy_values(target, source)

    monkeypatch.setattr(staging, "copy_values", patient)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save("one", {"first": torch.zeros(2**20), "second": torch.ones(2**20)})
    assert "stage:  50%" in stderr.getvalue()
