"""``nxd-ckpt report``: a page that shows a checkpoint directory."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size

if TYPE_CHECKING:
    from nxd_ckpt.output.locations import Location


def _run(args: argparse.Namespace) -> int:
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
            diff=args.diff,
            progress=not args.quiet,
            tiers=args.tier,
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


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (needed without --json)")
    parser.add_argument(
        "--count",
        metavar="N",
        type=int,
        default=2,
        help="read the tensors of the N latest tags that have no stored statistics (default: 2)",
    )
    parser.add_argument(
        "--diff", action="store_true", help="compare the weights of the latest tag with the one before, layer by layer"
    )
    parser.add_argument("--doctor", action="store_true", help="examine the latest tag as nxd-ckpt doctor does")
    parser.add_argument(
        "--tier",
        metavar="URL",
        action="append",
        default=[],
        help="another tier of the job: show which tags it has, and how far it lags behind; repeatable",
    )


REPORT = Command(
    "report",
    example="nxd-ckpt report run1 -o report.html",
    summary="write a page that shows the checkpoints in a directory",
    description=(
        "Write one HTML file that shows a directory of checkpoints, or a tag: first whether the run is healthy and "
        "from which tag it can be resumed, then metrics, seconds and sizes of the saves, ranks, bytes by module, and "
        "the health of the tensors: norms over tags, means, NaN, zeros. It needs no network, and runs nothing from a "
        "checkpoint. The statistics are stored beside the tags, so that the next report reads new tags only. For a "
        "Hugging Face directory it shows the tensors' sizes. Without a complete tag, the page says so, and the exit "
        "code is 1."
    ),
    operands=(("DIR", "a checkpoint directory or URL, or a tag in it"),),
    add_flags=_add_flags,
    quiet=True,
    run=_run,
)
