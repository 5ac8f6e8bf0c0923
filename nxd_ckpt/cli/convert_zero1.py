"""``nxd-ckpt convert-zero1``: a ZeRO-1 optimizer for another data-parallel size. Flags are spelled as in NxD's tool."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli.execution_options import add_execution_options, execution_options_of, show_converted

NAME = "convert-zero1"
SUMMARY = "unshard a ZeRO-1 optimizer, or cut it for another data-parallel size"
DESCRIPTION = (
    "Make a tag like another but for its ZeRO-1 optimizer: unsharded, or sharded over another number of data-parallel "
    "ranks. Model, scheduler and user content are hard-linked where that works and is safe, else copied. The input is "
    "only read, and the output appears once all of it is durable. "
    "Takes the flags of neuronx-distributed's nxd_convert_zero_checkpoints. For a checkpoint that is too large for one "
    "machine, start it on several with torchrun (-m nxd_ckpt.cli convert-zero1 --all-ranks ...): each writes a share."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input_dir", required=True, help="a tag's directory or URL, or what NxD's converter wrote")
    parser.add_argument("--output_dir", required=True, help="the tag that is made: a directory or URL")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--convert_to_full", action="store_true", help="one unsharded file for each tp, pp and ep rank")
    mode.add_argument("--convert_to_sharded", action="store_true", help="one file for each rank; needs --dp_size")
    parser.add_argument("--dp_size", type=int, metavar="N", help="the new data-parallel size")
    parser.add_argument("--optim_only", action="store_true", help="leave out everything but the optimizer")
    add_execution_options(parser, workers="--num_workers")


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import convert_zero1

    done = convert_zero1(
        args.input_dir,
        args.output_dir,
        dp_size=args.dp_size,
        convert_to_full=args.convert_to_full,
        convert_to_sharded=args.convert_to_sharded,
        optim_only=args.optim_only,
        **execution_options_of(args),
    )
    show_converted(args, done)
    return 0
