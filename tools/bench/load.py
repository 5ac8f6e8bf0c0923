"""What a load on other sizes costs: ``python -m tools.bench.load --gib 4``.

Makes a ZeRO-1 optimizer sharded over dp=4 and loads it as each rank of dp=3 would, in a process of its own: seconds,
the bytes that were read against those that are needed, and memory beyond the loaded state itself.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from tools.bench.convert import make, run

LOAD = """
import resource, sys, time, torch
from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage

nbytes = 0

def count(operation):
    global nbytes
    nbytes += operation.nbytes

def size(tree):
    return sum(tensor.nbytes for entry in tree["base_state"].values() for tensor in entry.values()
               if isinstance(tensor, torch.Tensor))

directory, rank, verify = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
storage = HookedStorage(LocalStorage(directory), count)
checkpointer = Checkpointer(directory, topology=Topology(dp=3, rank=rank), storage=storage)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
state = {}
started = time.monotonic()
checkpointer.load("saved", optimizer=state, verify=verify)
seconds = time.monotonic() - started
wanted = size(state)
print(seconds, nbytes / wanted, wanted, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before - wanted)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the optimizer (default: %(default)s)")
    parser.add_argument("--directory", help="where to work, on the disk to be measured (default: a temporary one)")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench_load_", dir=args.directory))
    try:
        nbytes = make(directory, args.gib)
        print(f"{nbytes / 2**30:.2f} GiB of moments, dp=4 -> dp=3, each rank alone; medians of the three ranks")
        for verify in (True, False):
            rows = [[float(word) for word in run(LOAD, directory, rank, verify).split()] for rank in range(3)]
            seconds, times, wanted, beyond = (statistics.median(column) for column in zip(*rows, strict=True))
            print(
                f"verify={verify!s:5}  {seconds:6.2f} s  {seconds / (wanted / 2**30):5.2f} s/GiB  reads {times:.3f} of "
                f"what it needs  memory beyond the state {beyond / 2**20:.0f} MiB"
            )
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
