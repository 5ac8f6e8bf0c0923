"""``python -m nxd_ckpt.emulation`` runs an unchanged script, and ends the ranks together."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt.emulation import child
from nxd_ckpt.emulation.launcher import launch
from tests.support.processes import FORKED

pytestmark = pytest.mark.xla

SCRIPT = """
import sys
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from helper import NAME          # beside the script

def main(index):
    dist.init_process_group("xla", init_method="xla://")
    total = xm.all_reduce(xm.REDUCE_SUM, one()).item()
    sys.stdout.write(f"{NAME} {index} {total}\\n")   # at once: the ranks share the pipe
    sys.stdout.flush()
    dist.barrier()

def one():
    import torch
    return torch.ones((), device=torch_xla.device())

if __name__ == "__main__":
    torch_xla.launch(main)
"""


def test_script_runs_unchanged_on_every_rank(tmp_path: Path) -> None:
    """Each rank's own stdout passes through untouched, and success is exit code 0."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("NAME = 'rank'")
    command = [sys.executable, "-m", "nxd_ckpt.emulation", "--nproc", "2", str(tmp_path / "train.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (0, ["rank 0 2.0", "rank 1 2.0"]) == (result.returncode, sorted(result.stdout.splitlines()))


LATE = """
import atexit, os, sys, time
from pathlib import Path

mark = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 1.0)     # a rank may take its time to end
    atexit.register(mark.touch)
    sys.exit(7)
while not mark.exists():
    time.sleep(0.01)
raise RuntimeError("because rank 1 went away")
"""


class ForkedRank:
    """As much of a ``subprocess.Popen`` as the launcher uses, forked in milliseconds."""

    def __init__(self, arguments: list[str], env: dict[str, str], pass_fds: Sequence[int], **_: Any) -> None:
        self._process = FORKED.Process(target=_run_rank, args=(arguments[5:], env, tuple(map(_Sent, pass_fds))))
        self._process.start()
        self.kill = self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, number)


class _Sent:
    """A file descriptor that goes along."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self.fd),)


def _detached(sent: Any) -> int:
    fd: int = sent.detach()
    return fd


def _run_rank(command: list[str], environment: dict[str, str], descriptors: tuple[int, int]) -> None:
    os.environ.update(environment)
    child.main(*descriptors, command)


def test_the_rank_that_failed_first_counts_though_another_ends_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What fails because of it is not what the run ends with."""
    (tmp_path / "late.py").write_text(LATE)
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    assert 7 == launch(2, [str(tmp_path / "late.py"), str(tmp_path / "mark")])
    assert "rank 1 ended with exit code 7" in capfd.readouterr().err
