"""``nxd-ckpt unpin``: a tag that is left to the rules again."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli import pin_command, text

NAME = "unpin"
EXAMPLE = "nxd-ckpt unpin run1 step_300"
SUMMARY = "leave a pinned checkpoint to retention again"
DESCRIPTION = "Undo what pin did. The tag itself may be gone; one that is not pinned stays as it is."

add_arguments = pin_command.add_arguments


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.prune import unpin_checkpoint

    was_pinned = unpin_checkpoint(args.directory, args.tag, storage_options=args.storage_options)
    line = f"{args.tag} is no longer pinned" if was_pinned else f"{args.tag} was not pinned"
    text.show({"tag": args.tag, "pinned": False, "was_pinned": was_pinned}, [line], as_json=args.json)
    return 0
