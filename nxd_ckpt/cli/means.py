"""What all conversions have: how they work, and where the output goes."""

from __future__ import annotations

import argparse
from typing import Any

from nxd_ckpt.cli.storage_options import add_storage_options, nested


def add_means(parser: argparse.ArgumentParser) -> None:
    """The options of conversions whose work can be shared."""
    parser.add_argument("--num_workers", type=int, default=1, metavar="N", help="processes on this host (default: 1)")
    add_all_ranks(parser)
    add_output(parser)


def add_all_ranks(parser: argparse.ArgumentParser) -> None:
    """Whether other processes, perhaps on other hosts, share the work."""
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="share the work among all processes that torchrun started; each must run this same command",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Those of them that say where and how the output is made."""
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing output, once the conversion has succeeded"
    )
    add_storage_options(parser, output=True)
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def means_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same as keyword arguments of the conversions' functions."""
    return {"num_workers": args.num_workers, "all_ranks": args.all_ranks, **output_of(args)}


def output_of(args: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_output` added, likewise."""
    return {
        "overwrite": args.overwrite,
        "storage_options": nested(args.storage_option),
        "output_options": nested(args.output_option),
        "progress": not args.quiet,
    }
