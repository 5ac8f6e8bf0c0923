"""What ``nxd-ckpt report`` costs: ``python -m tools.bench.statistics --mib 512 --tags 100 --tensors 1000``.

Counts a tag's tensors again and again, of float32 and of bfloat16, each time after the same files were read with plain
preads by one thread, and by as many as there are processors; from the page cache, and with the files dropped from it
before. Printed are medians, and the ratio to each reading, round by round; processor seconds say more than wall seconds
where others use the machine. Then makes a directory of many small tags, whose numbers are kept, and times the command
as a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from nxd_ckpt import Checkpointer, open_checkpoint
from nxd_ckpt.examine.statistics import count_anew
from tools.bench.convert import ENVIRONMENT, MIB
from tools.bench.host import cache, evict, make_durable
from tools.bench.results import ratios

TENSOR = 32 * MIB
PIECE = 4 * MIB
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make(directory: Path, mib: int) -> None:
    """A tag of each dtype, named after it."""
    with Checkpointer(directory) as saver:
        for name, dtype in DTYPES.items():
            rows = TENSOR // dtype.itemsize // 4096
            model = {f"layers.{i}.weight": torch.randn(rows, 4096).to(dtype) for i in range(mib * MIB // TENSOR)}
            saver.save(name, model)
    make_durable(directory)


class Cost(NamedTuple):
    """Seconds of a clock on the wall, and of all processors together."""

    seconds: float
    processors: float


def timed(act: Callable[[], object]) -> Cost:
    """Of this process and those that it waits for."""
    started, used = time.monotonic(), _used()
    act()
    return Cost(time.monotonic() - started, _used() - used)


def _used() -> float:
    return sum(os.times()[:4])


def count(directory: Path, tag: str) -> None:
    """With nothing that was kept before."""
    count_anew(open_checkpoint(directory, tag), False)


def read(folder: Path, threads: int) -> None:
    """Plain preads of all files, in pieces that the threads share."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, PIECE)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_read, (pieces[number::threads] for number in range(threads))))


def _read(pieces: list[tuple[Path, int]]) -> None:
    memory = memoryview(bytearray(PIECE))
    for path, at in pieces:
        number = os.open(path, os.O_RDONLY)
        try:
            os.preadv(number, [memory], at)
        finally:
            os.close(number)


def measure_counting(directory: Path, mib: int, rounds: int) -> None:
    make(directory, mib)
    for tag, (where, prepare) in itertools.product(DTYPES, (("page cache", cache), ("disk", evict))):
        folder, processors = directory / tag, os.cpu_count() or 1
        ways: dict[str, Callable[[], object]] = {
            "a read by 1 thread": partial(read, folder, 1),
            f"a read by {processors} threads": partial(read, folder, processors),
            "statistics": partial(count, directory, tag),
        }
        found: dict[str, list[Cost]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                prepare(folder)
                found[name].append(timed(way))
        print(f"{mib} MiB of {tag}, from the {where}, median of {rounds} rounds")
        for name, costs in found.items():
            times = statistics.median(ratios(*([one.seconds for one in each] for each in (found["statistics"], costs))))
            print(f"  {name:20}{_shown(costs)}; statistics take {times:5.2f} of its time")


def measure_report(directory: Path, tags: int, tensors: int, rounds: int) -> None:
    model = {f"layers.{i // 10}.{i % 10}.weight": torch.randn(8, 8) for i in range(tensors)}
    with Checkpointer(directory) as saver:
        for number in range(tags):
            saver.save(f"step_{number}", {name: tensor + number for name, tensor in model.items()})
    page = directory.with_suffix(".html")
    first = timed(partial(report, directory, page, tags))
    costs = [timed(partial(report, directory, page, 0)) for _ in range(rounds)]
    print(f"report of {tags} tags of {tensors} tensors, {page.stat().st_size / MIB:.2f} MiB, median of {rounds} rounds")
    print(f"  the first, which counts {_shown([first])}")
    print(f"  all is kept             {_shown(costs)}")


def report(directory: Path, page: Path, count: int) -> None:
    """The command, as a process."""
    command = [sys.executable, "-m", "nxd_ckpt.cli", "report", str(directory), "-o", str(page), "--count", str(count)]
    subprocess.run([*command, "--quiet"], check=True, env=ENVIRONMENT)


def _shown(costs: list[Cost]) -> str:
    seconds, processors = (statistics.median(column) for column in zip(*costs, strict=True))
    return f"{seconds:7.3f} s, of processors {processors:6.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of each tag that is counted (default: %(default)s)")
    parser.add_argument("--tags", type=int, default=100, help="of the directory (default: %(default)s)")
    parser.add_argument("--tensors", type=int, default=1000, help="of each of these (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of all, in turn (default: %(default)s)")
    parser.add_argument("--directory", help="where to work, on the disk to be measured (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        measure_counting(Path(name) / "counted", args.mib, args.rounds)
        measure_report(Path(name) / "many", args.tags, args.tensors, args.rounds)


if __name__ == "__main__":
    main()
