"""``nxd-ckpt export``: the model of a tag as a Hugging Face directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.cli.output import hindrances, show_done
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.options.hugging_face import ExportOptions

NAME = "export"
EXAMPLE = "nxd-ckpt export run1/step_300 llama-hf --config config.json"
SUMMARY = "write a checkpoint's model as a Hugging Face directory"
DESCRIPTION = (
    "Make a directory that transformers' from_pretrained loads, of a checkpoint of nxd_ckpt's or neuronx-distributed's "
    "on any sizes: safetensors files with their index, config.json and the tokenizer's files. Names and shapes are "
    "translated by a mapping, shipped for Llama, Qwen, Gemma, Mixtral and others, or a file of your own. "
    "The input is only read, its digests are verified, and the output appears once all of it is written. "
    "For a model that is too large for one machine, start it on several with torchrun "
    "(-m nxd_ckpt.cli export --all-ranks ...): each writes a share of the files."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tag", metavar="TAG", help="a tag's directory or URL")
    parser.add_argument("out", metavar="OUT", help="the directory or URL that is made")
    add_options(parser, ExportOptions)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import export_checkpoint

    done = export_checkpoint(args.tag, args.out, **options_of(args, ExportOptions))
    is_well = not (done.unknown or done.missing)
    show_done(args, done, _lines, is_well=is_well, nbytes=done.nbytes)
    return 0 if is_well else 1


def _lines(document: dict[str, Any]) -> Iterator[str]:
    files, tensors = document["files"], document["tensors"]
    done = "would be exported" if document["dry_run"] else "is exported"
    counts = f"{units.count(len(tensors), 'tensor')}, {units.count(len(files), 'file')}, {size(document['nbytes'])}"
    yield f"{document['source']} {done} to {document['target']} by mapping {document['mapping']}: {counts}"
    if not document["dry_run"]:
        return
    rows = [
        (one["name"], one["dtype"], text.shape(one["shape"]), one["source"], text.shape(one["source_shape"]))
        for one in tensors
    ]
    yield from text.table(("Hugging Face", "dtype", "shape", "NxD", "whole shape"), rows)
    yield from hindrances("NxD", document)
