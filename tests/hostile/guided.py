"""``python -m tests.hostile.guided``: read damaged files, and go on from those that took a new way through a reader.

Coverage guides it, by atheris (libFuzzer), which is not installed with the other tools: ``pip install '.[fuzz]'``. What
is trouble is kept below ``tests/hostile/corpus``, as ``python -m tests.hostile`` does.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import multiprocessing
import os
import random
import re
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import NamedTuple

import atheris

with redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["nxd_ckpt"]):  # it names each module
    from tests.hostile.findings import keep
    from tests.hostile.fuzzing import in_silence, trouble
    from tests.hostile.targets import LARGEST, TARGETS

from tests.support.reliability import date_and_commit, put, table


class Ways(NamedTuple):
    """What came of one reader: the ``branches`` that were taken, and ``ways``, inputs that each took a new one, or one
    more often."""

    inputs: int
    seconds: int
    branches: int
    ways: int
    troubles: int


def explored(name: str, seconds: int) -> Ways:
    """Read as many files as ``seconds`` of one core allow."""
    with tempfile.TemporaryDirectory() as scratch:
        corpus, log = Path(scratch, "corpus"), Path(scratch, "log")
        corpus.mkdir()
        for number, data in enumerate([*TARGETS[name].valid, *TARGETS[name].findings]):
            if len(data) <= LARGEST:
                (corpus / str(number)).write_bytes(data)
        # libFuzzer ends its process.
        process = multiprocessing.get_context("fork").Process(target=_explore, args=(name, seconds, corpus, log))
        process.start()
        process.join()
        told = log.read_text(errors="replace")
    found = re.search(r"DONE +cov: (\d+) .*corp: (\d+)/[\s\S]*\nDone (\d+) runs in (\d+) second", told)
    if process.exitcode or found is None:
        raise RuntimeError(f"{name}: exit code {process.exitcode}\n{told[-5000:]}")
    branches, ways, inputs, took = map(int, found.groups())
    for line in re.findall(r"^trouble: .*(?:\n  .*)*", told, re.MULTILINE):
        print(f"{name}: {line}", flush=True)
    return Ways(inputs, took, branches, ways, len(re.findall(r"^trouble: ", told, re.MULTILINE)))


def _explore(name: str, seconds: int, corpus: Path, log: Path) -> None:
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(told, 1)
    os.dup2(told, 2)
    target = TARGETS[name]

    def read(data: bytes) -> None:
        what = trouble(target, data)
        if what is not None:
            path = keep(name, hashlib.sha256(data).hexdigest()[:12], data)
            os.write(told, f"trouble: {path}\n  {what.strip().replace(chr(10), chr(10) + '  ')}\n".encode())

    def changed(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return target.damage(rng, data, rng.choice(target.valid))[:most]

    options = ["-seed=1", f"-max_total_time={seconds}", f"-max_len={LARGEST}", "-rss_limit_mb=0"]
    with in_silence():
        atheris.Setup([name, *options, str(corpus)], read, custom_mutator=changed)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.guided", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"some of {', '.join(TARGETS)}; by default all")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--write", action="store_true", help="write the counts into tests/counts.md")
    given = parser.parse_args()
    readers, all_troubles, all_inputs = given.readers or TARGETS, 0, 0
    for name in readers:
        found = explored(name, given.seconds)
        rate = f"{found.inputs / max(found.seconds, 1):,.0f} a second"
        counts = f"{found.inputs:,} inputs", f"{found.troubles} troubles", f"{found.branches:,} branches"
        print(name, *counts, f"{found.ways:,} inputs took new ones", rate, sep=", ", flush=True)
        all_troubles += found.troubles
        all_inputs += found.inputs
    if given.write:
        row = [*(value for _, value in date_and_commit()), len(readers), f"{all_inputs:,}", all_troubles]
        put("guided", table([row], ["date", "commit", "readers", "inputs", "troubles"]))
    raise SystemExit(1 if all_troubles else 0)


if __name__ == "__main__":
    main()
