"""Who works on a conversion: its caller alone, workers on its host, or all ranks of a job that ask for it."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import convert
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import CheckpointError, InvalidArgument, PeerTimeout
from tests.conversion.tags import optimizers, plainly, save_example, sharded, whole
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import save_job, write_config
from tests.support.processes import run_ranks
from tests.tag.equality import difference

ROOT = Path(__file__).parents[2]

MEMBER = """
import sys
from nxd_ckpt import convert
from nxd_ckpt.errors import CheckpointError

try:
    source, target, dp_size = sys.argv[1:]
    convert(source, target, to="tag", optimizer_form="zero1", dp=int(dp_size), all_ranks=True, timeout=600)
except CheckpointError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""

JOB = """
import sys
from datetime import timedelta
import torch.distributed as dist
from nxd_ckpt import convert

everyone, source, *targets = sys.argv[1:]
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
if everyone == "yes" or dist.get_rank() == 0:
    for target in targets:
        convert(source, target, to="tag", optimizer_form="zero1", dp=3, all_ranks=everyone == "yes", timeout=600)
dist.barrier()
"""

GROWTH = """
import resource, sys, torch
from nxd_ckpt import convert

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
convert(sys.argv[1], sys.argv[2], to="tag", optimizer_form="zero1", dp=1)
print(peak() - before)
"""


def environment_of_a_job() -> dict[str, str]:
    """What torchrun tells all of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_several_workers_share_the_ranks(tmp_path: Path) -> None:
    source = save_example(tmp_path, 2, use_xser=True)

    convert(source, tmp_path / "dp5", to="tag", optimizer_form="zero1", dp=5, num_workers=2)

    cut = [sharded(whole(), 5, rank) for rank in range(5)]
    assert None is difference(plainly(cut), plainly(optimizers(tmp_path / "dp5")))


@pytest.mark.usefixtures("forked_workers")
def test_an_error_in_a_worker_is_raised(tmp_path: Path) -> None:
    source = save_example(tmp_path / "input", 2)
    shard = source / "optim" / "dp_rank_01_tp_rank_00_pp_rank_00.pt"
    shard.write_bytes(shard.read_bytes()[:-100])

    with pytest.raises(CheckpointError, match="dp_rank_01"):
        convert(source, tmp_path / "output" / "dp5", to="tag", optimizer_form="zero1", dp=5, num_workers=2)

    assert not (tmp_path / "output" / "dp5").exists()


def test_processes_that_mean_different_results_are_refused(tmp_path: Path) -> None:
    source = save_example(tmp_path / "input", 2)

    ended = run_ranks(MEMBER, *[[source, tmp_path / "output" / "dp3", dp] for dp in (3, 4)])

    assert [1, 1] == [one.returncode for one in ended]
    assert all("RanksDisagree" in one.stdout for one in ended)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("everyone", ["yes", "no"])
def test_ranks_of_a_running_job_convert_alone_or_together(tmp_path: Path, everyone: str) -> None:
    """One of them converts by itself while the others do something else; or all do together, as often as they like."""
    source = save_example(tmp_path / "input", 2)
    targets = [tmp_path / "output" / name for name in ("first", "second")]

    ended = run_ranks(JOB, *[[everyone, source, *targets]] * 2)

    assert [0, 0] == [one.returncode for one in ended]
    cut = [sharded(whole(), 3, rank) for rank in range(3)]
    assert all(difference(plainly(cut), plainly(optimizers(target))) is None for target in targets)


@pytest.mark.parametrize("known", [["WORLD_SIZE"], ["WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"]], ids=len)
def test_every_command_is_local(tmp_path: Path, known: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says of a job: no command waits for other processes."""
    job = Job(Model(heads=4))
    config = write_config(tmp_path / "config", job.model.config)
    tag = save_job(tmp_path / "run", job, job.model.state())
    trained = save_example(tmp_path / "trained", 2)
    environment = environment_of_a_job() | {"RANK": "0"}
    for name in known:
        monkeypatch.setenv(name, environment[name])

    def run(*arguments: object) -> None:
        assert 0 == main([*map(str, arguments), "--quiet"]), arguments

    out = tmp_path / "out"
    run("convert", "--to", "tag", tag, out / "resharded", "--dp", 2)
    run("convert", trained, out / "full", "--to", "tag", "--optimizer-form", "zero1_full")
    run("convert", "--to", "hf", tag, tmp_path / "hf", "--config", config)
    run("convert", "--to", "tag", "--names", "nxd", tmp_path / "hf", out / "imported")
    run("cp", tag, out / "copied")
    run("convert", "--to", "tar", tag, tmp_path / "tag.tar")
    run("convert", "--to", "files", tag, tmp_path / "unsharded")
    run("convert", "--to", "dcp", tag, tmp_path / "dcp")
    run("convert", "--to", "tag", tmp_path / "dcp", out / "from_dcp")


def test_all_ranks_need_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment tells of none, the refusal says how to start one."""
    source = save_example(tmp_path / "input", 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match="start it with torchrun"):
        convert(source, tmp_path / "output" / "full", to="tag", optimizer_form="zero1_full", all_ranks=True)


def test_a_rank_that_does_not_come_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout, as PeerTimeout; nothing is written."""
    source = save_example(tmp_path / "input", 2)
    for name, value in (environment_of_a_job() | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PeerTimeout, match="not all ranks joined"):
        convert(source, tmp_path / "output" / "full", to="tag", optimizer_form="zero1_full", all_ranks=True, timeout=1)
    assert not (tmp_path / "output").exists()


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Two shards of 80 MiB become a file of 160 MiB: less than one of them is held in memory."""
    source = _save_large(tmp_path / "input", megabytes=160)

    # Not forked: pages that are shared with another process, and then written, would count.
    command = [sys.executable, "-c", GROWTH, str(source), str(tmp_path / "output" / "dp1")]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    grown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600)

    size = (tmp_path / "output" / "dp1" / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").stat().st_size
    assert size > 160 * 2**20
    assert int(grown.stdout) < size / 2


def _save_large(directory: Path, megabytes: int) -> Path:
    import torch

    from nxd_ckpt import Topology
    from tests.interop.saving import save_as_every_rank

    rows = megabytes * 2**20 // 2 // 4096 + 1  # two moments, 4 KiB a row
    tree = {
        "state": {},
        "param_groups": [{"lr": 0.1, "params": [0]}],
        "base_state": {0: {key: torch.ones(-(-rows // 2), 1024) for key in ("exp_avg", "exp_avg_sq")}},
        "shape_info": {0: [rows, 1024]},
    }
    topologies = [Topology(dp=2, rank=rank) for rank in range(2)]
    save_as_every_rank(directory, "step_1", topologies, lambda rank: {"optimizer": tree}, durable=False)
    return directory / "step_1"
