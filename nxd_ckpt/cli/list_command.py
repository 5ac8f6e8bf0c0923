"""``nxd-ckpt list``: the checkpoints in a directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size

_METRICS = 3
"""Column of the metrics: the first after what identifies a tag."""
_SHOWN = 2
"""Metrics of a tag that are shown on a terminal; --wide shows all."""


def _run(args: argparse.Namespace) -> int:
    from nxd_ckpt.tag.listing import directory_document

    document = directory_document(args.dir, args.storage_options)
    width = None if args.wide else text.width()
    text.show(document, _lines(document, width), as_json=args.json, wide=args.wide)
    return 0


def _lines(document: dict[str, Any], width: int | None) -> Iterator[str]:
    tags = document["tags"]
    if not tags:
        yield f"{document['directory']}: {document['note']}"
        return
    complete = sum(tag["complete"] for tag in tags)
    yield f"{document['directory']}: {units.count(len(tags), 'tag')}, {complete} complete"
    head = ["TAG", "STATE", "SAVED (UTC)", "SIZE", "TOPOLOGY", "BY", "AGE", "PARTS"]
    rows = [_row(tag) for tag in tags]
    if any(tag["metrics"] for tag in tags):
        head.insert(_METRICS, "METRICS")
        for row, tag in zip(rows, tags, strict=True):
            row.insert(_METRICS, _metrics(tag["metrics"], None if width is None else _SHOWN))
    yield from text.fitting_table(head, rows, width)
    for tag in tags:
        name = _name(tag)
        yield from (f"{name} is incomplete: it lacks {what}" for what in tag["lacks"])
        yield from (f"{name}: {problem}" for problem in tag["problems"])


def _metrics(metrics: Mapping[str, float | None], shown: int | None) -> str:
    more = "" if shown is None or len(metrics) <= shown else f" and {len(metrics) - shown} more"
    return ", ".join(f"{name} {text.metric(value)}" for name, value in [*metrics.items()][:shown]) + more


def _row(tag: dict[str, Any]) -> list[str]:
    is_dated = tag["order_time"] is not None
    state = "latest" if tag["latest"] else "complete" if tag["complete"] else "incomplete"
    return [
        _name(tag),
        f"{state}, pinned" if tag["pinned"] else state,
        units.time_of_day(tag["order_time"]) if is_dated else "?",
        size(tag["nbytes"]),
        units.short_topology(tag["topology"]),
        text.writer(tag["written_by"]),
        units.duration(tag["age_seconds"]) if is_dated else "?",
        text.parts(tag["parts"]),
    ]


def _name(tag: dict[str, Any]) -> str:
    return tag["tag"] or "(the directory itself)"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wide", action="store_true", help="show all columns, whatever the width of the terminal")


LIST = Command(
    "list",
    example="nxd-ckpt list run1",
    summary="list the checkpoints in a directory",
    description=(
        "List the tags in a checkpoint directory, oldest first, in the order in which they became visible, including "
        "tags of neuronx-distributed 0.1 to 0.18. For incomplete tags, which no load accepts, it shows what they "
        "lack. Metrics are those that were passed to the save. Columns that do not fit the terminal are left out."
    ),
    operands=(("DIR", "what is passed to save_checkpoint: a directory or URL"),),
    add_flags=_add_flags,
    run=_run,
)
