"""Names of each pipeline stage after the number of stages changed. Pure.

A live pipeline model knows its stages; this is for tools, which have nothing but the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nxd_ckpt.errors import TopologyMismatch

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def redistribute_layers(saved: Sequence[Sequence[str]], pp: int) -> list[list[str]]:
    """Return the names of each of ``pp`` stages, in the model's order, from the names of each saved stage.

    A single stage holds all names. Otherwise the repeated layers (the most numerous ``prefix.N.``) are spread evenly;
    a remainder goes to the last stages, one layer each (as in NxD's pipeline.partition). Names before the layers go to
    the first stage, names after them to the last. A name that several stages held (a tied embedding) goes to both.

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
    """Return the names of each of ``pp`` ranks of an interleaved pipeline: chunks are dealt to the ranks in turn.

    This is NxD's pipeline.partition.stage_to_pipeline_parallel_rank. A rank saves its chunks as one model.
    """
    return [[name for chunk in chunks[rank::pp] for name in chunk] for rank in range(pp)]


def _layers(names: Sequence[str]) -> Mapping[str, int]:
    """Return the layer number of every name that has one, for the prefix with the most different numbers."""
    numbers: dict[str, set[int]] = {}
    numbers_by_name: dict[str, list[tuple[str, int]]] = {}
    for name in names:
        for match in _NUMBER.finditer(name):
            prefix, number = name[: match.start()], int(match[1])
            numbers.setdefault(prefix, set()).add(number)
            numbers_by_name.setdefault(name, []).append((prefix, number))
    if not numbers:
        return {}
    best = max(numbers, key=lambda prefix: (len(numbers[prefix]), -len(prefix)))
    return {name: number for name, places in numbers_by_name.items() for prefix, number in places if prefix == best}
