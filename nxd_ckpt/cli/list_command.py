"""``nxd-ckpt list``: the checkpoints in a directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.storage_options import add_storage_options, nested
from nxd_ckpt.core.units import size

NAME = "list"
SUMMARY = "the checkpoints in a directory"
DESCRIPTION = (
    "List the tags in a checkpoint directory, oldest first, in the order in which they became visible. "
    "Tags of neuronx-distributed 0.1 to 0.18 are listed too. Of incomplete tags, which no load takes, it says what "
    "they lack."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="what is passed to save_checkpoint: a directory or URL")
    add_storage_options(parser)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.cli.tags import directory_document

    document = directory_document(args.directory, nested(args.storage_option))
    text.show(document, _lines(document), as_json=args.json)
    return 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    tags = document["tags"]
    if not tags:
        yield f"{document['directory']}: {document['note']}"
        return
    complete = sum(tag["complete"] for tag in tags)
    yield f"{document['directory']}: {text.count(len(tags), 'tag')}, {complete} complete"
    head = ("TAG", "STATE", "SAVED (UTC)", "AGE", "BY", "TOPOLOGY", "SIZE", "PARTS")
    yield from text.table(head, map(_row, tags))
    for tag in tags:
        name = _name(tag)
        yield from (f"{name} is incomplete: it lacks {what}" for what in tag["lacks"])
        yield from (f"{name}: {problem}" for problem in tag["problems"])


def _row(tag: dict[str, Any]) -> tuple[str, ...]:
    known = tag["order_time"] is not None
    return (
        _name(tag),
        "latest" if tag["latest"] else "complete" if tag["complete"] else "incomplete",
        text.time_of_day(tag["order_time"]) if known else "?",
        text.age(tag["age_seconds"]) if known else "?",
        text.writer(tag["written_by"]),
        text.topology(tag["topology"]),
        size(tag["nbytes"]),
        text.parts(tag["parts"]),
    )


def _name(tag: dict[str, Any]) -> str:
    return tag["tag"] or "(the directory itself)"
