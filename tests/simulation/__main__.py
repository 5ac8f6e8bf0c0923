"""``python -m tests.simulation``: run schedules, or look at all that crashes leave; count, also into
tests/counts.md."""

import argparse
import gc
import logging
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tests.simulation.conversions import CONVERSIONS
from tests.simulation.crashes import Count as CrashCount
from tests.simulation.crashes import Work, enumerated
from tests.simulation.disk_schedule import DiskSchedule
from tests.simulation.drains import DRAINS
from tests.simulation.hosts_schedule import HostsSchedule
from tests.simulation.saves import SAVES
from tests.simulation.schedule import Schedule, run
from tests.simulation.store_schedule import StoreSchedule
from tests.support.reliability import add_run, date_and_commit, number, put, rows_of, table

CHUNK = 200
"""So many schedules run in one process."""

PLACES: dict[str, Callable[[int], Schedule]] = {
    "disk": DiskSchedule.of,
    "local": DiskSchedule.of_system_calls,
    "store": StoreSchedule.of,
    "hosts": HostsSchedule.of,
}
"""The schedule of a seed, by place."""


class Count(NamedTuple):
    """What came of some schedules: ``faults``, how often each was injected, and the messages of ``failures``."""

    faults: Counter[str]
    failures: list[str]
    cpu_seconds: float

    @property
    def schedules(self) -> int:
        return self.faults.total()

    @property
    def rate(self) -> float:
        """Schedules a second of one core."""
        return self.schedules / self.cpu_seconds


def counted(place: str, seeds: range, dedup: bool = False) -> Count:
    """Run these schedules in this process. Garbage is not collected meanwhile, which would take a sixth of the time."""
    logging.disable(logging.CRITICAL)  # what goes wrong there is meant to
    gc.disable()
    began, faults, failures = time.process_time(), Counter[str](), list[str]()
    try:
        for seed in seeds:
            schedule = PLACES[place](seed).deduplicating() if dedup else PLACES[place](seed)
            faults[schedule.fault] += 1
            try:
                run(schedule)
            except AssertionError as error:
                failures.append(str(error))
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
    return Count(faults, failures, time.process_time() - began)


def run_all(place: str, first: int, count: int, processes: int, dedup: bool = False) -> Count:
    """Run ``count`` schedules from seed ``first`` on, and print how far it is. SIGINT ends it early, and counts those
    that are done."""
    chunks = [range(begin, min(begin + CHUNK, first + count)) for begin in range(first, first + count, CHUNK)]
    total = Count(Counter(), [], 0.0)
    with multiprocessing.get_context("fork").Pool(processes, _for_itself, maxtasksperchild=1) as pool:
        try:
            for done, part in enumerate(pool.imap(partial(counted, place, dedup=dedup), chunks), start=1):
                cpu_seconds = total.cpu_seconds + part.cpu_seconds
                total = Count(total.faults + part.faults, total.failures + part.failures, cpu_seconds)
                for failure in part.failures:
                    print(failure, flush=True)
                if done % 10 == 0 or done == len(chunks):
                    print(f"{total.schedules} schedules, {total.rate:.0f} a second and core", flush=True)
        except KeyboardInterrupt:
            print("ended early", flush=True)
    return total


def _for_itself() -> None:
    """A process that runs schedules, and is ended by the one that counts them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def look_at_all(interleavings: int, processes: int) -> list[CrashCount]:
    """Look at every state that a loss of power leaves, and print how many there were."""
    counts, works = [], (*SAVES, *CONVERSIONS, *DRAINS)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for count in pool.imap(partial(_quietly_enumerated, interleavings=interleavings), works, chunksize=1):
            counts.append(count)
            for failure in count.failures:
                print(failure, flush=True)
            print(f"{count.name}: {count.moments} moments, {count.states} states", flush=True)
    return counts


def _quietly_enumerated(work: Work, interleavings: int) -> CrashCount:
    logging.disable(logging.CRITICAL)
    return enumerated(work, interleavings)


def write(place: str, total: Count, first: int, origin: list[tuple[str, str]]) -> None:
    """Add a run to those that tests/counts.md has."""
    seeds = f"{first:,} to {first + total.schedules - 1:,}"
    counts = [f"{total.schedules:,}", f"{len(total.failures):,}"]
    run = [*(value for _, value in origin), place, seeds, *counts]
    header = ["date", "commit", "place", "seeds", "schedules", "broken promises"]
    add_run("runs of schedules", header, run, sums=("schedules", "broken promises"))
    write_faults(total.faults)


def write_faults(faults: Counter[str]) -> None:
    """Add them to the sums that tests/counts.md has."""
    found = Counter({name: number(count) for name, count in rows_of("faults")}) + faults
    put("faults", table([[name, f"{found[name]:,}"] for name in sorted(found)], ["fault", "times"]))


def write_crashes(counts: Sequence[CrashCount], interleavings: int, origin: list[tuple[str, str]]) -> None:
    """The same for :func:`look_at_all`."""
    found = [(count.moments, count.states, count.looked_at, len(count.failures)) for count in counts]
    sums = [len(counts), *map(sum, zip(*found, strict=True))]
    each = "one interleaving" if interleavings == 1 else f"{interleavings} interleavings"
    said = f"On {origin[0][1]}, commit {origin[1][1]}, {each} of each:"
    header = ["saves, conversions, drains", "moments", "states", "that differ", "broken promises"]
    put("crash states", f"{said}\n\n{table([[f'{one:,}' for one in sums]], header)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--place", choices=PLACES, default="disk", help="where jobs save")
    parser.add_argument("--first", type=int, default=0, help="the first seed; with --count 1 it is replayed")
    parser.add_argument("--count", type=int, default=1000, help="how many schedules")
    parser.add_argument("--processes", type=int, default=2, help="how many at once")
    parser.add_argument("--dedup", action="store_true", help="with saves that have a file in common, and dedup=True")
    parser.add_argument("--crashes", type=int, metavar="N", help="every crash state in N interleavings, instead")
    parser.add_argument("--write", action="store_true", help="write the counts into tests/counts.md")
    given = parser.parse_args()
    origin = date_and_commit()  # the checkout may move on while it runs
    if given.crashes:
        counts = look_at_all(given.crashes, given.processes)
        if given.write:
            write_crashes(counts, given.crashes, origin)
        raise SystemExit(1 if any(count.failures for count in counts) else 0)
    total = run_all(given.place, given.first, given.count, given.processes, given.dedup)
    if given.write:
        write(f"{given.place} with dedup" if given.dedup else given.place, total, given.first, origin)
    raise SystemExit(1 if total.failures else 0)


if __name__ == "__main__":
    main()
