"""A host that runs out of memory or threads: an error of ours says so, and the process goes on."""

from pathlib import Path

import pytest
import torch

from nxd_ckpt import save_checkpoint
from tests.support.processes import run_program

LOADING = """
import resource, sys, threading
import torch
from nxd_ckpt import errors, load_checkpoint, save_checkpoint

torch.ones(1) + 1
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
if sys.argv[2] == "memory":
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, resource.RLIM_INFINITY))
else:
    def refuse(self):
        raise RuntimeError("can't start new thread")
    threading.Thread.start = refuse
try:
    loaded = {}
    load_checkpoint(sys.argv[1], model=loaded)
    print("loaded", len(loaded), flush=True)
    save_checkpoint(sys.argv[1], "two", loaded)
except errors.HostExhausted as error:
    print("told:", error)
"""


@pytest.mark.parametrize(("what", "expected"), [("memory", ["told"]), ("threads", ["loaded 8", "told"])])
def test_what_lacks_memory_or_threads_says_so(tmp_path: Path, what: str, expected: list[str]) -> None:
    """Neither a MemoryError nor the RuntimeErrors of torch and threading reach the user. A load needs no threads."""
    numbers = 2**22 if what == "memory" else 1  # 128 MiB
    save_checkpoint(tmp_path / "ckpt", "one", {f"w{index}": torch.ones(numbers) for index in range(8)})
    done = run_program(LOADING, tmp_path / "ckpt", what)
    assert 0 == done.returncode, done.stderr
    assert expected == [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert f"no {what} left" in done.stdout
