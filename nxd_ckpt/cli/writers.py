"""Commands that write a checkpoint in another place or form, each a function with its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command, add_alias, options_of
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.options.execution import CopyOptions
from nxd_ckpt.storage.urls import directory_and_name

Lines = Callable[[dict[str, Any]], Iterator[str]]
"""Lines for people, from the command's JSON document."""


def _write(function: str, lines: Lines) -> Callable[[argparse.Namespace], int]:
    """Return the ``run`` of a command: call a function of `nxd_ckpt`, and show its result.

    Names without a rule or tensors that are missing make the exit code 1. With --quiet, success prints nothing.
    """

    def run(args: argparse.Namespace) -> int:
        import nxd_ckpt

        done = getattr(nxd_ckpt, function)(args.src, args.dst, **options_of(args, args.command.options))
        document = {**asdict(done), "dry_run": args.dry_run}
        failed = bool(document.get("unknown") or document.get("missing"))
        if args.json or failed or not args.quiet:
            text.show(document, lines(document), as_json=args.json)
        return int(failed)

    return run


def _verb(document: dict[str, Any]) -> str:
    return "would be" if document["dry_run"] else "is"


def _cp_lines(document: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{document['source']} {_verb(document)} copied to {document['target']}: "
        f"{units.count(document['files'], 'file')}, {size(document['nbytes'])}"
    )
    (_, name), (directory, new_name) = map(directory_and_name, (document["source"], document["target"]))
    if new_name != name:
        yield f"  the copy {_verb(document)} the tag {new_name!r} of {directory}"
    if document["dry_run"]:
        return
    if document["kept"]:
        kept = units.count(document["kept"], "file")
        yield f"  {kept} there already, and verified; {size(document['copied_nbytes'])} new"


CP = Command(
    "cp",
    example="nxd-ckpt cp run1/step_300 s3://bucket/run1/step_300",
    summary="copy a checkpoint between any two places",
    description=(
        "Make an exact copy of one tag, of nxd_ckpt or neuronx-distributed, in another directory or store. Every file "
        "is verified by its digests during the copy, and the copy appears once all of it is durable. An interrupted "
        "copy continues when it is started again. It keeps the time of its save, and with that its order among other "
        "tags."
    ),
    operands=(
        ("SRC", "a tag's directory, or its URL"),
        ("DST", "the tag that is made: a directory or URL that ends in its name"),
    ),
    options=CopyOptions,
    run=_write("copy_checkpoint", _cp_lines),
)


def _convert_lines(document: dict[str, Any]) -> Iterator[str]:
    step = "" if document["step"] is None else f", step {document['step']}"
    mapping = "" if document["mapping"] is None else f", read by mapping {document['mapping']}"
    yield f"{document['source']}: {document['writer']}{step}{mapping}"
    facts = [document["form"]] if document["topology"] is None else ["tag", units.topology(document["topology"])]
    counts = [units.count(len(document["files"]), "file")] if document["files"] else []
    facts += [*counts, size(document["nbytes"])]
    yield f"it {_verb(document)} converted to {document['target']}: {', '.join(facts)}"
    if document["left_out"]:
        yield f"left out: {'; '.join(document['left_out'])}"
    if not document["dry_run"]:
        return
    rows = [
        (each["name"], each["dtype"], text.shape(each["shape"]), " ".join(each["made_of"]))
        for each in document["tensors"]
    ]
    if rows:
        yield from text.table(("tensor", "dtype", "shape", "made of"), rows)
    if document["unknown"]:
        yield "no rule maps:"
        rules = document["unknown"].items()
        yield from text.table(("name", "closest rules"), [(name, ", ".join(close)) for name, close in rules])
    if document["missing"]:
        yield f"missing, though every such model has them: {', '.join(document['missing'])}"


def _add_convert_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-optimizer", dest="optimizer", action="store_const", const=False, help="leave out the optimizer"
    )
    add_alias(parser, "--model-only", "optimizer", action="store_const", const=False)


CONVERT = Command(
    "convert",
    example="nxd-ckpt convert run1/step_300 llama-hf --to hf --config config.json",
    summary="write a checkpoint again: for other sizes, other programs, as files, or as an archive",
    description=(
        "Recognise a checkpoint by its files (nxd_ckpt, neuronx-distributed of every age and the trainers built on it, "
        "torch DCP, Hugging Face, torch-xla and others) and write it as a tag of any sizes, a Hugging Face directory, "
        "a torch DCP or TorchTitan directory, plain files, or one archive (--to, or an output that ends in .tar, "
        ".tar.zst, .tar.gz, .tar.bz2 or .tar.xz). The input is only read, its digests are verified, and the output "
        "appears once all of it is durable. Tags of neuronx-distributed record neither how parameters are partitioned "
        "nor their names in the optimizer: with another tensor-parallel size they need --partitions, and wherever more "
        "than --dp changes --saved-param-names. For a checkpoint that is too large for one machine, start it on "
        "several with torchrun (-m nxd_ckpt.cli convert --all-ranks ...): each writes a share."
    ),
    operands=(
        ("SRC", "a checkpoint's directory, file or archive, or its URL"),
        ("DST", "the tag, directory or archive that is made: a path or URL"),
    ),
    add_flags=_add_convert_flags,
    options=ConvertOptions,
    run=_write("convert", _convert_lines),
)
