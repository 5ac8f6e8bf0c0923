"""``nxd-ckpt unshard``: a tag's model and optimizer as plain files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.options.torch_forms import UnshardOptions

NAME = "unshard"
EXAMPLE = "nxd-ckpt unshard run1/step_300 whole"
SUMMARY = "write model and optimizer as plain files of whole tensors"
DESCRIPTION = (
    "Make model.pt and optim.pt of a tag of any sizes, for torch.load and for what knows nothing of ranks; or "
    "safetensors, or several files for each. Every tensor is whole and under its name, the optimizer's state by "
    "parameter name. The input is only read and verified on the way, in little memory, and the output appears once all "
    "of it is written. Tags of neuronx-distributed say neither how parameters are cut nor what they are called in the "
    "optimizer: with tensor parallelism they need --partitions, and --param-names."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tag", metavar="TAG", help="a tag's directory, or its URL")
    parser.add_argument("out", metavar="OUT", help="the directory or URL that is made")
    parser.add_argument("--model-only", action="store_true", help="leave out the optimizer")
    add_options(parser, UnshardOptions, without=["optim"])
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import unshard_checkpoint

    optim = False if args.model_only else None
    done = unshard_checkpoint(args.tag, args.out, optim=optim, **options_of(args, UnshardOptions))
    model, optimizer = (None if place is None else str(place) for place in done)
    document = {
        "model": model,
        "optim": optimizer,
        "files": dict(done.files),
        "nbytes": done.nbytes,
        "dry_run": args.dry_run,
    }
    if args.json or not args.quiet:
        text.show(document, _lines(document), as_json=args.json)
    return 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    done = "would be unsharded" if document["dry_run"] else "unsharded"
    yield f"{done}: {units.count(len(document['files']), 'file')}, {size(document['nbytes'])}"
    for part in ("model", "optim"):
        if document[part] is not None:
            yield f"  {part}  {document[part]}"
