"""``nxd-ckpt from-dcp``: a torch DCP directory as a tag for given sizes."""

from __future__ import annotations

import argparse

from nxd_ckpt.cli.dcp_options import add_keys, keys_of
from nxd_ckpt.cli.execution_options import add_execution_options, execution_options_of, show_converted
from nxd_ckpt.cli.json_files import nested_lists, partitions_in

NAME = "from-dcp"
SUMMARY = "make a checkpoint of a torch DCP directory"
DESCRIPTION = (
    "Make a tag of what torch.distributed.checkpoint.save or OLMo-core's save_model_and_optim_state wrote, as a job of "
    "the given sizes would have saved it: model, optimizer with param groups and steps, scheduler, and everything else "
    "as user content. The input is only read, as data, and the output appears once all of it is durable. "
    "For a checkpoint that is too large for one machine, start it on several with torchrun "
    "(-m nxd_ckpt.cli from-dcp --all-ranks ...): each writes a share."
)
_SIZES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "ep": "expert"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dcp", metavar="DCP", help="the directory, or its URL, that holds .metadata")
    parser.add_argument("tag", metavar="TAG", help="the tag that is made: a directory or URL")
    for name, kind in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{kind}-parallel size (default: 1)")
    parser.add_argument(
        "--optimizer", choices=("zero1", "plain"), default="zero1", help="the form of the optimizer (default: zero1)"
    )
    parser.add_argument(
        "--partitions",
        metavar="FILE",
        help='JSON: how parameters are cut, by name: {"embed.weight": {"partition_dim": 0}}; others are whole',
    )
    parser.add_argument("--stages", metavar="FILE", help="JSON: a list of names for each pipeline stage")
    parser.add_argument("--use-xser", action="store_true", help="write xser files")
    add_keys(parser)
    add_execution_options(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import from_dcp

    done = from_dcp(
        args.dcp,
        args.tag,
        **{name: getattr(args, name) for name in _SIZES},
        optimizer=args.optimizer,
        partitions=partitions_in(args.partitions),
        stages=nested_lists(args.stages, depth=2),
        use_xser=args.use_xser,
        **keys_of(args),
        **execution_options_of(args),
    )
    show_converted(args, done)
    return 0
