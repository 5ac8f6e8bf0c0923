"""Steps of a directory's tags: the numbers in their names, and the metrics of their saves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import load_manifest
from nxd_ckpt.core.retention import Best, Metrics
from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.core.tags import TagInfo, in_order, step_of
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.choosing import settled_tags

logger = logging.getLogger("nxd_ckpt")


class StepTag(NamedTuple):
    """The newest complete tag of a step, and a storage that has it."""

    step: int
    info: TagInfo
    storage: Storage


def steps_of(storages: Sequence[Storage]) -> list[StepTag]:
    """Return the newest complete tag of each step in any of ``storages``, oldest save first.

    Tags without a number in their names have no step. Storages that cannot be read are passed over, with a warning;
    raises the error of the first if that is all of them.
    """
    places: dict[TagInfo, Storage] = {}
    failed: list[Exception] = []
    for storage in storages:
        try:
            for info in settled_tags(storage):
                if info.complete:
                    places.setdefault(info, storage)
        except (CheckpointError, OSError) as error:
            failed.append(error)
            logger.warning("%s is passed over: %s: %s", storage.url, type(error).__name__, error)
    if len(failed) == len(storages):
        raise failed[0]
    steps: dict[int, StepTag] = {}
    for info in in_order(places):
        step = step_of(info.tag)
        if step is not None:
            steps.pop(step, None)
            steps[step] = StepTag(step, info, places[info])
    return list(steps.values())


def best_of(tags: Sequence[StepTag], metric: str, mode: Literal["min", "max"]) -> int | None:
    """Return the step whose save has the lowest ``metric``, or with "max" the highest; of equal ones the newest.

    None if no save has a finite one. Raises InvalidArgument if saves have metrics, but none of that name.
    """
    rule, sign = Best(metric, mode=mode), 1 if mode == "min" else -1
    metrics = [metrics_of(tag.storage, tag.info) for tag in tags]
    recorded = {name for each in metrics for name in each}
    if recorded and metric not in recorded:
        raise InvalidArgument(
            f"no tag has the metric {listed([metric], recorded)}; tags have {first_of(sorted(recorded))}"
        )
    values = [(rule.value(each), tag.step) for each, tag in zip(metrics, tags, strict=True)]
    ranked = [(sign * value, step) for value, step in reversed(values) if value is not None]
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def metrics_of(storage: Storage, info: TagInfo) -> Metrics:
    """Return the metrics of a tag's save; none if it is not ours."""
    key = f"{info.tag}/{names.MANIFEST}"
    return load_manifest(storage.read(key), f"{storage.url}/{key}").metrics if info.ours else {}
