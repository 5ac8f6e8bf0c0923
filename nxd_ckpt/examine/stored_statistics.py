"""Statistics of a tag's tensors as they are stored beside the tag, so that no tensor is read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from math import inf, isfinite, isinf, nan
from typing import Any

from nxd_ckpt.coordination.control_files import drop_statistics_of_lost_tags, statistics_file
from nxd_ckpt.core import document
from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.limits import checked_text
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, MalformedFile
from nxd_ckpt.reshard.tensor_statistics import TensorStatistics
from nxd_ckpt.tag.opened import OpenTag

StatisticsByName = Mapping[str, TensorStatistics]

_VERSION = 1
_COUNTS = 4
"""Number of leading fields of the statistics that are counts; the others are measures."""
_MOST = 2**63 - 1
"""Maximum number of elements of a tensor."""


def keeps_statistics(opened: OpenTag) -> bool:
    """Return whether they can be stored: the tag has a name, and something marks which save it is."""
    return bool(opened.tag) and opened.identity is not None and opened.identity.lasts


def not_finite(statistics: StatisticsByName) -> list[str]:
    """Return the names of tensors with NaN or infinities."""
    return [name for name, counts in statistics.items() if counts.nans + counts.infs]


def read_statistics(opened: OpenTag) -> StatisticsByName | None:
    """Return the statistics of this very save by tensor name, which an earlier count stored; None if there are none.

    Anyone may have written there: its content is used as far as it is plausible.
    """
    if not keeps_statistics(opened):
        return None
    try:
        return _read_file(opened)
    except FileNotFoundError:
        pass
    except MalformedFile as error:
        logger.warning("%s: stored statistics are not used, its tensors are read: %s", opened.where, error)
    except (OSError, CheckpointError) as error:
        logger.debug("statistics of %s are not used: %s", opened.where, error)
    return None


def _read_file(opened: OpenTag) -> StatisticsByName | None:
    key = statistics_file(opened.tag)
    where = f"{opened.storage.url}/{key}"
    fields = document.small(opened.storage.read(key), where)
    with parsing(where, "statistics of a tag"):
        if [fields["format_version"], fields["kind"], fields["save"]] != [_VERSION, "statistics", opened.save]:
            return None
        return {checked_text(name): _statistics(numbers) for name, numbers in fields["tensors"].items()}


def write_statistics(opened: OpenTag, statistics: StatisticsByName) -> None:
    """Store them, and remove those of removed tags. A directory that is not writable keeps none."""
    storage = opened.storage
    try:
        storage.write(statistics_file(opened.tag), statistics_text(opened.save, statistics).encode())
        drop_statistics_of_lost_tags(storage)
    except (OSError, CheckpointError) as error:  # read-only, an archive, http, a name that is too long
        logger.debug("statistics of %s are not kept: %s", opened.where, error)


def statistics_text(save: str | None, statistics: StatisticsByName) -> str:
    """Return the JSON of the statistics of a save."""
    tensors = {
        name: [number if isfinite(number) else None for number in astuple(numbers)]
        for name, numbers in statistics.items()
    }
    fields = {"format_version": _VERSION, "kind": "statistics", "save": save, "tensors": tensors}
    return json.dumps(fields, separators=(",", ":"))


def _statistics(numbers: Any) -> TensorStatistics:
    """Parse one tensor's numbers. Raises ValueError or TypeError for implausible ones."""
    counts = numbers[:_COUNTS]
    measures = [nan if number is None else float(number) for number in numbers[_COUNTS:]]
    mean, norm, absmax = measures
    counted = {*map(type, counts)} == {int} and min(counts) >= 0 and sum(counts[1:]) <= counts[0] <= _MOST
    if not (counted and not isinf(mean) and 0 <= norm < inf and 0 <= absmax < inf):
        raise ValueError(f"expected counts and measures, found {numbers!r:.80}")
    return TensorStatistics(*counts, *measures)
