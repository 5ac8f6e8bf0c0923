"""Tiers: the places of a job's checkpoints, from the nearest to the most durable."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nxd_ckpt.coordination.control_files import ON_HOSTS
from nxd_ckpt.core.arguments import Count
from nxd_ckpt.core.option_classes import Options, checks_keywords
from nxd_ckpt.core.retention_rules import Retain, Rule, rules_of
from nxd_ckpt.core.units import AnySize, bytes_of
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.fsspec_storage import without_password
from nxd_ckpt.storage.hosts.directory import OwnDirectory
from nxd_ckpt.storage.hosts.hosts_storage import HostsStorage
from nxd_ckpt.storage.urls import StorageOptions, StrPath, is_url, local_path, open_storage, options_for, overlap


@checks_keywords
@dataclass(frozen=True)
class Tier(Options):
    """A place for a job's checkpoints. Every rank can reach it, unless it is ``per_host``.

    Attributes:
        path: the directory or URL.
        every: the tier gets the first save of a launch, and after it every so-many-th. The first tier gets all.
        keep: number of complete tags to keep there, at least 1; None keeps all.
        retain: rules for which tags to keep there, as for a save. ``keep`` counts as one more rule.
        max_bytes_per_second: maximum rate of copying to the tier, as a number or such as "20MB"; by default unlimited.
        storage_options: options for opening a URL; by default the Checkpointer's.
        storage: a storage of your own to use instead of opening ``path`` (``docs/own-storage.md``).
        per_host: the directory is each host's own, on a disk that only its ranks see. Only for the first tier.
        replicas: with ``per_host``, the number of hosts that have each file, this and the next ones: with 2, no file is
            lost with one host.
        interface: address or network interface on which a host serves its files to the other hosts; by default those by
            which the process group reaches it.
    """

    path: StrPath
    every: Count = 1
    keep: Count | None = None
    retain: Retain = None
    max_bytes_per_second: AnySize | None = None
    storage_options: StorageOptions | None = field(default=None, repr=False)
    storage: Storage | None = None
    per_host: bool = False
    replicas: Count = 1
    interface: str | None = None

    @property
    def name(self) -> str:
        """The path for errors and logs, without a password."""
        return without_password(os.fspath(self.path))

    @property
    def rules(self) -> tuple[Rule, ...] | None:
        """Rules for which complete tags stay; None keeps all."""
        return rules_of(self.keep, self.retain)

    @property
    def rate(self) -> int | None:
        """Maximum bytes per second; None is unlimited."""
        limit = self.max_bytes_per_second
        return None if limit is None else bytes_of(limit, "max_bytes_per_second")

    def open(self, durable: bool, storage_options: StorageOptions | None) -> Storage:
        """Open the tier's storage; ``storage_options`` are for a URL without its own."""
        if self.storage is not None:
            return self.storage
        if self.per_host:
            return HostsStorage(OwnDirectory(local_path(self.path), durable), ON_HOSTS)
        own = self.storage_options
        return open_storage(self.path, durable, options_for(self.path, storage_options) if own is None else own)

    def __post_init__(self) -> None:
        """Raise InvalidArgument for contradictions, too."""
        super().__post_init__()
        if not self.per_host and (self.replicas, self.interface) != (1, None):
            raise InvalidArgument(
                f"replicas= and interface= of tier {self.name} are for per_host=True: a place that all hosts share is "
                "on none of them"
            )
        if self.per_host and (is_url(self.path) or self.storage is not None):
            raise InvalidArgument(
                f"per_host=True of tier {self.name}: expected a directory on each host's own disk, no URL or storage="
            )


class Draining(Protocol):
    """The copier of tags from the first tier to the others, as a save sees it."""

    @property
    def unread(self) -> Collection[str]:
        """Tags of the first tier that are still to be copied: retention leaves them."""

    @property
    def newest(self) -> float:
        """Order time of the newest tag on the other tiers: later saves come after it."""

    def saved(self, tag: str, nbytes: int, overwrite: bool | None) -> None:
        """Queue the copies of a save that is visible on the first tier; ``overwrite`` is the save's."""


def checked_tiers(path: StrPath | None, tiers: Sequence[Tier] | None) -> tuple[Tier, ...]:
    """Return ``tiers``, or the directory ``path`` as the only tier.

    Raises InvalidArgument: no tier at all, an invalid one, two that are the same place or lie in each other, a first
    one that is not ``path``, or that skips saves.
    """
    if tiers is None:
        if path is None:
            raise InvalidArgument("pass the checkpoint directory, or tiers=, the first of which is that directory")
        return (Tier(path),)
    if not tiers:
        raise InvalidArgument(
            f"tiers={tiers!r:.200}: expected a list of at least one Tier, such as [Tier('/mnt/nvme/run7', keep=2), "
            "Tier('s3://bucket/run7', every=10)]"
        )
    first = tiers[0]
    if first.every != 1 or first.max_bytes_per_second is not None:
        raise InvalidArgument(
            f"the first tier, {first.name}, is where every save is written: every= and max_bytes_per_second= are for "
            "the tiers after it (pass max_bytes_per_second= to the save)"
        )
    later = next((tier for tier in tiers[1:] if tier.per_host), None)
    if later is not None:
        raise InvalidArgument(f"tier {later.name}: per_host=True is for the first tier, which every rank writes itself")
    if path is not None and not overlap(path, first.path, inside=False):
        raise InvalidArgument(
            f"the checkpoint directory {without_password(os.fspath(path))} is not the first tier, {first.name}; leave "
            "one of them out, or make them the same"
        )
    _refuse_overlaps(tiers)
    return tuple(tiers)


def _refuse_overlaps(tiers: Sequence[Tier]) -> None:
    for later, tier in enumerate(tiers):
        for earlier in range(later):
            is_same = tier.storage is not None and tier.storage is tiers[earlier].storage
            if is_same or overlap(tier.path, tiers[earlier].path):
                raise InvalidArgument(
                    f"tiers {tiers[earlier].name} and {tiers[later].name} are the same place, or one lies inside the "
                    "other: each tier needs a directory of its own, else what is lost in one is lost in both"
                )
