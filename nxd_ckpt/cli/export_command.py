"""``nxd-ckpt export``: the model of a tag as a Hugging Face directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.execution_options import add_all_ranks, add_output, output_of, show_done
from nxd_ckpt.cli.json_files import nested_lists
from nxd_ckpt.cli.mapping_options import DTYPES, add_mapping, hindrances, mapping_of
from nxd_ckpt.core.units import size

NAME = "export"
SUMMARY = "write a checkpoint's model as a Hugging Face directory"
DESCRIPTION = (
    "Make a directory that transformers' from_pretrained loads, of a checkpoint of nxd_ckpt's or neuronx-distributed's "
    "on any sizes: safetensors files with their index, config.json and the tokenizer's files. Names and shapes are "
    "translated by a mapping, shipped for Llama, Mistral, Qwen 2 and 3, Mixtral and GPT-NeoX, or a file of your own. "
    "The input is only read, its digests are verified, and the output appears once all of it is written. "
    "For a model that is too large for one machine, start it on several with torchrun "
    "(-m nxd_ckpt.cli export --all-ranks ...): each writes a share of the files."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tag", metavar="TAG", help="a tag's directory or URL")
    parser.add_argument("out", metavar="OUT", help="the directory or URL that is made")
    parser.add_argument(
        "--config", metavar="PATH", help="the model's config.json, or a Hugging Face directory with one; it is copied"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="a directory whose tokenizer files are copied")
    add_mapping(parser, "the job that saved it kept")
    parser.add_argument(
        "--size-per-shard", default="5GB", metavar="SIZE", help="bytes of a file at most, or 512MiB (default: 5GB)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="cast to this (default: as saved)")
    parser.add_argument("--master-weights", action="store_true", help="take the optimizer's master weights")
    parser.add_argument(
        "--optimizer", action="store_true", help="write the optimizer's state beside the model: optimizer.safetensors"
    )
    parser.add_argument(
        "--param-names",
        metavar="FILE",
        help="JSON: the optimizer's parameter names, for each pipeline stage a list of names for each param group",
    )
    add_all_ranks(parser)
    add_output(
        parser,
        replaces="an existing Hugging Face directory at OUT",
        dry_run="show what maps to what and what does not, and write nothing",
    )


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import export_checkpoint

    done = export_checkpoint(
        args.tag,
        args.out,
        config=args.config,
        tokenizer=args.tokenizer,
        **mapping_of(args),
        size_per_shard=args.size_per_shard,
        dtype=args.dtype,
        master_weights=args.master_weights,
        optimizer=args.optimizer,
        param_names=nested_lists(args.param_names, depth=3),
        all_ranks=args.all_ranks,
        **output_of(args),
    )
    is_well = not (done.unknown or done.missing)
    show_done(args, done, _lines, is_well=is_well, nbytes=done.nbytes)
    return 0 if is_well else 1


def _lines(document: dict[str, Any]) -> Iterator[str]:
    files, tensors = document["files"], document["tensors"]
    done = "would be exported" if document["dry_run"] else "is exported"
    counts = f"{text.count(len(tensors), 'tensor')}, {text.count(len(files), 'file')}, {size(document['nbytes'])}"
    yield f"{document['source']} {done} to {document['target']} by mapping {document['mapping']}: {counts}"
    if not document["dry_run"]:
        return
    rows = [
        (one["name"], one["dtype"], text.shape(one["shape"]), one["source"], text.shape(one["source_shape"]))
        for one in tensors
    ]
    yield from text.table(("Hugging Face", "dtype", "shape", "NxD", "whole shape"), rows)
    yield from hindrances("NxD", document)
