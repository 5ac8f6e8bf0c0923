"""``nxd-ckpt cp``: a tag from one place to another."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.cli.output import show_done
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.options.tags import CopyOptions

NAME = "cp"
EXAMPLE = "nxd-ckpt cp run1/step_300 s3://bucket/run1/step_300"
SUMMARY = "copy a checkpoint between any two places"
DESCRIPTION = (
    "Make an exact copy of one tag, of nxd_ckpt's or neuronx-distributed's, in another directory or store. Every file "
    "is verified by its digests on the way, and the copy appears once all of it is durable. A copy that is interrupted "
    "goes on when it is started again. It keeps the time of its save, and with that its place among other tags."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a tag's directory, or its URL")
    parser.add_argument("target", metavar="DST", help="the tag that is made: a directory or URL that ends in its name")
    add_options(parser, CopyOptions)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import copy_checkpoint

    done = copy_checkpoint(args.source, args.target, **options_of(args, CopyOptions))
    show_done(args, done, _lines)
    return 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    whole = f"{units.count(document['files'], 'file')}, {size(document['nbytes'])}"
    if document["dry_run"]:
        yield f"{document['source']} would be copied to {document['target']}: {whole}"
        return
    yield f"{document['source']} is copied to {document['target']}: {whole}"
    if document["linked"]:
        yield f"  {units.count(document['linked'], 'file')} linked"
    if document["kept"]:
        kept = units.count(document["kept"], "file")
        yield f"  {kept} there already, and verified; {size(document['copied_nbytes'])} new"
