"""``nxd-ckpt to-dcp``: a tag as a torch DCP directory."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.cli.output import show_converted
from nxd_ckpt.options.torch_forms import ToDcpOptions

NAME = "to-dcp"
EXAMPLE = "nxd-ckpt to-dcp run1/step_300 dcp/step_300"
SUMMARY = "make a torch DCP directory of a checkpoint"
DESCRIPTION = (
    "Make a directory that torch.distributed.checkpoint.load and OLMo-core's load_model_and_optim_state read, of a tag "
    "of any sizes: model, optimizer, scheduler and user content, tensors whole. The input is only read, its digests "
    "are verified on the way, and the output appears once all of it is durable. "
    "Tags of neuronx-distributed say neither how parameters are cut nor what they are called in the optimizer: they "
    "need --partitions with tensor or expert parallelism, and --param-names for an optimizer that others can use."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tag", metavar="TAG", help="a tag's directory or URL")
    parser.add_argument("dcp", metavar="DCP", help="the directory or URL that is made")
    add_options(parser, ToDcpOptions)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import to_dcp

    show_converted(args, to_dcp(args.tag, args.dcp, **options_of(args, ToDcpOptions)))
    return 0
