"""``nxd-ckpt selftest`` on the CPU, a device that stands for neuron, and XLA; failures, and what cannot be tested."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt.cli.main import main
from nxd_ckpt.examine import selftest as selftest_module
from nxd_ckpt.examine.selftest import CheckResult, merged, page_lines, safe_environment
from tests.cli.reference import steady
from tests.device import neuron_device
from tests.device.forked_selftest import Before, ForkedRank
from tests.docs.markdown import DOCS
from tests.support.mounts import needs_mounts
from tests.support.processes import heed_ctrl_c

HARDWARE = DOCS / "hardware.md"


class Outcome:
    """What a self-test printed and left behind."""

    def __init__(self, code: int, directory: Path, report: Path, printed: str) -> None:
        self.code, self.printed = code, printed
        self.left = sorted(path.name for path in directory.iterdir())
        self.document: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}

    def names(self, outcome: str) -> list[str]:
        return [result["name"] for result in self.document["results"] if result["outcome"] == outcome]

    def result(self, name: str) -> dict[str, Any]:
        (found,) = (result for result in self.document["results"] if result["name"] == name)
        return found


class SelfTests:
    """Runs the command in this process, with forked ranks."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory, self.capsys, self.monkeypatch = tmp_path / "run1", capsys, monkeypatch
        self.directory.mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("RANK", raising=False)

    def __call__(self, *arguments: str, before: Before | None = None, directory: str = "run1") -> Outcome:
        self.monkeypatch.setattr(selftest_module, "_spawned", partial(ForkedRank, before=before))
        try:
            code = main(["selftest", "--size", "0.25", *arguments, directory])
        except SystemExit as usage:
            code = int(str(usage.code))
        report = self.directory.parent / "nxd-ckpt-selftest.json"
        output = self.capsys.readouterr()
        return Outcome(code, self.directory, report, output.out + output.err)


@pytest.fixture
def selftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SelfTests:
    return SelfTests(tmp_path, monkeypatch, capsys)


def require_well(outcome: Outcome, not_possible: list[str]) -> None:
    """All is well; only what this device has no use for was left out. Nothing is left, and the page fits."""
    assert [] == outcome.names("failed"), [result["traceback"] for result in outcome.document["results"]]
    assert not_possible == outcome.names("not possible here")
    assert 0 == outcome.code
    assert [] == outcome.left
    assert [] == [line for line in outcome.printed.splitlines() if len(line) > 80]


def shown(page: str) -> str:
    """A page without what differs between two runs: numbers, their units, torch's build, and where its lines break for
    them."""
    return re.sub("[KM]iB", "MiB", re.sub(r"(torch [^ ;+]+)\+\w+", r"\1", " ".join(steady(page).split())))


def documented() -> str:
    """The page that docs/hardware.md shows."""
    text = HARDWARE.read_text()
    begin = text.index("$ nxd-ckpt selftest --device cpu ")
    return text[text.index("\n", begin) + 1 : text.index("```", begin)]


def test_all_is_well_on_the_cpu(selftest: SelfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks; the page is that of the documentation. The report has what a maintainer asks for, and no secret."""
    monkeypatch.setenv("NEURON_TOKEN", "hidden-value")
    outcome = selftest("--device", "cpu")
    require_well(outcome, ["transfers", "compilations"])
    page = outcome.printed.replace(str(selftest.directory), "/fsx/run1")
    assert shown(documented()) == shown(page), outcome.result("versions")["detail"].split("; ")[0]
    assert outcome.result("versions")["facts"]["versions"]["torch"]
    assert {"bfloat16", "float32", "int64", "bool"} <= set(outcome.result("dtypes")["facts"]["dtypes"])
    assert "SaveFailed" in outcome.result("kill")["facts"]["told"]
    assert {"stall_seconds", "raw_copy_seconds", "raw_write_seconds"} <= outcome.result("speed")["facts"].keys()
    assert "hidden-value" not in json.dumps(outcome.document)


@pytest.mark.skipif(
    not neuron_device.can_be_built(), reason="g++, which builds the device that stands for neuron, is not installed"
)
def test_all_is_well_on_a_device(selftest: SelfTests, request: pytest.FixtureRequest) -> None:
    """One that torch knows by its registration alone, without a process group that takes its tensors."""
    assert request.config.cache is not None
    library = neuron_device.built(request.config.cache.mkdir("neuron_device"))
    outcome = selftest("--device", "neuron", before=partial(neuron_device.register, library))
    require_well(outcome, ["compilations"])
    assert "made up, as no process group takes its tensors" in " ".join(outcome.printed.split())
    assert {"pinned_memory": False, "events": True} == outcome.result("transfers")["facts"]


@pytest.mark.xla
def test_all_is_well_on_xla(selftest: SelfTests) -> None:
    """ZeRO-1, in plain files and xser, in emulation."""
    outcome = selftest("--device", "xla")
    require_well(outcome, ["transfers"])
    assert {"in save and load": 0, "in the step after": 0} == outcome.result("compilations")["facts"]


def broken() -> None:
    """Break this rank: a storage that lets everybody win, and rank 1 is gone in the middle of the last check."""
    from nxd_ckpt.storage.local import LocalStorage
    from nxd_ckpt.testing import selftest

    def exchange(self: LocalStorage, key: str, expected: bytes, data: bytes) -> bool:
        return True

    def raw_write(rank: selftest.Rank, data: memoryview) -> None:
        if rank.number == 1:
            print("lost its device", flush=True)
            os._exit(3)

    LocalStorage.exchange = exchange  # type: ignore[method-assign]
    selftest._raw_write = raw_write


def test_what_fails_is_named(selftest: SelfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other checks go on, also where a rank has died; the report has what it printed."""
    monkeypatch.setattr(selftest_module, "_GRACE", 0.1)
    outcome = selftest("--device", "cpu", before=broken)
    assert 1 == outcome.code
    assert {"storage", "speed"} <= set(outcome.names("failed"))
    assert {"versions", "dtypes"} <= set(outcome.names("ok"))
    assert "one of many may replace" in outcome.result("storage")["detail"]
    assert "lost its device" in outcome.result("speed")["detail"]
    assert "lost its device" in outcome.document["logs"]["checks-1"]
    assert [] == outcome.left
    assert " checks failed (" in " ".join(outcome.printed.split())


@pytest.mark.parametrize(
    ("arguments", "directory", "reason"),
    [
        (["--device", "mars"], "run1", "device mars: torch"),
        (["--device", "cuda"], "run1", "device cuda: torch"),
        (["--ranks", "1"], "run1", "needs 2 ranks or more, found 1"),
        (["--size", "1e11"], "run1", "--size measures with less"),
        (["--size", "0"], "run1", "--size must be more than 0"),
        ([], "absent", "no such directory"),
        ([], "/proc", "/proc: nothing can be written there"),
        ([], "nonsense://x/y", "nonsense"),
    ],
)
def test_what_cannot_be_tested_is_said(selftest: SelfTests, arguments: list[str], directory: str, reason: str) -> None:
    """In one sentence, with exit code 2 and without a report."""
    outcome = selftest(*arguments, directory=directory)
    assert reason in outcome.printed
    assert "Traceback" not in outcome.printed
    assert (2, [], {}) == (outcome.code, outcome.left, outcome.document)


@needs_mounts()
@pytest.mark.parametrize(("option", "reason"), [("ro", "Read-only file system"), ("size=4m", "4.0 MiB are free")])
def test_a_mount_that_takes_nothing_is_refused(selftest: SelfTests, option: str, reason: str) -> None:
    """Read-only, or too small."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(selftest.directory)], check=True)
    try:
        outcome = selftest()
        assert reason in outcome.printed
        assert (2, []) == (outcome.code, outcome.left)
    finally:
        subprocess.run(["umount", str(selftest.directory)], check=True)


def test_xla_without_torch_xla_is_refused(selftest: SelfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_module, "find_spec", lambda name: None)
    outcome = selftest("--device", "xla")
    assert "torch_xla cannot be imported" in outcome.printed
    assert 2 == outcome.code


def test_one_rank_of_torchrun_is_too_few(selftest: SelfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    outcome = selftest("--ranks", "2")
    assert "needs 2 ranks or more, found 1" in outcome.printed
    assert 2 == outcome.code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_ranks_and_removes_all(tmp_path: Path, number: signal.Signals) -> None:
    """With the exit code of the signal."""
    program = [sys.executable, "-m", "nxd_ckpt.cli", "selftest", "--device", "cpu", str(tmp_path)]
    with subprocess.Popen(program, start_new_session=True, stderr=subprocess.PIPE, preexec_fn=heed_ctrl_c) as command:
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        deadline = time.monotonic() + 600
        while len(ranks := children.read_text().split()) < 2:
            assert command.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        command.send_signal(number)
        assert 128 + number == command.wait(600)
    # One that was being started ends by itself: its pipe has closed.
    while any(Path(f"/proc/{rank}/exe").exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [] == list(tmp_path.iterdir())


def test_a_failure_of_its_own_comes_before_one_of_another_rank() -> None:
    """The first rank with a traceback is named, though another reported that it was left alone."""
    left = CheckResult("tp", "failed", "rank 1 ended it before")
    cause = CheckResult("tp", "failed", "no space", traceback="Traceback ...")
    assert "rank 1: no space" == merged([left, cause]).detail
    assert "rank 0: rank 1 ended it before" == merged([left, left]).detail


def test_a_page_fits_whatever_is_in_it() -> None:
    """Lines break at spaces; what has none stays in one piece."""
    path = "/" + "x" * 100
    result = {"name": "tp", "outcome": "failed", "detail": f"{path} " + "word " * 40}
    document = {"directory": "/fsx", "device": "cpu", "ranks": 2, "seconds": 1.0, "results": [result]}
    lines = list(page_lines(document))
    assert {path} == {line.strip() for line in lines if len(line) > 80}


def test_a_report_holds_no_secret() -> None:
    """Names that may hide one are there, their values are not; what has nothing to do with the device is left out."""
    found = safe_environment(
        {
            "NEURON_CC_FLAGS": "--model-type=transformer",
            "NEURON_API_KEY": "hidden",
            "PJRT_DEVICE": "NEURON",
            "XLA_PROXY": "http://user:hidden@host/",
            "AWS_SECRET_ACCESS_KEY": "hidden",
            "HOME": "/root",
        }
    )
    assert "hidden" not in str(found)
    assert {"NEURON_CC_FLAGS", "NEURON_API_KEY", "PJRT_DEVICE", "XLA_PROXY"} == found.keys()
    assert "--model-type=transformer" == found["NEURON_CC_FLAGS"]
