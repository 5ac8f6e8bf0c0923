"""Statistics of a tag, kept beside it in ``.nxd_ckpt/statistics``: reading all of a tag again takes minutes.

What is kept counts for one save only, whose word (:class:`~nxd_ckpt.tag.identity.Identity`) it holds. It is
never needed: a directory that takes no file has none, and one that is damaged is made anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import astuple
from math import inf, isfinite, isinf, nan
from typing import Any

from nxd_ckpt.coordination.control_files import drop_those_of_lost_tags
from nxd_ckpt.coordination.paths import STATISTICS, statistics_file
from nxd_ckpt.core import document
from nxd_ckpt.core.keys import checked_text
from nxd_ckpt.core.parsing import parsing
from nxd_ckpt.errors import CheckpointError, MalformedFile
from nxd_ckpt.examine.counted_at_save import counted_at_save
from nxd_ckpt.reshard.summary import TensorStatistics
from nxd_ckpt.tag.opened import OpenTag

logger = logging.getLogger("nxd_ckpt")

Kept = dict[str, TensorStatistics]

_VERSION = 1
_COUNTS = 4
"""The first fields of the statistics: counts. The others are measures."""
_MOST = 2**63 - 1
"""Elements that a tensor can have."""


def keeps_statistics(opened: OpenTag) -> bool:
    """Whether they can be kept: the tag has a name, and something marks which save it is."""
    return bool(opened.tag) and opened.identity is not None and opened.identity.lasts


def read_statistics(opened: OpenTag) -> Kept | None:
    """What is kept of this very save, by the tensors' names; None where nothing is, or nothing of use.

    That is what somebody counted before, or the ranks themselves at the save.
    """
    if not keeps_statistics(opened):
        return None
    found = _kept(opened, _of_file)
    if found is None:
        found = _kept(opened, counted_at_save)
        if found is not None:
            write_statistics(opened, found)  # put together once
    return found


def _kept(opened: OpenTag, read: Callable[[OpenTag], Kept | None]) -> Kept | None:
    """What anyone may have written there is believed as far as it can be true, and a checkpoint needs none of it."""
    try:
        return read(opened)
    except FileNotFoundError:
        pass
    except MalformedFile as error:
        logger.warning("what was counted of %s is not used, its tensors are read: %s", opened.where, error)
    except (OSError, CheckpointError) as error:
        logger.debug("statistics of %s are not used: %s", opened.where, error)
    return None


def _of_file(opened: OpenTag) -> Kept | None:
    key = statistics_file(opened.tag)
    where = f"{opened.storage.url}/{key}"
    fields = document.small(opened.storage.read(key), where)
    with parsing(where, "statistics of a tag"):
        if [fields["format_version"], fields["kind"], fields["save"]] != [_VERSION, "statistics", opened.save]:
            return None
        return {checked_text(name): _statistics(numbers) for name, numbers in fields["tensors"].items()}


def write_statistics(opened: OpenTag, found: Mapping[str, TensorStatistics]) -> None:
    """Keep them, and drop those of tags that are no more. Where nothing can be written, nothing is kept."""
    storage = opened.storage
    try:
        storage.write(statistics_file(opened.tag), statistics_text(opened.save, found).encode())
        drop_those_of_lost_tags(storage, STATISTICS, statistics_file)
    except (OSError, CheckpointError) as error:  # read-only, an archive, http, a name that is too long
        logger.debug("statistics of %s are not kept: %s", opened.where, error)


def statistics_text(save: str | None, found: Mapping[str, TensorStatistics]) -> str:
    """The JSON of what is kept of that save."""
    tensors = {name: [number if isfinite(number) else None for number in astuple(one)] for name, one in found.items()}
    fields = {"format_version": _VERSION, "kind": "statistics", "save": save, "tensors": tensors}
    return json.dumps(fields, separators=(",", ":"))


def _statistics(numbers: Any) -> TensorStatistics:
    """Raises ValueError or TypeError for what no statistics are."""
    counts, measures = numbers[:_COUNTS], [nan if number is None else float(number) for number in numbers[_COUNTS:]]
    mean, norm, absmax = measures
    counted = {*map(type, counts)} == {int} and min(counts) >= 0 and sum(counts[1:]) <= counts[0] <= _MOST
    if not (counted and not isinf(mean) and 0 <= norm < inf and 0 <= absmax < inf):
        raise ValueError(f"expected counts and measures, found {numbers!r:.80}")
    return TensorStatistics(*counts, *measures)
