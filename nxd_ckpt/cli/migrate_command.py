"""``nxd-ckpt migrate``: a checkpoint that training on Neuron left behind, for training on plain torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, options_of
from nxd_ckpt.cli.output import show_done
from nxd_ckpt.core.units import size
from nxd_ckpt.options.migration import MigrateOptions

NAME = "migrate"
EXAMPLE = "nxd-ckpt migrate run1/step_300 plain/step_300 --to tag"
SUMMARY = "continue a run of Neuron's trainers on plain torch"
DESCRIPTION = (
    "Recognise a checkpoint by its files, of neuronx-distributed, neuronx-distributed-training (NAME.ckpt), "
    "optimum-neuron (checkpoint-N), neuronx-nemo-megatron (mp_rank_00/NAME.ckpt), NxD inference, torch-xla (*.pth), "
    "torch DCP, SageMaker's tiered storage or nxd_ckpt, and write model and optimizer in a form that plain torch "
    "continues with, under Hugging Face's names (TorchTitan's for that). It says what was recognised and what is left "
    "out. The input is only read, its digests are verified, and the output appears once all of it is written. --to "
    "torchtitan makes step-N in DST."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="the checkpoint's directory, file or URL")
    parser.add_argument("dst", metavar="DST", help="the directory or URL that is made")
    add_options(parser, MigrateOptions)
    text.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import migrate

    done = migrate(args.src, args.dst, **options_of(args, MigrateOptions))
    show_done(args, done, _lines)
    return 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    verb = "would be" if document["dry_run"] else "is"
    step = "" if document["step"] is None else f", step {document['step']}"
    yield f"{document['source']}: {document['writer']}{step}, read by mapping {document['mapping']}"
    yield f"it {verb} migrated to {document['target']} ({document['form']}): {size(document['nbytes'])}"
    if document["left_out"]:
        yield f"left out: {'; '.join(document['left_out'])}"
