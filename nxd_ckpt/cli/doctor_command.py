"""``nxd-ckpt doctor``: check that a tag can be resumed from, and was resumed correctly."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command
from nxd_ckpt.cli.options import opening
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.options.execution import OpenOptions

if TYPE_CHECKING:
    from nxd_ckpt.checkpoint import Checkpoint
    from nxd_ckpt.examine.doctor import Examination


def _run(args: argparse.Namespace) -> int:
    from nxd_ckpt.examine.doctor import examine_checkpoint
    from nxd_ckpt.tag.identity import of_latest

    if args.alone and args.before is not None:
        raise argparse.ArgumentTypeError("--alone examines one tag: leave out BEFORE")

    def examine() -> Examination:
        after, before = _open_tags(args)
        return examine_checkpoint(after, before=before, progress=not args.quiet)

    examination = of_latest(True, examine)
    document = {"ok": bool(examination), **asdict(examination)}
    if args.json or examination.findings or not args.quiet:
        text.show(document, _lines(document), as_json=args.json)
    passed = not examination.findings if args.strict else bool(examination)
    return 0 if passed else 1


def _open_tags(args: argparse.Namespace) -> tuple[Checkpoint, Checkpoint | None]:
    """Open the tag and the one before it, unless there is none or --alone is given."""
    from nxd_ckpt.checkpoint import open_checkpoint
    from nxd_ckpt.storage.urls import options_for
    from nxd_ckpt.tag.listing import locate, tag_before

    def opened(path: str) -> Checkpoint:
        options = options_for(path, args.storage_options)
        return open_checkpoint(*locate(path, None, options), **opening(args, options))

    after = opened(args.tag)
    if args.before is not None:
        return after, opened(args.before)
    earlier = None if args.alone else tag_before(after.opened)
    if earlier is None:
        return after, None
    options = options_for(args.tag, args.storage_options)
    return after, open_checkpoint(locate(args.tag, None, options)[0], earlier, **opening(args, options))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    for finding in document["findings"]:
        yield f"{finding['severity']}: {finding['what']}: {finding['message']}"
    yield from (f"not examined: {problem}" for problem in document["problems"])
    problems = sum(finding["severity"] == "problem" for finding in document["findings"])
    doubts = len(document["findings"]) - problems
    yield f"{document['tag']}: {_verdict(problems, doubts)}"
    step = "" if document["step"] is None else f"step {document['step']}"
    if document["before"] is None:
        yield f"  {step or 'steps are not counted'}; examined by itself"
    else:
        was = "" if document["step_before"] is None else f" (step {document['step_before']})"
        yield f"  {step or 'steps are not counted'}; examined after {document['before']}{was}"
        if document["step"] is not None and document["step"] < (document["step_before"] or 0):
            yield "  (if the tags were named in the wrong order: as for diff, the earlier one is the first)"
    yield f"  {units.count(document['parameters'], 'parameter')}, {size(document['nbytes'])} were read and verified"


def _verdict(problems: int, doubts: int) -> str:
    counts = [units.count(number, noun) for number, noun in ((problems, "problem"), (doubts, "doubt")) if number]
    return ", ".join(counts) or "ok"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alone", action="store_true", help="examine the tag by itself, without the one before")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 for doubts too")


DOCTOR = Command(
    "doctor",
    example="nxd-ckpt doctor run1",
    summary="check that a checkpoint can be resumed from, and was resumed correctly",
    description=(
        "Examine a tag, and whether it continues the one before it: steps, moments and weights moved, and by amounts "
        "that their optimizer can cause; master weights round to the weights; no shards are exchanged; scheduler, "
        "learning rates and data position agree with the steps. For a directory, its latest tag is compared with the "
        "one before. Everything is read and verified. Exit code 1 if there is a problem. Doubts, which may have an "
        "innocent reason, are only shown, unless --strict is given."
    ),
    operands=(
        ("BEFORE?", "an earlier tag (default: the one before TAG)"),
        ("TAG", "a tag, or a directory for its latest one; or their URL"),
    ),
    add_flags=_add_flags,
    options=OpenOptions,
    quiet=True,
    run=_run,
)
