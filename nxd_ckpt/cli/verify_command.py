"""``nxd-ckpt verify``: whether every byte is what was written."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.storage_options import add_storage_option
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.errors import CorruptCheckpoint

NAME = "verify"
EXAMPLE = "nxd-ckpt verify run1"
SUMMARY = "verify that a checkpoint is what was written"
DESCRIPTION = (
    "Read every file of a complete tag and compare it with the digests that were recorded. For a tag of nxd_ckpt they "
    "cover every byte. Files of neuronx-distributed carry a CRC-32 for each tensor and each pickle: these are "
    "compared, files that others refer to must be there, and bytes without a digest are counted. "
    "Exit code 1 if there is a problem."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a checkpoint directory or URL, or a tag in it")
    parser.add_argument("tag", metavar="TAG", nargs="?", help="which one (default: the latest complete one)")
    parser.add_argument("--all", action="store_true", help="verify every complete tag in DIR, oldest first")
    add_storage_option(parser)
    text.add_quiet(parser)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.tag.listing import locate, tags_to_verify

    options = args.storage_options
    if not args.all:
        document = _verified(*locate(args.directory, args.tag, options), args)
        problems = document["problems"]
        lines = _lines(document)
    elif args.tag is not None:
        raise argparse.ArgumentTypeError("--all verifies every tag: leave out TAG")
    else:
        found = [_verified(args.directory, tag, args) for tag in tags_to_verify(args.directory, options)]
        problems = [problem for one in found for problem in one["problems"]]
        document = {"ok": not problems, "tags": found}
        lines = (line for one in found for line in _lines(one))
    if args.json or problems or not args.quiet:
        text.show(document, lines, as_json=args.json)
    return 1 if problems else 0


def _verified(directory: str, tag: str | None, args: argparse.Namespace) -> dict[str, Any]:
    from nxd_ckpt.storage.fsspec_storage import without_password
    from nxd_ckpt.tag.verify import Verification, verify_checkpoint

    try:
        found = verify_checkpoint(directory, tag, storage_options=args.storage_options, progress=not args.quiet)
    except CorruptCheckpoint as error:
        if not args.all:
            raise
        found = Verification(tag or "", 0, 0, (str(error),))
    return {
        "directory": without_password(directory),
        "tag": found.tag,
        "ok": not found.problems,
        "verified_by": "index" if found.ours else "zip",
        "files": found.files,
        "nbytes": found.nbytes,
        "verified_nbytes": found.verified,
        "undigested_nbytes": found.undigested,
        "problems": list(found.problems),
    }


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield from (f"problem: {problem}" for problem in document["problems"])
    problems = units.count(len(document["problems"]), "problem")
    where = "/".join(filter(None, (document["directory"], document["tag"])))
    yield f"{where}: {'ok' if document['ok'] else problems}"
    read = f"{units.count(document['files'], 'file')}, {size(document['nbytes'])}"
    verified = document["verified_nbytes"]
    if document["verified_by"] == "index":
        yield f"  read {read}; {size(verified)} are what nxd_ckpt wrote, byte for byte"
        return
    undigested = document["undigested_nbytes"]
    around = document["nbytes"] - verified - undigested
    yield f"  read {read}; {size(verified)} equal the CRC-32 in their file"
    yield (
        f"  not verified: {size(undigested)} of contents without a digest, {size(around)} of headers and "
        f"padding{'' if document['ok'] else ', and what is damaged'}"
    )
