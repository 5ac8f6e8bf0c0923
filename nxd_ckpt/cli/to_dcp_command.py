"""``nxd-ckpt to-dcp``: a tag as a torch DCP directory."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli.dcp_options import add_keys, keys_of
from nxd_ckpt.cli.execution_options import add_output, output_of, show_converted
from nxd_ckpt.cli.json_files import nested_lists, partitions_in

NAME = "to-dcp"
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
    parser.add_argument(
        "--flatten-optimizer-state",
        action="store_true",
        help="param groups by parameter, as with torch's flatten_optimizer_state_dict=True",
    )
    parser.add_argument(
        "--partitions", metavar="FILE", help="JSON: how parameters are cut over the tag's ranks, by name"
    )
    parser.add_argument(
        "--param-names",
        metavar="FILE",
        help="JSON: the optimizer's parameter names, for each stage of the tag a list of names for each param group",
    )
    add_keys(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import to_dcp

    done = to_dcp(
        args.tag,
        args.dcp,
        flatten_optimizer_state=args.flatten_optimizer_state,
        partitions=partitions_in(args.partitions),
        saved_param_names=nested_lists(args.param_names, depth=3),
        **keys_of(args),
        **output_of(args),
    )
    show_converted(args, done)
    return 0
