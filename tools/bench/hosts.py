"""How much sooner a job goes on if it reads a lost host's files from the others, not all from a slow store.

    python -m tools.bench.hosts --mib 48 --rounds 7

Four processes, each a host with a directory of its own, save with ``replicas=2`` and to a second tier, of whose MB/s
each host has a quarter. In every round another host's directory is empty, as that of a host that replaces a lost one,
and all load in two ways: from the hosts' disks with the second tier behind them, and from the second tier alone. Which
comes first changes from round to round. The time of the slowest host counts; every load must give back what was saved.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from nxd_ckpt import Checkpointer, Tier, Topology
from nxd_ckpt.storage.hosts.hosts_storage import HostsStorage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.transfer import Throttle
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tools.bench.world import World

HOSTS = 4
MIB = 2**20
_READS = ("read_into", "read_ranges")


class Way(NamedTuple):
    """A load: the seconds of the slowest host; MiB that the store gave, and hosts each other, all together."""

    seconds: float
    from_store: float
    from_hosts: float


class Host:
    """One of the hosts: its process's part of the world."""

    def __init__(self, rank: int, directory: Path, mib: int, rate: int) -> None:
        self._rank, self._directory, self._rate = rank, directory, rate * 10**6 // HOSTS
        self._world = World(rank, HOSTS, directory / "meeting")
        self._own = directory / f"host_{rank}"
        drawn = torch.Generator().manual_seed(rank)
        self._saved = {f"layers.{number}": torch.rand(MIB // 4, generator=drawn) for number in range(mib)}

    def save(self) -> None:
        tiers = [self._near(), Tier(self._directory / "store")]
        with Checkpointer(tiers=tiers, topology=Topology(tp=HOSTS, rank=self._rank)) as saver:
            saver.save("step_1", self._saved)
            saver.wait(tier=1)

    def load(self, *, hosts: bool) -> Way:
        """All load, from the hosts first or from the store alone."""
        throttle, read = Throttle(self._rate), 0

        def hook(operation: Operation) -> None:
            nonlocal read
            if operation.name in _READS:
                read += operation.nbytes
                time.sleep(throttle.schedule(operation.nbytes)[1])

        store = Tier("store", storage=HookedStorage(LocalStorage(self._directory / "store"), hook))
        tiers = [self._near(), store] if hosts else [store]
        loader = Checkpointer(tiers=tiers, topology=Topology(tp=HOSTS, rank=self._rank))
        live = {name: torch.zeros_like(tensor) for name, tensor in self._saved.items()}
        seconds = self._world.timed(lambda: loader.load(model=live, verify="reading"))
        if not all(tensor.equal(self._saved[name]) for name, tensor in live.items()):
            raise SystemExit(f"host {self._rank} did not get back what it saved")
        received = loader.storage.received if isinstance(loader.storage, HostsStorage) else 0
        return Way(seconds, sum(self._world.gather(read)) / MIB, sum(self._world.gather(received)) / MIB)

    def replaced(self, lost: int) -> tuple[Way, Way]:
        """Both ways, while the host ``lost`` has an empty disk."""
        kept = self._own.with_suffix(".kept")
        if self._rank == lost:
            self._own.rename(kept)
        self._world.barrier()
        order = (True, False) if lost % 2 == 0 else (False, True)
        found = {hosts: self.load(hosts=hosts) for hosts in order}
        self._world.barrier()
        if self._rank == lost:
            kept.rename(self._fresh())
        return found[True], found[False]

    def close(self) -> None:
        self._world.close()

    def _near(self) -> Tier:
        return Tier(self._own, per_host=True, replicas=2)

    def _fresh(self) -> Path:
        """Where the host's disk was; a load leaves directories for its own files there."""
        shutil.rmtree(self._own, ignore_errors=True)
        return self._own


def measure(rank: int, directory: Path, mib: int, rate: int, rounds: int) -> None:
    """In a process of its own; rank 0 leaves every round's ways in ``results.json``."""
    host = Host(rank, directory, mib, rate)
    host.save()
    host.replaced(0)  # what is imported, and what is made only once, counts for none
    found = [host.replaced(number % HOSTS) for number in range(rounds)]
    if rank == 0:
        (directory / "results.json").write_text(json.dumps(found))
    host.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=48, help="of each host's model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="that count (default: %(default)s)")
    parser.add_argument("--rate", type=int, default=20, help="MB/s of the store (default: %(default)s)")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench_hosts_", dir=given.directory) as name:
        sizes = (Path(name), given.mib, given.rate, given.rounds)
        ranks = [context.Process(target=measure, args=(rank, *sizes)) for rank in range(HOSTS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"exit codes of the hosts: {[rank.exitcode for rank in ranks]}")
        rounds = json.loads((Path(name) / "results.json").read_text())
    found = [(Way(*hosts), Way(*store)) for hosts, store in rounds]
    print(f"{HOSTS} hosts, {given.mib} MiB each, one replaced, the store at {given.rate} MB/s")
    for what, ways in zip(("from the hosts", "from the store"), zip(*found, strict=True), strict=True):
        seconds, store, hosts = (statistics.median(column) for column in zip(*ways, strict=True))
        print(f"  {what:16}{seconds:7.2f} s   {store:6.1f} MiB of the store, {hosts:6.1f} MiB of other hosts")
    ratios = sorted(store.seconds / hosts.seconds for hosts, store in found)
    print(f"  from the hosts {statistics.median(ratios):.1f} x sooner ({ratios[0]:.1f} - {ratios[-1]:.1f})")


if __name__ == "__main__":
    main()
