"""``nxd-ckpt watch``: the saves of a running job, as they happen."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from time import sleep, strftime
from typing import TYPE_CHECKING, Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.examine.run_state import save_text

if TYPE_CHECKING:
    from nxd_ckpt.examine.run_state import StateLine
    from nxd_ckpt.tag.listing import TagSummaries

_LONGEST = 86400.0
"""Maximum seconds between two looks."""


def _run(args: argparse.Namespace) -> int:
    if not 0 <= args.interval <= _LONGEST:
        raise argparse.ArgumentTypeError(f"--interval must be from 0 to {_LONGEST:.0f} seconds, found {args.interval}")
    before: dict[str, Any] | None = None
    summaries: TagSummaries = {}
    while True:
        now, state = _look(args.dir, args.storage_options, summaries, may_be_absent=not args.once)
        if args.json and now != before:
            print(json.dumps(now, allow_nan=False, indent=2 if args.once else None), flush=True)
        elif not args.json:
            text.show(now, _first_lines(now, state) if before is None else _changes(before, now), as_json=False)
        if args.once:
            return 0
        before = now
        sleep(args.interval)


def _look(
    directory: str, options: Any, summaries: TagSummaries, may_be_absent: bool
) -> tuple[dict[str, Any], list[StateLine]]:
    """Return the document, and the lines that say from which tag the run can be resumed, and how old that is."""
    from dataclasses import asdict

    from nxd_ckpt.commit.voting import saves_in_flight
    from nxd_ckpt.examine.run_state import age_line, resume_line
    from nxd_ckpt.storage.urls import open_storage
    from nxd_ckpt.tag.directory import require_directory
    from nxd_ckpt.tag.listing import watched_document

    storage = open_storage(directory, storage_options=options)
    if may_be_absent and not storage.is_dir("") and not storage.is_file(""):
        return {"directory": storage.url, "latest": None, "tags": {}, "saves": [], "exists": False}, []
    require_directory(storage)
    saves = [asdict(save) for save in saves_in_flight(storage)]
    listed = watched_document(directory, options, summaries)
    complete = (tag for tag in listed["tags"] if tag["complete"])
    tags = {tag["tag"]: {name: tag[name] for name in ("order_time", "nbytes", "topology")} for tag in complete}
    state = (resume_line(listed["tags"], {}, listed["note"]), age_line(listed["tags"], saves))
    now = {"directory": listed["directory"], "latest": listed["latest"], "tags": tags, "saves": saves, "exists": True}
    return now, [line for line in state if line is not None]


def _first_lines(now: dict[str, Any], state: list[StateLine]) -> Iterator[str]:
    if not now["exists"]:
        yield f"{now['directory']}: there is no such directory yet; waiting for the first save"
        return
    yield f"{now['directory']}: {units.count(len(now['tags']), 'complete tag')}"
    for level, title, said in state:
        yield f"  {'' if level == 'good' else f'{level}: '}{title}: {said}"
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


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="look once, and end")
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
    add_flags=_add_flags,
    run=_run,
)
