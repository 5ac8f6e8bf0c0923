"""``nxd-ckpt cp``: a tag from one place to another."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.execution_options import add_output, output_of, show_done
from nxd_ckpt.core.units import size

NAME = "cp"
SUMMARY = "copy a checkpoint between any two places"
DESCRIPTION = (
    "Make an exact copy of one tag, of nxd_ckpt's or neuronx-distributed's, in another directory or store. Every file "
    "is verified by its digests on the way, and the copy appears once all of it is durable. A copy that is interrupted "
    "goes on when it is started again. It keeps the time of its save, and with that its place among other tags."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a tag's directory, or its URL")
    parser.add_argument("target", metavar="DST", help="the tag that is made: a directory or URL that ends in its name")
    parser.add_argument(
        "--hard-links",
        action="store_true",
        help="link files where that works and is safe: within one file system, and those of nxd_ckpt",
    )
    parser.add_argument("--num-workers", type=int, default=4, metavar="N", help="files copied at once (default: 4)")
    add_output(
        parser, replaces="an existing checkpoint at DST", dry_run="say what would be copied, and write nothing"
    )


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import copy_checkpoint

    done = copy_checkpoint(
        args.source,
        args.target,
        hard_links=args.hard_links,
        num_workers=args.num_workers,
        **output_of(args),
    )
    show_done(args, done, _lines)
    return 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    whole = f"{text.count(document['files'], 'file')}, {size(document['nbytes'])}"
    if document["dry_run"]:
        yield f"{document['source']} would be copied to {document['target']}: {whole}"
        return
    yield f"{document['source']} is copied to {document['target']}: {whole}"
    if document["linked"]:
        yield f"  {text.count(document['linked'], 'file')} linked"
    if document["kept"]:
        kept = text.count(document["kept"], "file")
        yield f"  {kept} there already, and verified; {size(document['copied_nbytes'])} new"
