"""``nxd-ckpt convert-zero1``: a ZeRO-1 optimizer for another data-parallel size. Flags are spelled as in NxD's tool."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.cli.output import show_converted
from nxd_ckpt.options.tags import Zero1Options

NAME = "convert-zero1"
EXAMPLE = "nxd-ckpt convert-zero1 --input_dir a/t --output_dir b --convert_to_full"
SUMMARY = "unshard a ZeRO-1 optimizer, or cut it for another data-parallel size"
DESCRIPTION = (
    "Make a tag like another but for its ZeRO-1 optimizer: unsharded, or sharded over another number of data-parallel "
    "ranks. Model, scheduler and user content are hard-linked where that works and is safe, else copied. The input is "
    "only read, and the output appears once all of it is durable. "
    "Takes the flags of neuronx-distributed's nxd_convert_zero_checkpoints. For a checkpoint that is too large for one "
    "machine, start it on several with torchrun (-m nxd_ckpt.cli convert-zero1 --all-ranks ...): each writes a share."
)


_MODES = ("convert_to_full", "convert_to_sharded")
_AS_IN_NXD = {name: f"--{name}" for name in (*_MODES, "dp_size", "optim_only", "num_workers")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input_dir", required=True, help="a tag's directory or URL, or what NxD's converter wrote")
    parser.add_argument("--output_dir", required=True, help="the tag that is made: a directory or URL")
    mode = parser.add_mutually_exclusive_group(required=True)
    add_options(mode, Zero1Options, only=_MODES, flags=_AS_IN_NXD)
    add_options(parser, Zero1Options, without=_MODES, flags=_AS_IN_NXD)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import convert_zero1

    show_converted(args, convert_zero1(args.input_dir, args.output_dir, **options_of(args, Zero1Options)))
    return 0
