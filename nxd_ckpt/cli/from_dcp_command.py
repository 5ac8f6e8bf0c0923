"""``nxd-ckpt from-dcp``: a torch DCP directory as a tag for given sizes."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.cli.output import show_converted
from nxd_ckpt.options.torch_forms import FromDcpOptions

NAME = "from-dcp"
EXAMPLE = "nxd-ckpt from-dcp dcp/step_300 run1/step_300 --dp 2"
SUMMARY = "make a checkpoint of a torch DCP directory"
DESCRIPTION = (
    "Make a tag of what torch.distributed.checkpoint.save or OLMo-core's save_model_and_optim_state wrote, as a job of "
    "the given sizes would have saved it: model, optimizer with param groups and steps, scheduler, and everything else "
    "as user content. The input is only read, as data, and the output appears once all of it is durable. "
    "For a checkpoint that is too large for one machine, start it on several with torchrun "
    "(-m nxd_ckpt.cli from-dcp --all-ranks ...): each writes a share."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dcp", metavar="DCP", help="the directory, or its URL, that holds .metadata")
    parser.add_argument("tag", metavar="TAG", help="the tag that is made: a directory or URL")
    add_options(parser, FromDcpOptions)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import from_dcp

    show_converted(args, from_dcp(args.dcp, args.tag, **options_of(args, FromDcpOptions)))
    return 0
