"""How fast two tags are compared, against reading their bytes: ``python -m tools.bench.diff --gib 1``.

Makes a model of float32 sharded over tp=4, the same saved on tp=2, and one with other values. Each pair is compared
again and again, each time after the same files were read with plain preads by as many threads, and read so with a
CRC-32 of each 4 MiB, which is what it takes to verify them. Printed are medians, their ratios, and how much memory a
comparison took beyond an interpreter with torch. The files come from the page cache: the processor is what is measured,
whose seconds are printed too, as they say more where others use the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from nxd_ckpt.formats.crc32 import crc32
from tools.bench.convert import MIB, run

COLUMNS = 4096
TENSOR = 64 * MIB
PIECE = 4 * MIB
TAGS = {"the same on tp=4 and tp=2": ("tp4", "tp2"), "other values on tp=4 and tp=2": ("tp4", "other")}

MAKE = """
import sys, torch
from nxd_ckpt import Partition, Topology, finalize_checkpoint, save_checkpoint

directory, tag, tp, seed, count, rows, columns = sys.argv[1:3] + [int(value) for value in sys.argv[3:]]
kinds = [(f"{kind}.{i}", dim) for i in range(count) for dim, kind in enumerate(("row", "col"))]
cuts = {name: Partition(dim, num_partitions=tp) for name, dim in kinds}
for rank in range(tp):
    model = {}
    for number, (name, cut) in enumerate(cuts.items()):
        drawn = torch.Generator().manual_seed(number)
        whole = torch.rand(rows, columns, generator=drawn) + seed
        model[name] = whole.chunk(tp, dim=cut.partition_dim)[rank].clone()
    place = Topology(tp=tp, rank=rank)
    save_checkpoint(directory, tag, model, topology=place, partitions=cuts, run_id=tag, async_save=True, use_xser=True)
finalize_checkpoint()
"""

DIFF = """
import resource, sys, time, torch
from nxd_ckpt import diff_checkpoints, open_checkpoint

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started, used = time.monotonic(), time.process_time()
found = diff_checkpoints(*(open_checkpoint(sys.argv[1], tag) for tag in sys.argv[2:]), full=True)
seconds, used = time.monotonic() - started, time.process_time() - used
print(seconds, used, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, found.nbytes)
"""


def make(directory: Path, gib: float) -> None:
    rows = TENSOR // 4 // COLUMNS
    count = max(1, round(gib * 2**30 / (2 * TENSOR)))
    for tag, tp, seed in (("tp4", 4, 0), ("tp2", 2, 0), ("other", 2, 1)):
        run(MAKE, directory, tag, tp, seed, count, rows, COLUMNS)


def read(folders: list[Path], *, verify: bool) -> tuple[float, float]:
    """Seconds that plain preads of all files take, and those of the processors; with ``verify``, digests too."""
    files = [path for folder in folders for path in sorted(folder.rglob("*.pt"))]
    started, used = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(partial(_read, verify=verify), files))
    return time.monotonic() - started, time.process_time() - used


def _read(path: Path, *, verify: bool) -> None:
    memory, at = memoryview(bytearray(PIECE)), 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while nbytes := os.preadv(fd, [memory], at):
            if verify:
                crc32(memory[:nbytes])
            at += nbytes
    finally:
        os.close(fd)


def _medians(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    wall, processors = zip(*rounds, strict=True)
    return statistics.median(wall), statistics.median(processors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of each model in GiB (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="of both, in turn (default: 5)")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        make(directory, args.gib)
        for what, tags in TAGS.items():
            folders = [directory / tag for tag in tags]
            read(folders, verify=False)
            found: dict[str, list[tuple[float, float]]] = {"preads": [], "preads and digests": [], "diff": []}
            peaks, nbytes = [], 0.0
            for _ in range(args.rounds):
                found["preads"].append(read(folders, verify=False))
                found["preads and digests"].append(read(folders, verify=True))
                seconds, used, peak, nbytes = map(float, run(DIFF, directory, *tags).split())
                found["diff"].append((seconds, used))
                peaks.append(peak)
            print(f"{what}: {nbytes / 2**30:.2f} GiB each, median of {args.rounds} rounds")
            diff, processors = _medians(found["diff"])
            for name, rounds in found.items():
                seconds, used = _medians(rounds)
                print(
                    f"  {name:20}{seconds:6.2f} s, diff takes {diff / seconds:5.2f} of it; "
                    f"of processors {used:6.2f} s, diff takes {processors / used:5.2f} of it"
                )
            print(f"  memory beyond torch {max(peaks) / MIB:5.0f} MiB")


if __name__ == "__main__":
    main()
