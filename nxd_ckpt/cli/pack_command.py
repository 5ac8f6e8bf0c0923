"""``nxd-ckpt pack``: a tag as one tar file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.cli.output import show_done
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.options.tags import PackOptions

NAME = "pack"
EXAMPLE = "nxd-ckpt pack run1/step_300 step_300.tar"
SUMMARY = "pack a checkpoint into one tar file"
DESCRIPTION = (
    "Make a tar file of one tag, of nxd_ckpt's or neuronx-distributed's, exactly as it is. Every file is verified by "
    "its digests on the way, and the archive appears once it is whole. It takes the place of a checkpoint directory in "
    "every command and function that reads, without being unpacked; a compressed one is unpacked first, to $TMPDIR."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tag", metavar="TAG", help="a tag's directory, or its URL")
    out = "the archive that is made: a path or URL that ends in .tar, .tar.zst, .tar.gz or .tgz"
    parser.add_argument("out", metavar="OUT", help=out)
    add_options(parser, PackOptions)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import pack_checkpoint

    done = pack_checkpoint(args.tag, args.out, **options_of(args, PackOptions))
    show_done(args, done, _lines)
    return 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    verb = "would be" if document["dry_run"] else "is"
    whole = f"{units.count(document['files'], 'file')}, {size(document['nbytes'])}"
    yield f"{document['source']} {verb} packed as {document['target']}: {whole}"
