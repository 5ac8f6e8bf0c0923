"""``nxd-ckpt import``: a Hugging Face directory as a tag for given sizes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.execution_options import add_execution_options, execution_options_of, show_done
from nxd_ckpt.cli.json_files import nested_lists
from nxd_ckpt.cli.mapping_options import DTYPES, add_mapping, hindrances, mapping_of

NAME = "import"
SUMMARY = "make a checkpoint of a Hugging Face directory"
DESCRIPTION = (
    "Make a tag that holds the model of a Hugging Face directory as a job of the given sizes would have saved it; "
    "neuronx-distributed loads it, and nxd_ckpt on any sizes. Names and shapes are translated by a mapping, shipped "
    "for Llama, Mistral, Qwen 2 and 3, Mixtral and GPT-NeoX, or a file of your own. The input is only read, "
    "rank by rank in bounded memory, and the output appears once all of it is durable. "
    "For a model that is too large for one machine, start it on several with torchrun "
    "(-m nxd_ckpt.cli import --all-ranks ...): each writes a share."
)
_SIZES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "ep": "expert"}
_VARIANTS = {
    "qkv_linear": "the model has GQAQKVColumnParallelLinear: weight_q, weight_k and weight_v",
    "fuse_qkv": "the same with fuse_qkv: weight_qkv",
    "coalesce_qkv": "the model has one ColumnParallelLinear for q, k and v",
    "split_gate_up": "the model has gate_proj and up_proj, not gate_up_proj",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hf", metavar="HF", help="a Hugging Face directory, or a file with the whole model; or a URL")
    parser.add_argument("tag", metavar="TAG", help="the tag that is made: a directory or URL")
    for name, kind in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{kind}-parallel size (default: 1)")
    parser.add_argument(
        "--virtual-pp",
        type=int,
        default=1,
        metavar="N",
        help="chunks of the model on each rank of an interleaved pipeline (default: 1)",
    )
    parser.add_argument(
        "--config", metavar="PATH", help="the model's config.json, or a directory with one (default: the one of HF)"
    )
    add_mapping(parser, "the job keeps")
    for name, meaning in _VARIANTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=meaning)
    parser.add_argument("--dtype", choices=DTYPES, help="cast to this (default: as it is)")
    parser.add_argument("--use-xser", action="store_true", help="write xser files")
    parser.add_argument("--stages", metavar="FILE", help="JSON: a list of names for each pipeline stage")
    add_execution_options(parser, dry_run="show what maps to what and what does not, and write nothing")


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import import_checkpoint

    done = import_checkpoint(
        args.hf,
        args.tag,
        **{name: getattr(args, name) for name in (*_SIZES, *_VARIANTS)},
        virtual_pp=args.virtual_pp,
        config=args.config,
        dtype=args.dtype,
        use_xser=args.use_xser,
        stages=nested_lists(args.stages, depth=2),
        **mapping_of(args),
        **execution_options_of(args),
    )
    is_well = not (done.unknown or done.missing)
    show_done(args, done, _lines, is_well=is_well)
    return 0 if is_well else 1


def _lines(document: dict[str, Any]) -> Iterator[str]:
    done = "would be imported" if document["dry_run"] else "is imported"
    count = text.count(len(document["tensors"]), "tensor")
    yield f"{document['source']} {done} to {document['target']} by mapping {document['mapping']}: {count}"
    if not document["dry_run"]:
        return
    rows = [
        (one["name"], one["dtype"], text.shape(one["shape"]), str(one["pp_rank"]), " ".join(one["members"]))
        for one in document["tensors"]
    ]
    yield from text.table(("NxD", "dtype", "shape on a rank", "stage", "Hugging Face"), rows)
    yield from hindrances("Hugging Face", document)
