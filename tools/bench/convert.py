"""How fast a ZeRO-1 optimizer is converted, against copying its bytes: ``python -m tools.bench.convert --gib 4``.

Makes an optimizer sharded over dp=4, converts it for dp=3, unshards it as ``.pt`` and as safetensors, and packs its
tag, again and again, each time after a ``cp`` and ``sync`` of the same bytes. Prints medians, their ratio
to the copy's, and how much memory each took beyond an interpreter with torch.
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
from nxd_ckpt import convert

source, target, num_workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.monotonic()
{call}
print(time.monotonic() - started, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""

CALLS = {
    "convert, dp=3": "convert(source, target, to='tag', optimizer_form='zero1', dp=3, num_workers=num_workers)",
    "unshard, .pt": "convert(source, target, to='files')",
    "unshard, safetensors": "convert(source, target, to='files', use_safetensors=True)",
    "pack": "convert(source, target + '.tar')",
}


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


def convert(directory: Path, call: str, num_workers: int) -> tuple[float, float]:
    """Seconds of a conversion, durable, and the bytes that its process grew by at most."""
    code = CONVERT.replace("{call}", call)
    seconds, nbytes = map(float, run(code, directory / "saved", directory / "converted", num_workers).split())
    shutil.rmtree(directory / "converted", ignore_errors=True)
    (directory / "converted.tar").unlink(missing_ok=True)
    return seconds, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the optimizer's state in GiB (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="of all, in turn (default: 5)")
    parser.add_argument("--num_workers", type=int, default=1, help="as for the conversion (default: 1)")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    args = parser.parse_args()
    copies: list[float] = []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CALLS}
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        nbytes = make(directory, args.gib)
        os.sync()
        for _ in range(args.rounds):
            copies.append(copy(directory))
            for what, call in CALLS.items():
                found[what].append(convert(directory, call, args.num_workers))
    gib, cp = nbytes / 2**30, statistics.median(copies)
    print(f"{gib:.2f} GiB of dp=4, {args.num_workers} worker(s), durable, median of {args.rounds} rounds")
    print(f"  {'cp and sync':22}{cp:7.2f} s  {gib / cp:6.2f} GiB/s")
    for what, rounds in found.items():
        seconds, peak = statistics.median(one for one, _ in rounds), max(nbytes for _, nbytes in rounds)
        print(
            f"  {what:22}{seconds:7.2f} s  {gib / seconds:6.2f} GiB/s  {seconds / cp:5.2f} of cp  "
            f"{peak / MIB:5.0f} MiB beyond torch"
        )


if __name__ == "__main__":
    main()
