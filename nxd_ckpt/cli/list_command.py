"""``nxd-ckpt list``: the checkpoints in a directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size


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
    head = ("TAG", "STATE", "SAVED (UTC)", "SIZE", "TOPOLOGY", "BY", "AGE", "PARTS")
    yield from text.fitting_table(head, map(_row, tags), width)
    for tag in tags:
        name = _name(tag)
        yield from (f"{name} is incomplete: it lacks {what}" for what in tag["lacks"])
        yield from (f"{name}: {problem}" for problem in tag["problems"])


def _row(tag: dict[str, Any]) -> tuple[str, ...]:
    is_dated = tag["order_time"] is not None
    state = "latest" if tag["latest"] else "complete" if tag["complete"] else "incomplete"
    return (
        _name(tag),
        f"{state}, pinned" if tag["pinned"] else state,
        units.time_of_day(tag["order_time"]) if is_dated else "?",
        size(tag["nbytes"]),
        units.short_topology(tag["topology"]),
        text.writer(tag["written_by"]),
        units.duration(tag["age_seconds"]) if is_dated else "?",
        text.parts(tag["parts"]),
    )


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
        "lack. Columns that do not fit the terminal are left out."
    ),
    operands=(("DIR", "what is passed to save_checkpoint: a directory or URL"),),
    add_flags=_add_flags,
    run=_run,
)
