"""``nxd-ckpt pack``: a tag as one tar file."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from nxd_ckpt.cli import text
from nxd_ckpt.cli.means import output_of
from nxd_ckpt.cli.storage_options import add_storage_options
from nxd_ckpt.core.units import size

NAME = "pack"
SUMMARY = "pack a checkpoint into one tar file"
DESCRIPTION = (
    "Make a tar file of one tag, of nxd_ckpt's or neuronx-distributed's, exactly as it is. Every file is proved by its "
    "digests on the way, and the archive appears once it is whole. It takes the place of a checkpoint directory in "
    "every command and function that reads, without being unpacked; a compressed one is unpacked first, to $TMPDIR."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tag", metavar="TAG", help="a tag's directory, or its URL")
    out = "the archive that is made: a path or URL that ends in .tar, .tar.zst, .tar.gz or .tgz"
    parser.add_argument("out", metavar="OUT", help=out)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file at OUT")
    add_storage_options(parser, output=True)
    text.add_quiet(parser)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import pack_checkpoint

    done = pack_checkpoint(
        args.tag,
        args.out,
        **output_of(args),
    )
    document = asdict(done)
    if args.json or not args.quiet:
        line = f"{done.source} is packed as {done.target}: {text.count(done.files, 'file')}, {size(done.nbytes)}"
        text.show(document, [line], as_json=args.json)
    return 0
