"""``python -m tests.hostile``: read damaged files, count them, and write the counts into docs/reliability.md.

What is trouble is kept below ``tests/hostile/corpus``, where later runs and the tests begin from.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

from tests.hostile.findings import keep
from tests.hostile.fuzzing import troubles
from tests.hostile.targets import TARGETS
from tests.reliability import date_and_commit, put, table

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
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        futures = [pool.submit(tried, name, seeds) for seeds in chunks for name in names]
        yield from (done.result() for done in as_completed(futures))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"some of {', '.join(TARGETS)}; by default all")
    parser.add_argument("--first", type=int, default=0, help="the first number of an input")
    parser.add_argument("--count", type=int, default=100_000, help="how many inputs")
    parser.add_argument("--processes", type=int, default=2, help="how many at once")
    parser.add_argument("--write", action="store_true", help="write the counts into docs/reliability.md")
    given = parser.parse_args()
    inputs, found = Counter[str](), Counter[str]()
    seconds: defaultdict[str, float] = defaultdict(float)
    for part in parts(given.readers or [*TARGETS], given.first, given.count, given.processes):
        inputs[part.name] += part.inputs
        seconds[part.name] += part.cpu_seconds
        for seed, what in part.troubles:
            data = TARGETS[part.name].input(seed)
            path = keep(part.name, hashlib.sha256(data).hexdigest()[:12], data)
            found[part.name] += 1
            print(f"{part.name}, input {seed}, kept as {path}\n{what}", flush=True)
    rows = [[name, f"{inputs[name]:,}", found[name], f"{inputs[name] / seconds[name]:,.0f}"] for name in inputs]
    total = ["all", f"{inputs.total():,}", found.total(), f"{inputs.total() / sum(seconds.values()):,.0f}"]
    text = table([*sorted(rows), total], ["reader", "inputs", "troubles", "inputs a second and core"])
    print(text)
    if given.write:
        put("hostile files", f"{table(date_and_commit())}\n\n{text}")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
