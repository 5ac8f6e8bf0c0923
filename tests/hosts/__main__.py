"""``python -m tests.hosts``: kill a job's hosts, and add the counts to those in tests/counts.md.

An error names the seed of its campaign, whose directory stays. SIGINT or SIGTERM ends it after the launches that are
under way, and what was counted until then is written.
"""

from __future__ import annotations

import argparse
import logging
import signal
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import NamedTuple

from tests.hosts.campaign import PHASES, Campaign
from tests.support.reliability import add_run, date_and_commit, put, rows_of, table
from tests.support.reliability import number as count_of

RUNS = ["date", "commit", "seeds", "launches", "disks lost with their host", "processes killed", "broken promises"]
BY_PHASE = ["killed in", "processes"]


class Counts(NamedTuple):
    """Of one campaign, or of several."""

    launches: int
    lost: int
    fallen: Counter[tuple[int, str]]


def campaign(seed: int, kills: int, directory: str | None) -> Counts:
    """Until so many processes were killed, or it is to end."""
    logging.disable()
    path = Path(tempfile.mkdtemp(prefix=f"kills_{seed}_", dir=directory))
    found = Campaign(path, Random(seed))
    try:
        found.rehearse()
        while found.fallen.total() < kills and not _ending.is_set():
            found.kill()
            print(f"seed {seed}: {found.fallen.total()} kills in {found.launches} launches", flush=True)
    except BaseException as error:
        raise RuntimeError(f"seed {seed}, launch {found.launches}, kept in {path}: {error}") from error
    rmtree(path)
    return Counts(found.launches, found.lost, found.fallen)


_ending: Event = get_context("fork").Event()


def _leave_signals() -> None:
    """They are for the process that all campaigns belong to."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first campaign's seed (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=500, help="how many in all (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="campaigns at once (default: %(default)s)")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    parser.add_argument("--write", action="store_true", help="add the counts to tests/counts.md")
    given = parser.parse_args()
    origin = date_and_commit()  # the checkout may move on while it runs
    seeds = range(given.first, given.first + given.processes)
    each = -(-given.kills // given.processes)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _ending.set())
    with ProcessPoolExecutor(given.processes, get_context("fork"), _leave_signals) as pool:
        done = list(pool.map(campaign, seeds, [each] * len(seeds), [given.directory] * len(seeds)))
    fallen = sum((one.fallen for one in done), Counter[tuple[int, str]]())
    by_phase = Counter({phase: sum(fallen[one] for one in PHASES if one[1] == phase) for _, phase in PHASES})
    counts = [sum(one.launches for one in done), sum(one.lost for one in done), fallen.total(), 0]
    run = [*(value for _, value in origin), f"{seeds[0]} to {seeds[-1]}", *(f"{count:,}" for count in counts)]
    print(table([run], RUNS), table(_rows(by_phase), BY_PHASE), sep="\n\n")
    if given.write:
        add_run("runs of kills over hosts", RUNS, run, sums=(*RUNS[3:],))
        before = Counter({phase: count_of(killed) for phase, killed in rows_of("kills over hosts")})
        put("kills over hosts", table(_rows(by_phase + before), BY_PHASE))


def _rows(by_phase: Counter[str]) -> list[list[str]]:
    return [[phase, f"{killed:,}"] for phase, killed in sorted(by_phase.items())]


if __name__ == "__main__":
    main()
