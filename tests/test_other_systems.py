"""Windows and macOS, as far as Linux can show it: without what these lack, everything but saving works."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from nxd_ckpt import Partition, Topology
from nxd_ckpt.coordination.lease import Lease
from tests.docs.markdown import REPOSITORY
from tests.interop.saving import save_as_every_rank


def test_without_what_linux_alone_has(tmp_path: Path) -> None:
    """Every module is imported, tags are read, verified, converted and packed; a save says what it lacks."""
    whole = torch.arange(24.0).reshape(6, 4)
    save_as_every_rank(
        tmp_path / "run",
        "step_1",
        [Topology(tp=2, rank=rank) for rank in range(2)],
        lambda rank: {"model": {"w": whole.chunk(2)[rank]}, "partitions": {"w": Partition(0, num_partitions=2)}},
    )
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "tests.support.bare_system", str(tmp_path / "run"), str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "USER": "someone"}

    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)

    assert (0, "all of it works") == (done.returncode, done.stdout.rpartition("\n")[0].rpartition("\n")[2]), done.stderr


def test_a_holder_whose_start_is_not_known_is_not_dead() -> None:
    """Where /proc does not tell which processes run (macOS), a lease is judged by its heartbeat."""
    mine = Lease.of_this_process("run")
    assert True is mine.holder_runs_here()
    assert None is Lease("run", mine.host, mine.pid, born="").holder_runs_here()
