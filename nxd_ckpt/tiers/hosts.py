"""Joining the hosts of a job, so that their own disks together are one store; and restoring missing replicas.

Ranks on one host recognise each other by the files in their directories, not by names. The lowest rank of each host
serves its directory to the others; both ends prove that they know a secret of the job.

Replicas are missing after a host was replaced or lost a file, or if a load found a copy damaged. Each host fetches its
files on rank 0's request, piece by piece, in the background. Nothing is changed during a save: a save that begins stops
this, since its own tag has all replicas.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.commit.tier import Tier
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.control_files import FETCHED, PROBES
from nxd_ckpt.core import names
from nxd_ckpt.core.tags import in_order
from nxd_ckpt.core.units import size
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, InvalidArgument, RanksDisagree
from nxd_ckpt.output.cp_files import TagFile, files_to_copy
from nxd_ckpt.saving.pending import Worker
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.hosts.hosts_storage import Directory, Hosts, HostsStorage
from nxd_ckpt.storage.hosts.remote import Address, RemoteDirectory
from nxd_ckpt.storage.hosts.server import CopyOut, HostServer
from nxd_ckpt.storage.hosts.wire import address_of, group_addresses
from nxd_ckpt.storage.transfer import StoredFile, digest
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.opened import OpenTag, open_complete_tag


def join(storage: HostsStorage, tier: Tier, agreement: Agreement, timeout: float, copy_out: CopyOut) -> None:
    """Make ``storage`` that of all hosts; every rank calls this. ``copy_out`` copies files of this host for others.

    Raises, on every rank:
        InvalidArgument: more replicas than hosts, ``replica_jump`` leads to the same host, no such interface.
        RanksDisagree: on the replicas.
        OSError: a host's directory cannot be written to, or its server cannot listen.
    """
    lowest = _lowest_that_shares(storage.own, agreement)
    words = agreement.gather([lowest, tier.replicas, tier.replica_jump])
    decided: list[Any] = decided_by_rank0(agreement, lambda: [secrets.token_hex(8), *_hosts_of(words or [], tier)])
    purpose, host_of, targets = decided
    secret = agreement.secret_for(f"hosts {purpose}")
    number = max(host_of) + 1
    host = host_of[agreement.rank]
    serves = lowest == agreement.rank and max(host_of) > 0

    servers: list[HostServer] = []
    remotes: list[RemoteDirectory] = []

    def serve() -> None:
        if serves:
            addresses = group_addresses() if tier.interface is None else [address_of(tier.interface)]
            servers.append(HostServer(storage.own, host, secret, addresses, timeout, copy_out))

    def leave() -> None:
        for server in servers:
            server.close()
        for remote in remotes:
            remote.close()

    try:
        on_all(agreement, serve)
        server = [host, storage.url, servers[0].addresses, servers[0].port] if servers else None
        served = agreement.broadcast([word for word in agreement.gather(server) or () if word is not None])
        remotes += [
            RemoteDirectory(other, url, Address(addresses, port), secret, timeout)
            for other, url, addresses, port in served
            if other != host
        ]
    except BaseException:
        leave()
        raise
    by_host: dict[int, Directory] = {remote.host: remote for remote in remotes}
    directories = [by_host.get(each, storage.own) for each in range(number)]
    storage.join(Hosts(directories, host, targets[agreement.rank]), leave, copy_out)


def _lowest_that_shares(own: Storage, agreement: Agreement) -> int:
    """Return the lowest rank that sees the same directory as this one."""
    meeting = agreement.broadcast(secrets.token_hex(8) if agreement.rank == 0 else None)
    mark = f"host-{meeting}-"
    on_all(agreement, lambda: own.write(f"{PROBES}/{mark}{agreement.rank}", b""))
    try:
        return on_all(agreement, lambda: min(_ranks_in(own, mark), default=agreement.rank))
    finally:
        own.remove(f"{PROBES}/{mark}{agreement.rank}")


def _ranks_in(own: Storage, mark: str) -> list[int]:
    names = [entry.name for entry in own.list(PROBES) if entry.name.startswith(mark)]
    return [int(name.removeprefix(mark)) for name in names]


def _hosts_of(words: Sequence[Sequence[int | None]], tier: Tier) -> list[list[Any]]:
    """Return the host of each rank, and for each rank the hosts with its files' replicas. Rank 0 is on host 0."""
    for rank, (_, replicas, jump) in enumerate(words):
        if (replicas, jump) != (tier.replicas, tier.replica_jump):
            raise RanksDisagree(
                f"rank 0 has replicas={tier.replicas}, replica_jump={tier.replica_jump}, rank {rank} "
                f"replicas={replicas}, replica_jump={jump}; all ranks must pass the same tiers"
            )
    hosts = sorted({int(lowest or 0) for lowest, *_ in words})
    host_of = [hosts.index(int(lowest or 0)) for lowest, *_ in words]
    return [host_of, [_targets(rank, host_of, tier) for rank in range(len(words))]]


def _targets(rank: int, host_of: Sequence[int], tier: Tier) -> list[int]:
    hosts = max(host_of) + 1
    own = host_of[rank]
    jump = tier.replica_jump
    steps = range(1, tier.replicas)
    if jump is None:
        targets = [(own + step) % hosts for step in steps]
    else:
        targets = [host_of[(rank + step * jump) % len(host_of)] for step in steps]
    if len({own, *targets}) < tier.replicas:
        with_jump = "" if jump is None else f", replica_jump={jump}"
        raise InvalidArgument(
            f"replicas={tier.replicas}{with_jump}: each file must be on as many hosts, but those of rank {rank} would "
            f"be on {len({own, *targets})}, of {hosts} hosts in all; pass fewer, or the number of ranks per host as "
            "replica_jump"
        )
    return targets


_PATIENCE = 5.0
"""Maximum seconds that a save waits for the current step to end."""


class Fetch(NamedTuple):
    """A file that host ``number`` must fetch."""

    number: int
    file: TagFile


class Replenishing:
    """A background task that gives the complete tags of ``source`` their number of copies, the newest first."""

    def __init__(self, source: HostsStorage) -> None:
        self._source = source
        self._changed = effects.Condition()
        self._stopping = effects.Event()
        self._is_running = False
        self._worker = Worker("nxd_ckpt-replicas")

    def start(self) -> None:
        """Start, unless it is running."""
        with self._changed:
            if self._is_running:
                return
            self._is_running = True
        self._stopping.clear()
        self._worker.submit(self._run)

    def stop(self) -> None:
        """Return when nothing is changed any more, until `start`; but do not wait for a host that is stuck."""
        self._stopping.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running, _PATIENCE)

    def close(self) -> None:
        """Stop for good."""
        self.stop()
        if not self._is_running:
            self._worker.stop()

    def _run(self) -> None:
        try:
            self._discard()
            for info in reversed(in_order(list_tags(self._source))):
                if info.complete and info.ours and not self._stopping.is_set():
                    self._replenish(info.tag)
        except (CheckpointError, OSError, EOFError) as error:
            if not self._stopping.is_set():
                logger.warning("nxd_ckpt: replicas were lost with a host, and stay lost until the next save: %s", error)
        finally:
            self._discard()
            with self._changed:
                self._is_running = False
                self._changed.notify_all()

    def _discard(self) -> None:
        """Remove fetched files that are not in their place: a killed launch may have left them."""
        for directory in self._source.hosts.directories:
            with suppress(OSError, CheckpointError):
                directory.remove(FETCHED)

    def _replenish(self, tag: str) -> None:
        source = self._source
        lacking = source.lacking(tag) | self._wrong(f"{tag}/{names.MANIFEST}")
        opened = open_complete_tag(source, tag)
        with opened.guarded():
            files = [self._with_digests(tag, file) for file in files_to_copy(opened) if file.name != names.MANIFEST]
        holders = source.holders([f"{tag}/{file.name}" for file in files])
        holders_by_name = {file.name: holders[f"{tag}/{file.name}"] for file in files}
        fetches = [Fetch(number, file) for file in files for number in self._wrong(f"{tag}/{file.name}")]
        fetches += missing_copies(files, holders_by_name, source.reachable(), lacking, 1 + len(source.hosts.replicas))
        newcomers = [number for number in lacking if not source.is_member(number, tag)]
        opened.require_unchanged()
        for number in newcomers:  # its files of that name are of an older save, or of none
            source.hosts.directories[number].remove(tag)
        for fetch in fetches:
            self._fetch(opened, fetch)
        for number in lacking:
            self._mark(opened, number)
        if fetches:
            nbytes = sum(fetch.file.nbytes for fetch in fetches)
            logger.info("%s has all replicas again: %d files, %s", tag, len(fetches), size(nbytes))

    def _with_digests(self, tag: str, file: TagFile) -> TagFile:
        """Return the file with digests to compare copies with. A file in no index was added, and is kept unchanged."""
        if file.entry is not None:
            return file
        return replace(file, entry=digest(StoredFile(self._source, f"{tag}/{file.name}"), lambda nbytes: None))

    def _fetch(self, opened: OpenTag, fetch: Fetch) -> None:
        """Let a host fetch a file, first out of sight: the host's files of the tag may be in use."""
        key = f"{opened.tag}/{fetch.file.name}"
        directory = self._source.hosts.directories[fetch.number]
        assert fetch.file.entry is not None
        directory.make_dir(FETCHED)
        with closing(self._source.copy_out(fetch.number, key, 0, FETCHED, key, fetch.file.entry)) as pieces:
            for _ in pieces:
                if self._stopping.is_set():
                    raise CheckpointError("a save began, whose tag has all replicas")
        opened.require_unchanged()  # no lease is held where nothing was saved yet
        if fetch.number in self._wrong(key):
            directory.remove(key)
        directory.rename(f"{FETCHED}/{key}", key)
        self._source.distrusted.discard((key, fetch.number))

    def _wrong(self, key: str) -> set[int]:
        """Return the hosts whose copy of the file differs from the saved one."""
        return {number for name, number in tuple(self._source.distrusted) if name == key}

    def _mark(self, opened: OpenTag, number: int) -> None:
        """Give a host the marker files, the marker itself last: with it the host's files are those of the save."""
        opened.require_unchanged()
        for name in (names.MANIFEST, names.DONE, names.MARKER):
            key = f"{opened.tag}/{name}"
            self._source.hosts.directories[number].write(key, self._source.read(key))
            self._source.distrusted.discard((key, number))


def missing_copies(
    files: Iterable[TagFile],
    holders: Mapping[str, Collection[int]],
    hosts: Collection[int],
    newcomers: Collection[int],
    replicas: int,
) -> list[Fetch]:
    """Return which of the ``hosts`` fetches which file, so that each file is on so many hosts.

    Newcomers come before others, and among them the host with the fewest bytes to fetch. Files that nobody has are left
    out.
    """
    load = Counter[int]()
    fetches: list[Fetch] = []
    for file in files:
        hosts_with_file = holders[file.name]
        free = sorted((host not in newcomers, load[host], host) for host in hosts if host not in hosts_with_file)
        for _, _, number in free[: max(0, replicas - len(hosts_with_file))] if hosts_with_file else ():
            load[number] += file.nbytes
            fetches.append(Fetch(number, file))
    return fetches
