"""``nxd-ckpt import``: a Hugging Face directory as a tag for given sizes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.cli.output import hindrances, show_done
from nxd_ckpt.core import units
from nxd_ckpt.options.hugging_face import ImportOptions

NAME = "import"
EXAMPLE = "nxd-ckpt import llama-hf run1/step_0 --tp 8 --qkv-linear"
SUMMARY = "make a checkpoint of a Hugging Face directory"
DESCRIPTION = (
    "Make a tag that holds the model of a Hugging Face directory as a job of the given sizes would have saved it; "
    "neuronx-distributed loads it, and nxd_ckpt on any sizes. Names and shapes are translated by a mapping, shipped "
    "for Llama, Qwen, Gemma, Mixtral and others, or a file of your own. The input is only read, "
    "rank by rank in bounded memory, and the output appears once all of it is durable. "
    "For a model that is too large for one machine, start it on several with torchrun "
    "(-m nxd_ckpt.cli import --all-ranks ...): each writes a share."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hf", metavar="HF", help="a Hugging Face directory, or a file with the whole model; or a URL")
    parser.add_argument("tag", metavar="TAG", help="the tag that is made: a directory or URL")
    add_options(parser, ImportOptions, without=["model_key"])
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import import_checkpoint

    done = import_checkpoint(args.hf, args.tag, **options_of(args, ImportOptions))
    is_well = not (done.unknown or done.missing)
    show_done(args, done, _lines, is_well=is_well)
    return 0 if is_well else 1


def _lines(document: dict[str, Any]) -> Iterator[str]:
    done = "would be imported" if document["dry_run"] else "is imported"
    count = units.count(len(document["tensors"]), "tensor")
    yield f"{document['source']} {done} to {document['target']} by mapping {document['mapping']}: {count}"
    if not document["dry_run"]:
        return
    rows = [
        (one["name"], one["dtype"], text.shape(one["shape"]), str(one["pp_rank"]), " ".join(one["members"]))
        for one in document["tensors"]
    ]
    yield from text.table(("NxD", "dtype", "shape on a rank", "stage", "Hugging Face"), rows)
    yield from hindrances("Hugging Face", document)
