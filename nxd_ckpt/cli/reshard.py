"""``nxd-ckpt reshard``: a whole tag for other sizes of any kind of parallelism."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.cli.output import show_converted
from nxd_ckpt.options.tags import ReshardOptions

NAME = "reshard"
EXAMPLE = "nxd-ckpt reshard run1/step_300 run2/step_300 --dp 2 --tp 8"
SUMMARY = "cut a whole checkpoint for other parallel sizes"
DESCRIPTION = (
    "Make a tag as a job of other sizes would have saved it: model and optimizer are cut anew, bit for bit, scheduler "
    "and user content are taken over. The input is only read, and the output appears once all of it is durable. "
    "Tags of neuronx-distributed say neither how parameters are cut nor what they are called in the optimizer: with "
    "another tensor-parallel size they need --partitions, and wherever more than --dp changes --param-names. "
    "For a checkpoint that is too large for one machine, start it on several with torchrun "
    "(-m nxd_ckpt.cli reshard --all-ranks ...): each writes a share."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="a tag's directory or URL")
    parser.add_argument("output", metavar="OUTPUT", help="the tag that is made: a directory or URL")
    add_options(parser, ReshardOptions, without=["use_xser"])
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import reshard

    show_converted(args, reshard(args.input, args.output, **options_of(args, ReshardOptions)))
    return 0
