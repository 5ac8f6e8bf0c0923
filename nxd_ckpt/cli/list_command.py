"""``nxd-ckpt list``: the checkpoints in a directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.storage_options import add_storage_option
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size

NAME = "list"
EXAMPLE = "nxd-ckpt list run1"
SUMMARY = "the checkpoints in a directory"
DESCRIPTION = (
    "List the tags in a checkpoint directory, oldest first, in the order in which they became visible. "
    "Tags of neuronx-distributed 0.1 to 0.18 are listed too. Of incomplete tags, which no load takes, it says what "
    "they lack. Columns that the terminal is too narrow for are left out."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="what is passed to save_checkpoint: a directory or URL")
    parser.add_argument("--wide", action="store_true", help="show all columns, whatever the width of the terminal")
    add_storage_option(parser)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.tag.listing import directory_document

    document = directory_document(args.directory, args.storage_options)
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
    known = tag["order_time"] is not None
    state = "latest" if tag["latest"] else "complete" if tag["complete"] else "incomplete"
    return (
        _name(tag),
        f"{state}, pinned" if tag["pinned"] else state,
        units.time_of_day(tag["order_time"]) if known else "?",
        size(tag["nbytes"]),
        units.short_topology(tag["topology"]),
        text.writer(tag["written_by"]),
        text.age(tag["age_seconds"]) if known else "?",
        text.parts(tag["parts"]),
    )


def _name(tag: dict[str, Any]) -> str:
    return tag["tag"] or "(the directory itself)"
