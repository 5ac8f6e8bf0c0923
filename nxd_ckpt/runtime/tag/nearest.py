"""Choosing the tag to load where several places, one nearer than the other, may have it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

from nxd_ckpt.core.tags import Tag
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.runtime.tag.choosing import choose
from nxd_ckpt.storage.base import Storage

logger = logging.getLogger("nxd_ckpt")


class Copy(NamedTuple):
    """A tag in one of several places, by the place's number: 0 is the nearest."""

    place: int
    tag: str


def choose_nearest(storages: Sequence[Storage], tag: Tag | None, without: Collection[Copy] = ()) -> Copy:
    """The newest complete tag that is not in ``without``, or the newest of the name that is asked for, where it is
    nearest.

    Copies of one save have the same order time, so the newest save counts before the nearest place. A place that has
    no such tag, or cannot be reached, is passed over, with a warning if it could not be asked.

    Raises what the nearest place raised if no place has it: CheckpointNotFound, CorruptCheckpoint, OSError.
    """
    found: list[tuple[float, Copy]] = []
    failed: list[Exception] = []
    for place, storage in enumerate(storages):
        try:
            info = choose(storage, tag, [copy.tag for copy in without if copy.place == place])
            found.append((info.order_time, Copy(place, info.tag)))
        except (CheckpointError, OSError) as error:
            failed.append(error)
            if len(storages) > 1 and not isinstance(error, FileNotFoundError):
                logger.warning("%s is passed over: %s: %s", storage.url, type(error).__name__, error)
    if not found:
        raise failed[0]
    return max(found, key=lambda one: (one[0], -one[1].place))[1]
