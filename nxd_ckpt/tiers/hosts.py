"""Joining the hosts of a job, so that their own disks together are one store.

Ranks on one host recognise each other by the files in their directories, not by names. The lowest rank of each host
serves its directory to the others; both ends prove that they know a secret of the job.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from nxd_ckpt.commit.tier import Tier
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.control_files import PROBES
from nxd_ckpt.errors import InvalidArgument, RanksDisagree
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.hosts.hosts_storage import Directory, Hosts, HostsStorage
from nxd_ckpt.storage.hosts.remote import Address, RemoteDirectory
from nxd_ckpt.storage.hosts.server import CopyOut, HostServer
from nxd_ckpt.storage.hosts.wire import address_of, group_addresses


def join(storage: HostsStorage, tier: Tier, agreement: Agreement, timeout: float, copy_out: CopyOut) -> None:
    """Make ``storage`` that of all hosts; every rank calls this. ``copy_out`` copies files of this host for others.

    Raises, on every rank:
        InvalidArgument: more replicas than hosts, no such interface.
        RanksDisagree: on the replicas.
        OSError: a host's directory cannot be written to, or its server cannot listen.
    """
    lowest = _lowest_that_shares(storage.own, agreement)
    words = agreement.gather([lowest, tier.replicas])
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


def _hosts_of(words: Sequence[Sequence[int]], tier: Tier) -> list[list[Any]]:
    """Return the host of each rank, and for each rank the hosts with its files' replicas. Rank 0 is on host 0."""
    for rank, (_, replicas) in enumerate(words):
        if replicas != tier.replicas:
            raise RanksDisagree(
                f"rank 0 has replicas={tier.replicas}, rank {rank} replicas={replicas}; all ranks must pass the same "
                "tiers"
            )
    hosts = sorted({lowest for lowest, _ in words})
    if len(hosts) < tier.replicas:
        raise InvalidArgument(
            f"replicas={tier.replicas}: each file must be on as many hosts, of {len(hosts)} in all; pass fewer"
        )
    host_of = [hosts.index(lowest) for lowest, _ in words]
    return [host_of, [[(own + step) % len(hosts) for step in range(1, tier.replicas)] for own in host_of]]
