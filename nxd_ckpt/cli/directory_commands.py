"""Commands that show a whole directory: ``list``, ``watch`` and ``report``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from time import sleep, strftime
from typing import TYPE_CHECKING, Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command
from nxd_ckpt.core import units
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.units import size
from nxd_ckpt.examine.run_state import save_text

if TYPE_CHECKING:
    from nxd_ckpt.output.locations import Location

_METRICS = 3
"""Column of the metrics: the first after what identifies a tag."""
_SHOWN = 2
"""Metrics of a tag that are shown on a terminal; --wide shows all. So many tags are named that hold files of others."""


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
    complete = sum(tag["complete"] and not tag["problems"] for tag in tags)
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
    guests = {_name(tag): tag["guests"] for tag in tags if tag["guests"]}
    for name in list(guests)[:_SHOWN]:
        yield f"{name} holds files of others, which carry no digest: {first_of(guests[name])}"
    if len(guests) > _SHOWN:
        yield f"and so do {units.count(len(guests) - _SHOWN, 'other tag')}"
    if complete:
        yield "bytes are not read here; nxd-ckpt verify --all reads them"


def _metrics(metrics: Mapping[str, float | None], shown: int | None) -> str:
    more = "" if shown is None or len(metrics) <= shown else f" and {len(metrics) - shown} more"
    return ", ".join(f"{name} {text.metric(value)}" for name, value in [*metrics.items()][:shown]) + more


def _row(tag: dict[str, Any]) -> list[str]:
    is_dated = tag["order_time"] is not None
    state = "latest" if tag["latest"] else "complete" if tag["complete"] else "incomplete"
    if tag["problems"]:
        state = "latest, unreadable" if tag["latest"] else "unreadable"
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


LIST = Command(
    "list",
    example="nxd-ckpt list run1",
    summary="list the checkpoints in a directory",
    description=(
        "List the tags in a checkpoint directory, oldest first, in the order in which they became visible, including "
        "tags of neuronx-distributed 0.1 to 0.18, whose SAVED is the time of their file 'done'. A tag is complete if "
        "its save ended; whether bytes changed since, verify tells. For incomplete tags, which no load accepts, it "
        "shows what they lack. Metrics are those that were passed to the save. Columns that do not fit the terminal "
        "are left out."
    ),
    operands=(("DIR", "what is passed to save_checkpoint: a directory or URL"),),
    switches={"--wide": "show all columns, whatever the width of the terminal"},
    run=_run,
)


_LONGEST = 86400.0
"""Maximum seconds between two looks."""


def _watch(args: argparse.Namespace) -> int:
    if not 0 <= args.interval <= _LONGEST:
        raise argparse.ArgumentTypeError(f"--interval must be from 0 to {_LONGEST:.0f} seconds, found {args.interval}")
    before: dict[str, Any] | None = None
    while True:
        now = _look(args.dir, args.storage_options, may_be_absent=not args.once)
        if args.json and now != before:
            print(json.dumps(now, allow_nan=False, indent=2 if args.once else None), flush=True)
        elif not args.json:
            text.show(now, _first_lines(now) if before is None else _changes(before, now), as_json=False)
        if args.once:
            return 0
        before = now
        sleep(args.interval)


def _look(directory: str, options: Any, may_be_absent: bool) -> dict[str, Any]:
    from dataclasses import asdict

    from nxd_ckpt.commit.voting import saves_in_flight
    from nxd_ckpt.layouts.files import require_directory
    from nxd_ckpt.storage.urls import open_storage
    from nxd_ckpt.tag.listing import directory_document

    storage = open_storage(directory, storage_options=options)
    if may_be_absent and not storage.is_dir("") and not storage.is_file(""):
        return {"directory": storage.url, "latest": None, "tags": {}, "saves": [], "exists": False, "note": None}
    require_directory(storage)
    saves = [asdict(save) for save in saves_in_flight(storage)]
    listed = directory_document(directory, options, only_look=True)
    complete = (tag for tag in listed["tags"] if tag["complete"])
    tags = {tag["tag"]: {name: tag[name] for name in ("order_time", "nbytes", "topology")} for tag in complete}
    about = {"directory": listed["directory"], "latest": listed["latest"], "note": listed["note"]}
    return {**about, "tags": tags, "saves": saves, "exists": True}


def _first_lines(now: dict[str, Any]) -> Iterator[str]:
    if not now["exists"]:
        yield f"{now['directory']}: there is no such directory yet; waiting for the first save"
        return
    latest = f", the latest is {now['latest']}" if now["latest"] else ""
    yield f"{now['directory']}: {units.count(len(now['tags']), 'complete tag')}{latest}"
    if now["note"]:
        yield f"  {now['note']}"
    for save in now["saves"]:
        yield save_text(save)
    if not now["saves"]:
        yield "no save is in flight"


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Return a line for each change, with the time of day."""
    clock = strftime("%H:%M:%S")
    were = {save["attempt"]: save for save in before["saves"]}
    yield from (f"{clock}  {save_text(save)}" for save in now["saves"] if were.get(save["attempt"]) != save)
    ended = {save["tag"] for save in before["saves"]} - {None, *(save["tag"] for save in now["saves"])}
    for tag, about in now["tags"].items():
        if tag not in before["tags"] or tag in ended or before["tags"][tag]["order_time"] != about["order_time"]:
            yield f"{clock}  {tag}: complete, {size(about['nbytes'])} of {units.short_topology(about['topology'])}"
    yield from (f"{clock}  {tag}: its save ended without a tag" for tag in sorted(ended - now["tags"].keys()))
    yield from (f"{clock}  {tag}: removed" for tag in before["tags"] if tag not in now["tags"])


def _add_watch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=2.0, help="between two looks (default: 2)")


WATCH = Command(
    "watch",
    example="nxd-ckpt watch /fsx/run7",
    summary="show the saves of a running job as they happen",
    description=(
        "Show which saves are in flight in a directory, how many ranks have written their part, and how much is "
        "written. Then, until it is interrupted, print a line for every change: saves that begin, progress, become "
        "visible or fail, and tags that are replaced or removed. It waits for a directory that does not exist yet, "
        "except with --once. It changes nothing, and does not disturb the job."
    ),
    operands=(("DIR", "a checkpoint directory or URL"),),
    switches={"--once": "look once, and end"},
    add_flags=_add_watch_flags,
    run=_watch,
)


def _report(args: argparse.Namespace) -> int:
    from nxd_ckpt.errors import CheckpointNotFound
    from nxd_ckpt.examine.report_document import report_document
    from nxd_ckpt.examine.report_page import page_of
    from nxd_ckpt.output.locations import location_of, refuse_inside_tag
    from nxd_ckpt.tag.identity import of_latest

    if args.output is None and not args.json:
        raise argparse.ArgumentTypeError("say where the page belongs: -o report.html; or --json for the numbers")
    if args.count < 0:
        raise argparse.ArgumentTypeError(f"--count must be 0 or more, found {args.count}")

    output = None if args.output is None else location_of(args.output, "output", None)
    if output is not None:
        refuse_inside_tag(output, output.open())
        _refuse_other_kinds(output)
    document = of_latest(
        True,
        lambda: report_document(
            args.dir,
            args.storage_options,
            count=args.count,
            doctor=args.doctor,
            progress=not args.quiet,
        ),
    )
    lines = []
    if output is not None:
        page = page_of(document).encode()
        output.open().write(output.name, page)
        problems = units.count(len(document["problems"]) + len(document["findings"]), "problem")
        lines = [f"{args.output}: {units.count(len(document['tags']), 'tag')}, {problems}; {size(len(page))}"]
    if args.json or not args.quiet:
        text.show(document, lines, as_json=args.json)
    if document["note"] is not None:
        raise CheckpointNotFound(f"{document['directory']}: {document['note']}")
    return 0


def _refuse_other_kinds(output: Location) -> None:
    """Raise InvalidArgument if the output exists and is no file: a rename would replace a device by the page."""
    from nxd_ckpt.errors import InvalidArgument, MalformedFile

    try:
        with suppress(FileNotFoundError):
            output.open().size(output.name)
    except MalformedFile as error:
        raise InvalidArgument(f"output {error}; choose another path") from error


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (needed without --json)")
    parser.add_argument(
        "--count",
        metavar="N",
        type=int,
        default=2,
        help="read the tensors of the N latest tags that have no stored statistics, and of older ones until one has "
        "finite values only (default: 2)",
    )
    parser.add_argument("--doctor", action="store_true", help="examine the latest tag as nxd-ckpt doctor does")


REPORT = Command(
    "report",
    example="nxd-ckpt report run1 -o report.html",
    summary="write a page that shows the checkpoints in a directory",
    description=(
        "Write one HTML file that shows a directory of checkpoints, or a tag: first whether the run is healthy and "
        "from which tag it can be resumed, then metrics, seconds and sizes of the saves, ranks, and the health of the "
        "tensors: norms over tags, means, NaN, zeros. It needs no network, and runs nothing from a checkpoint. The "
        "statistics are stored beside the tags, in .nxd_ckpt/statistics, so that the next report reads new tags only. "
        "Problems are on the page; the exit code is 1 only without a complete tag, which the page says too."
    ),
    operands=(("DIR", "a checkpoint directory or URL, or a tag in it"),),
    add_flags=_add_report_flags,
    quiet=True,
    run=_report,
)
