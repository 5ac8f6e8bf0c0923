"""``nxd-ckpt verify``: check that every byte is what was written."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.errors import CorruptCheckpoint


def _run(args: argparse.Namespace) -> int:
    from nxd_ckpt.tag.listing import locate, tags_to_verify

    options = args.storage_options
    if not args.all:
        document = _verify(*locate(args.dir, args.tag, options), args)
        problems = document["problems"]
        lines = _lines(document)
    elif args.tag is not None:
        raise argparse.ArgumentTypeError("--all verifies every tag: leave out TAG")
    else:
        documents = [_verify(args.dir, tag, args) for tag in tags_to_verify(args.dir, options)]
        problems = [problem for document_of_tag in documents for problem in document_of_tag["problems"]]
        document = {"ok": not problems, "tags": documents}
        lines = (line for document_of_tag in documents for line in _lines(document_of_tag))
    if args.json or problems or not args.quiet:
        text.show(document, lines, as_json=args.json)
    return 1 if problems else 0


def _verify(directory: str, tag: str | None, args: argparse.Namespace) -> dict[str, Any]:
    from nxd_ckpt.storage.fsspec_storage import without_password
    from nxd_ckpt.tag.verify import Verification, verify_checkpoint

    try:
        verification = verify_checkpoint(directory, tag, storage_options=args.storage_options, progress=not args.quiet)
    except CorruptCheckpoint as error:
        if not args.all:
            raise
        verification = Verification(tag or "", 0, 0, (str(error),))
    return {
        "directory": without_password(directory),
        "tag": verification.tag,
        "ok": not verification.problems,
        "verified_by": "index" if verification.ours else "zip",
        "files": verification.files,
        "nbytes": verification.nbytes,
        "verified_nbytes": verification.verified,
        "undigested_nbytes": verification.undigested,
        "problems": list(verification.problems),
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


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="verify every complete tag in DIR, oldest first")


VERIFY = Command(
    "verify",
    example="nxd-ckpt verify run1",
    summary="verify that a checkpoint is what was written",
    description=(
        "Read every file of a complete tag and compare it with the recorded digests. For a tag of nxd_ckpt they cover "
        "every byte. Files of neuronx-distributed carry a CRC-32 for each tensor and each pickle: these are compared, "
        "files that others refer to must exist, and bytes without a digest are counted. Exit code 1 if there is a "
        "problem."
    ),
    operands=(
        ("DIR", "a checkpoint directory or URL, or a tag in it"),
        ("TAG?", "which one (default: the latest complete one)"),
    ),
    add_flags=_add_flags,
    quiet=True,
    run=_run,
)
