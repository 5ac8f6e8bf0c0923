"""Which pipeline stage holds which names, after their number changed. Pure.

A live pipeline model knows its stages; this is for tools, which have nothing but the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nxd_ckpt.errors import TopologyMismatch

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def redistribute_layers(saved: Sequence[Sequence[str]], pp: int) -> list[list[str]]:
    """The names of each of ``pp`` stages, from those of each saved stage, in the model's order.

    One stage holds all of them. Else repeated layers (the most numerous ``prefix.N.``) are spread evenly, where that
    leaves some over one more to each of the last stages (as NxD's pipeline.partition does); what comes before them in
    the model goes to the first stage, what comes after to the last, and a name that several stages held (a tied
    embedding) to both of these.

    Raises:
        TopologyMismatch: fewer layers than stages.
    """
    if len(saved) == pp:
        return [list(names) for names in saved]
    order = list(dict.fromkeys(name for names in saved for name in names))
    if pp == 1:
        return [order]
    layers = _layers(order)
    count = len(set(layers.values()))
    if count < pp:
        raise TopologyMismatch(
            f"{pp} pipeline stages for {count} repeated layers: each stage needs one; choose a smaller pp"
        )
    sizes = [count // pp + (stage >= pp - count % pp) for stage in range(pp)]
    stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    rank_of = dict(zip(sorted(set(layers.values())), stage_of, strict=True))
    last_layer = max(index for index, name in enumerate(order) if name in layers)
    stages: list[list[str]] = [[] for _ in range(pp)]
    for index, name in enumerate(order):
        if name in layers:
            stages[rank_of[layers[name]]].append(name)
        elif sum(name in names for names in saved) > 1:
            stages[0].append(name)
            stages[-1].append(name)
        else:
            stages[0 if index < last_layer else -1].append(name)
    return stages


def interleaved(chunks: Sequence[Sequence[str]], pp: int) -> list[list[str]]:
    """The names of each of ``pp`` ranks of an interleaved pipeline, to which chunks are dealt out in turn.

    (As NxD's pipeline.partition.stage_to_pipeline_parallel_rank; a rank saves its chunks as one model.)
    """
    return [[name for chunk in chunks[rank::pp] for name in chunk] for rank in range(pp)]


def _layers(names: Sequence[str]) -> Mapping[str, int]:
    """The layer of every name that is in one: by the prefix that has the most numbers after it."""
    numbers: dict[str, set[int]] = {}
    found: dict[str, list[tuple[str, int]]] = {}
    for name in names:
        for match in _NUMBER.finditer(name):
            prefix, number = name[: match.start()], int(match[1])
            numbers.setdefault(prefix, set()).add(number)
            found.setdefault(name, []).append((prefix, number))
    if not numbers:
        return {}
    best = max(numbers, key=lambda prefix: (len(numbers[prefix]), -len(prefix)))
    return {name: number for name, places in found.items() for prefix, number in places if prefix == best}
