"""How fast a ZeRO-1 optimizer is converted, against copying its bytes: ``python -m tools.bench.convert --gib 4``.

Makes an optimizer sharded over dp=4, converts it for dp=3 again and again, each time after a ``cp`` and ``sync`` of the
same bytes, and prints medians, their ratio, and how much memory a conversion took beyond an interpreter with torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

MIB = 2**20
COLUMNS = 4096
PARAMETER = 32 * MIB
"""Bytes of a parameter's fp32 moments each: rows of 16 KiB, their number divided neither by 3 nor by 4."""

MAKE = """
import sys, torch
from nxd_ckpt import Topology, finalize_checkpoint, save_checkpoint

directory, count, rows, columns = sys.argv[1], *map(int, sys.argv[2:])
shard = -(-rows // 4)
for rank in range(4):
    state = {i: {"step": 10, "exp_avg": torch.rand(shard, columns), "exp_avg_sq": torch.rand(shard, columns)}
             for i in range(count)}
    shapes = {i: [rows, columns] for i in range(count)}
    groups = [{"lr": 1e-3, "betas": [0.9, 0.95], "params": list(range(count))}]
    tree = {"state": {}, "param_groups": groups, "base_state": state, "shape_info": shapes}
    place = Topology(dp=4, rank=rank)
    save_checkpoint(directory, "saved", optimizer=tree, topology=place, run_id="make", async_save=True)
finalize_checkpoint()
"""

CONVERT = """
import resource, sys, time, torch
from nxd_ckpt.convert import convert_zero1

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.monotonic()
convert_zero1(sys.argv[1], sys.argv[2], convert_to_sharded=True, dp_size=3, num_workers=int(sys.argv[3]))
print(time.monotonic() - started, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def run(code: str, *arguments: object) -> str:
    """The output of ``code`` in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout


def make(directory: Path, gib: float) -> int:
    """An optimizer of about ``gib`` GiB in the tag ``saved``; the bytes of its files."""
    rows = PARAMETER // 4 // COLUMNS + 1
    run(MAKE, directory, max(1, round(gib * 2**30 / (2 * PARAMETER))), rows, COLUMNS)
    return sum(path.stat().st_size for path in (directory / "saved" / "optim").rglob("*.pt"))


def copy(directory: Path) -> float:
    """Seconds that ``cp`` and ``sync`` take for the optimizer's files."""
    target = directory / "copied"
    started = time.monotonic()
    subprocess.run(["cp", "-r", str(directory / "saved" / "optim"), str(target)], check=True)
    subprocess.run(["sync"], check=True)
    seconds = time.monotonic() - started
    shutil.rmtree(target)
    return seconds


def convert(directory: Path, num_workers: int) -> tuple[float, float]:
    """Seconds of a conversion, durable, and the bytes that its process grew by at most."""
    seconds, nbytes = map(float, run(CONVERT, directory / "saved", directory / "converted", num_workers).split())
    shutil.rmtree(directory / "converted")
    return seconds, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the optimizer's state in GiB (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="of both, in turn (default: 5)")
    parser.add_argument("--num_workers", type=int, default=1, help="as for the conversion (default: 1)")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        nbytes = make(directory, args.gib)
        os.sync()
        copies, conversions, peaks = [], [], []
        for _ in range(args.rounds):
            copies.append(copy(directory))
            seconds, peak = convert(directory, args.num_workers)
            conversions.append(seconds)
            peaks.append(peak)
    cp, converted = statistics.median(copies), statistics.median(conversions)
    print(f"{nbytes / 2**30:.2f} GiB, dp=4 to dp=3, {args.num_workers} worker(s), median of {args.rounds} rounds")
    print(f"  cp and sync       {cp:7.2f} s  {nbytes / 2**30 / cp:6.2f} GiB/s")
    print(f"  convert, durable  {converted:7.2f} s  {nbytes / 2**30 / converted:6.2f} GiB/s")
    print(f"  ratio             {converted / cp:7.2f}")
    print(f"  memory beyond torch {max(peaks) / MIB:5.0f} MiB in the main process")


if __name__ == "__main__":
    main()
