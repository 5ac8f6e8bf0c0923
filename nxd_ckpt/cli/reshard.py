"""``nxd-ckpt reshard``: a whole tag for other sizes of any kind of parallelism."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli.execution_options import add_execution_options, execution_options_of, show_converted
from nxd_ckpt.cli.json_files import nested_lists, partitions_in

NAME = "reshard"
SUMMARY = "cut a whole checkpoint for other parallel sizes"
DESCRIPTION = (
    "Make a tag as a job of other sizes would have saved it: model and optimizer are cut anew, bit for bit, scheduler "
    "and user content are taken over. The input is only read, and the output appears once all of it is durable. "
    "Tags of neuronx-distributed say neither how parameters are cut nor what they are called in the optimizer: with "
    "another tensor-parallel size they need --partitions, and wherever more than --dp changes --param-names. "
    "For a checkpoint that is too large for one machine, start it on several with torchrun "
    "(-m nxd_ckpt.cli reshard --all-ranks ...): each writes a share."
)
_SIZES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "ep": "expert"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="a tag's directory or URL")
    parser.add_argument("output", metavar="OUTPUT", help="the tag that is made: a directory or URL")
    for name, kind in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{kind}-parallel size (default: the input's)")
    parser.add_argument(
        "--partitions",
        metavar="FILE",
        help="JSON: how parameters are cut over the input's ranks, by name; as under `partition` in a manifest",
    )
    parser.add_argument("--stages", metavar="FILE", help="JSON: a list of names for each new pipeline stage")
    parser.add_argument(
        "--param-names",
        metavar="FILE",
        help="JSON: the optimizer's parameter names, for each stage of the input a list of names for each param group",
    )
    add_execution_options(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import reshard

    done = reshard(
        args.input,
        args.output,
        **{name: getattr(args, name) for name in _SIZES},
        partitions=partitions_in(args.partitions),
        stages=nested_lists(args.stages, depth=2),
        saved_param_names=nested_lists(args.param_names, depth=3),
        **execution_options_of(args),
    )
    show_converted(args, done)
    return 0
