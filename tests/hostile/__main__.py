"""``python -m tests.hostile``: read damaged files, count them, and add the counts to tests/counts.md.

SIGINT ends a run early. What is trouble is kept below ``tests/hostile/corpus``, where later runs and the tests begin
from.
"""

import argparse
import hashlib
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from typing import NamedTuple

from tests.hostile.findings import keep
from tests.hostile.fuzzing import troubles
from tests.hostile.targets import TARGETS
from tests.support.reliability import add_run, date_and_commit, number, put, rows_of, table

CHUNK = 2_000


class Part(NamedTuple):
    """Some inputs of one reader, how long they took, and which were trouble."""

    name: str
    inputs: int
    cpu_seconds: float
    troubles: list[tuple[int, str]]


def tried(name: str, seeds: range) -> Part:
    began = time.process_time()
    found = troubles(name, seeds)
    return Part(name, len(seeds), time.process_time() - began, found)


def parts(names: list[str], first: int, count: int, processes: int) -> Iterator[Part]:
    """Try ``count`` inputs, as many of each reader, in whatever order they are done."""
    each = -(-count // len(names))
    chunks = [range(at, min(at + CHUNK, first + each)) for at in range(first, first + each, CHUNK)]
    with ProcessPoolExecutor(processes, get_context("fork"), signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        futures = [pool.submit(tried, name, seeds) for seeds in chunks for name in names]
        try:
            yield from (done.result() for done in as_completed(futures))
        finally:
            pool.shutdown(cancel_futures=True)


def write(
    inputs: Counter[str], found: Counter[str], seconds: Mapping[str, float], first: int, origin: list[tuple[str, str]]
) -> None:
    """Add a run to those that the page has, and its counts to the sums over them."""
    counts = [inputs.total(), found.total(), round(inputs.total() / sum(seconds.values()))]
    run = [*(value for _, value in origin), f"{first:,}", *(f"{count:,}" for count in counts)]
    header = ["date", "commit", "from number", "inputs", "troubles", "inputs a second and core"]
    add_run("runs of hostile files", header, run, sums=("inputs", "troubles"))
    for name, before in rows_of("hostile files"):
        inputs[name] += number(before)
    rows = [[name, f"{inputs[name]:,}"] for name in sorted(inputs)]
    put("hostile files", table(rows, ["reader", "inputs"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"some of {', '.join(TARGETS)}; by default all")
    parser.add_argument("--first", type=int, default=0, help="the first number of an input")
    parser.add_argument("--count", type=int, default=100_000, help="how many inputs")
    parser.add_argument("--processes", type=int, default=2, help="how many at once")
    parser.add_argument("--write", action="store_true", help="write the counts into tests/counts.md")
    given = parser.parse_args()
    origin = date_and_commit()  # the checkout may move on while it runs
    inputs, found = Counter[str](), Counter[str]()
    seconds: defaultdict[str, float] = defaultdict(float)
    with suppress(KeyboardInterrupt):
        for part in parts(given.readers or [*TARGETS], given.first, given.count, given.processes):
            inputs[part.name] += part.inputs
            seconds[part.name] += part.cpu_seconds
            for seed, what in part.troubles:
                data = TARGETS[part.name].input(seed)
                path = keep(part.name, hashlib.sha256(data).hexdigest()[:12], data)
                found[part.name] += 1
                print(f"{part.name}, input {seed}, kept as {path}\n{what}", flush=True)
    print(f"{inputs.total():,} inputs, {found.total():,} troubles")
    if given.write:
        write(inputs, found, seconds, given.first, origin)
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
