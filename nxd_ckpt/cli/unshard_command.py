"""``nxd-ckpt unshard``: a tag's model and optimizer as plain files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.execution_options import add_output
from nxd_ckpt.cli.json_files import nested_lists, partitions_in
from nxd_ckpt.cli.storage_options import nested
from nxd_ckpt.core.units import size

NAME = "unshard"
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
    parser.add_argument("--safetensors", action="store_true", help="safetensors files, and JSON for what is no tensor")
    parser.add_argument(
        "--strategy",
        default="one_file",
        choices=("one_file", "one_file_per_tensor", "chunks"),
        help="how many files for each of model and optimizer (default: one_file)",
    )
    parser.add_argument(
        "--chunk-size", default="5GB", metavar="SIZE", help="bytes of a chunk at most, or 512MiB (default: 5GB)"
    )
    parser.add_argument(
        "--partitions", metavar="FILE", help="JSON: how parameters were cut, by name; as for `nxd-ckpt reshard`"
    )
    parser.add_argument(
        "--param-names",
        metavar="FILE",
        help="JSON: the optimizer's parameter names, for each pipeline stage a list of names for each param group",
    )
    add_output(parser, replaces="an existing unsharded checkpoint at OUT")


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import unshard_checkpoint

    done = unshard_checkpoint(
        args.tag,
        args.out,
        optim=False if args.model_only else None,
        overwrite=args.overwrite,
        dry_run=args.dry_run,
        use_safetensors=args.safetensors,
        unshard_strategy=args.strategy,
        chunk_size=args.chunk_size,
        partitions=partitions_in(args.partitions),
        saved_param_names=nested_lists(args.param_names, depth=3),
        storage_options=nested(args.storage_option),
        output_options=nested(args.output_option),
        quiet=args.quiet,
    )
    model, optim = (None if place is None else str(place) for place in done)
    document = {
        "model": model,
        "optim": optim,
        "files": dict(done.files),
        "nbytes": done.nbytes,
        "dry_run": args.dry_run,
    }
    if args.json or not args.quiet:
        text.show(document, _lines(document), as_json=args.json)
    return 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    done = "would be unsharded" if document["dry_run"] else "unsharded"
    yield f"{done}: {text.count(len(document['files']), 'file')}, {size(document['nbytes'])}"
    for part in ("model", "optim"):
        if document[part] is not None:
            yield f"  {part}  {document[part]}"
