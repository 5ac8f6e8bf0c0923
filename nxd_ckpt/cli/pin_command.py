"""``nxd-ckpt pin``: a tag that no rule removes."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli import text
from nxd_ckpt.cli.storage_options import add_storage_option

NAME = "pin"
EXAMPLE = "nxd-ckpt pin run1 step_300"
SUMMARY = "keep a checkpoint whatever retention says"
DESCRIPTION = (
    "Pin a complete tag: neither a job's retention nor prune removes it, until it is unpinned. That goes by its name, "
    "so a tag that is saved again stays pinned. A live job may save to the directory meanwhile."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a checkpoint directory or URL")
    parser.add_argument("tag", metavar="TAG", help="which tag in it")
    add_storage_option(parser)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.prune import pin_checkpoint

    pin_checkpoint(args.directory, args.tag, storage_options=args.storage_options)
    text.show({"tag": args.tag, "pinned": True}, [f"{args.tag} is pinned"], as_json=args.json)
    return 0
