"""Commands that write a checkpoint in another place or form, each a function of `nxd_ckpt.convert` with its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command, add_alias, add_options, options_of
from nxd_ckpt.core import units
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.units import size
from nxd_ckpt.options.hugging_face import ExportOptions, ImportOptions, MigrateOptions
from nxd_ckpt.options.tags import (
    CopyOptions,
    FromDcpOptions,
    PackOptions,
    ReshardOptions,
    ToDcpOptions,
    UnshardOptions,
    Zero1Options,
)
from nxd_ckpt.storage.urls import directory_and_name

Lines = Callable[[dict[str, Any]], Iterator[str]]
"""Lines for people, from the command's JSON document."""


def _write(function: str, source: str, target: str, lines: Lines) -> Callable[[argparse.Namespace], int]:
    """Return the ``run`` of a command: call a function of `nxd_ckpt.convert`, and show its result.

    ``source`` and ``target`` name the arguments that are its paths. Names without a rule or tensors that are missing
    make the exit code 1. With --quiet, success prints nothing.
    """

    def run(args: argparse.Namespace) -> int:
        from nxd_ckpt import convert

        paths = (getattr(args, name) for name in (source, target))
        done = getattr(convert, function)(*paths, **options_of(args, args.command.options))
        document = asdict(done)
        failed = bool(document.get("unknown") or document.get("missing"))
        document |= {"nbytes": done.nbytes} if hasattr(done, "nbytes") else {}
        document |= {"dry_run": args.dry_run}
        if args.json or failed or not args.quiet:
            text.show(document, lines(document), as_json=args.json)
        return int(failed)

    return run


def _verb(document: dict[str, Any]) -> str:
    return "would be" if document["dry_run"] else "is"


def _first_line(document: dict[str, Any], done: str, facts: str) -> str:
    """Say what is ``done`` with the input, to what output, by what mapping, and how large it is."""
    mapping = f" by mapping {document['mapping']}" if "mapping" in document else ""
    return f"{document['source']} {_verb(document)} {done} {document['target']}{mapping}: {facts}"


def _files(document: dict[str, Any]) -> str:
    return f"{units.count(document['files'], 'file')}, {size(document['nbytes'])}"


def _converted_lines(document: dict[str, Any]) -> Iterator[str]:
    sizes = "" if document["topology"] is None else f"{units.topology(document['topology'])}, "
    yield _first_line(document, "converted to", f"{sizes}{size(document['nbytes'])}")


def _unmapped_lines(side: str, document: dict[str, Any]) -> Iterator[str]:
    """Names on that side that no rule maps, and tensors that are missing."""
    if document["unknown"]:
        yield "no rule maps:"
        rules = document["unknown"].items()
        yield from text.table((side, "closest rules"), [(name, ", ".join(close)) for name, close in rules])
    if document["missing"]:
        yield f"missing, though every such model has them: {', '.join(document['missing'])}"


def _cp_lines(document: dict[str, Any]) -> Iterator[str]:
    yield _first_line(document, "copied to", _files(document))
    (_, name), (directory, new_name) = map(directory_and_name, (document["source"], document["target"]))
    if new_name != name:
        yield f"  the copy {_verb(document)} the tag {new_name!r} of {directory}"
    if document["dry_run"]:
        return
    if document["linked"]:
        yield f"  {units.count(document['linked'], 'file')} linked"
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
    run=_write("copy_checkpoint", "src", "dst", _cp_lines),
)

RESHARD = Command(
    "reshard",
    example="nxd-ckpt reshard run1/step_300 run2/step_300 --dp 2 --tp 8",
    summary="convert a whole checkpoint to other parallel sizes",
    description=(
        "Make a tag as a job of other sizes would have saved it: model and optimizer are partitioned again, bit for "
        "bit, scheduler and user content are copied. The input is only read, and the output appears once all of it is "
        "durable. Tags of neuronx-distributed record neither how parameters are partitioned nor their names in the "
        "optimizer: with another tensor-parallel size they need --partitions, and wherever more than --dp changes "
        "--saved-param-names. For a checkpoint that is too large for one machine, start it on several with torchrun "
        "(-m nxd_ckpt.cli reshard --all-ranks ...): each writes a share."
    ),
    operands=(("INPUT", "a tag's directory or URL"), ("OUTPUT", "the tag that is made: a directory or URL")),
    options=ReshardOptions,
    without=("use_xser",),
    run=_write("reshard", "input", "output", _converted_lines),
)

_MODES = ("convert_to_full", "convert_to_sharded")
_NXD_SPELLING = {name: f"--{name}" for name in (*_MODES, "dp_size", "optim_only", "num_workers")}


def _add_zero1_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input_dir", required=True, help="a tag's directory or URL, or what NxD's converter wrote")
    parser.add_argument("--output_dir", required=True, help="the tag that is made: a directory or URL")
    mode = parser.add_mutually_exclusive_group(required=True)
    add_options(mode, Zero1Options, only=_MODES, flags=_NXD_SPELLING)


CONVERT_ZERO1 = Command(
    "convert-zero1",
    example="nxd-ckpt convert-zero1 --input_dir a/t --output_dir b --convert_to_full",
    summary="unshard a ZeRO-1 optimizer, or reshard it for another data-parallel size",
    description=(
        "Make a copy of a tag whose ZeRO-1 optimizer is unsharded, or sharded over another number of data-parallel "
        "ranks. Model, scheduler and user content are hard-linked where that works and is safe, else copied. The "
        "input is only read, and the output appears once all of it is durable. Takes the flags of "
        "neuronx-distributed's nxd_convert_zero_checkpoints. For a checkpoint that is too large for one machine, "
        "start it on several with torchrun (-m nxd_ckpt.cli convert-zero1 --all-ranks ...): each writes a share."
    ),
    add_flags=_add_zero1_flags,
    options=Zero1Options,
    without=_MODES,
    spelling=_NXD_SPELLING,
    run=_write("convert_zero1", "input_dir", "output_dir", _converted_lines),
)


def _export_lines(document: dict[str, Any]) -> Iterator[str]:
    files, tensors = document["files"], document["tensors"]
    counts = f"{units.count(len(tensors), 'tensor')}, {units.count(len(files), 'file')}, {size(document['nbytes'])}"
    yield _first_line(document, "exported to", counts)
    if document["copied"]:
        yield f"{'would be copied' if document['dry_run'] else 'copied'} too: {', '.join(document['copied'])}"
    if not document["dry_run"]:
        return
    rows = [
        (
            *(tensor["name"], tensor["dtype"], text.shape(tensor["shape"])),
            *(tensor["source"], text.shape(tensor["source_shape"])),
        )
        for tensor in tensors
    ]
    yield from text.table(("Hugging Face", "dtype", "shape", "NxD", "whole shape"), rows)
    yield from _unmapped_lines("NxD", document)


EXPORT = Command(
    "export",
    example="nxd-ckpt export run1/step_300 llama-hf --config config.json",
    summary="write a checkpoint's model as a Hugging Face directory",
    description=(
        "Make a directory that transformers' from_pretrained loads, from a checkpoint of nxd_ckpt or "
        "neuronx-distributed on any sizes: safetensors files with their index, config.json and the tokenizer's files. "
        "Names and shapes are translated by a mapping, shipped for Llama, Qwen, Gemma, Mixtral and others, or a file "
        "of your own. The input is only read, its digests are verified, and the output appears once all of it is "
        "written. For a model that is too large for one machine, start it on several with torchrun (-m nxd_ckpt.cli "
        "export --all-ranks ...): each writes a share of the files."
    ),
    operands=(("TAG", "a tag's directory or URL"), ("OUT", "the directory or URL that is made")),
    options=ExportOptions,
    run=_write("export_checkpoint", "tag", "out", _export_lines),
)


def _import_lines(document: dict[str, Any]) -> Iterator[str]:
    yield _first_line(document, "imported to", units.count(len(document["tensors"]), "tensor"))
    for reason, names in document["left_out"].items():
        yield f"left out, {reason}: {first_of(names)}"
    if not document["dry_run"]:
        return
    rows = [
        (
            *(tensor["name"], tensor["dtype"], text.shape(tensor["shape"])),
            *(str(tensor["pp_rank"]), " ".join(tensor["members"])),
        )
        for tensor in document["tensors"]
    ]
    yield from text.table(("NxD", "dtype", "shape on a rank", "stage", "Hugging Face"), rows)
    yield from _unmapped_lines("Hugging Face", document)


IMPORT = Command(
    "import",
    example="nxd-ckpt import llama-hf run1/step_0 --tp 8 --qkv-linear",
    summary="make a checkpoint from a Hugging Face directory",
    description=(
        "Make a tag with the model of a Hugging Face directory, as a job of the given sizes would have saved it; "
        "neuronx-distributed loads it, and nxd_ckpt on any sizes. Names and shapes are translated by a mapping, "
        "shipped for Llama, Qwen, Gemma, Mixtral and others, or a file of your own. The input is only read, rank by "
        "rank in bounded memory, and the output appears once all of it is durable. For a model that is too large for "
        "one machine, start it on several with torchrun (-m nxd_ckpt.cli import --all-ranks ...): each writes a "
        "share."
    ),
    operands=(
        ("HF", "a Hugging Face directory, or a file with the whole model; or a URL"),
        ("TAG", "the tag that is made: a directory or URL"),
    ),
    options=ImportOptions,
    without=("model_key",),
    run=_write("import_checkpoint", "hf", "tag", _import_lines),
)


def _migrate_lines(document: dict[str, Any]) -> Iterator[str]:
    step = "" if document["step"] is None else f", step {document['step']}"
    yield f"{document['source']}: {document['writer']}{step}, read by mapping {document['mapping']}"
    yield f"it {_verb(document)} migrated to {document['target']} ({document['form']}): {size(document['nbytes'])}"
    if document["left_out"]:
        yield f"left out: {'; '.join(document['left_out'])}"


MIGRATE = Command(
    "migrate",
    example="nxd-ckpt migrate run1/step_300 plain/step_300 --to tag",
    summary="continue a run of Neuron's trainers on plain torch",
    description=(
        "Recognise a checkpoint by its files, of neuronx-distributed, neuronx-distributed-training (NAME.ckpt), "
        "optimum-neuron (checkpoint-N), neuronx-nemo-megatron (mp_rank_00/NAME.ckpt), NxD inference, torch-xla "
        "(*.pth), torch DCP, torch_checkpointing, SageMaker's tiered storage, Hugging Face or nxd_ckpt, and write "
        "model and optimizer in a form that plain torch continues with, under Hugging Face names (for TorchTitan its "
        "own). It shows what was recognised and what is left out. The input is only read, its digests are verified, "
        "and the output appears once all of it is written. --to torchtitan makes step-N in DST."
    ),
    operands=(("SRC", "the checkpoint's directory, file or URL"), ("DST", "the directory or URL that is made")),
    options=MigrateOptions,
    run=_write("migrate", "src", "dst", _migrate_lines),
)

TO_DCP = Command(
    "to-dcp",
    example="nxd-ckpt to-dcp run1/step_300 dcp/step_300",
    summary="make a torch DCP directory from a checkpoint",
    description=(
        "Make a directory that torch.distributed.checkpoint.load and OLMo-core's load_model_and_optim_state read, "
        "from a tag of any sizes: model, optimizer, scheduler and user content, with whole tensors. The input is only "
        "read, its digests are verified, and the output appears once all of it is durable. Tags of "
        "neuronx-distributed record neither how parameters are partitioned nor their names in the optimizer: they "
        "need --partitions with tensor or expert parallelism, and --saved-param-names for an optimizer that others "
        "can use."
    ),
    operands=(("TAG", "a tag's directory or URL"), ("DCP", "the directory or URL that is made")),
    options=ToDcpOptions,
    run=_write("to_dcp", "tag", "dcp", _converted_lines),
)

FROM_DCP = Command(
    "from-dcp",
    example="nxd-ckpt from-dcp dcp/step_300 run1/step_300 --dp 2",
    summary="make a checkpoint from a torch DCP directory",
    description=(
        "Make a tag from the output of torch.distributed.checkpoint.save or OLMo-core's save_model_and_optim_state, "
        "as a job of the given sizes would have saved it: model, optimizer with param groups and steps, scheduler, "
        "and everything else as user content. The input is only read, as data, and the output appears once all of it "
        "is durable. For a checkpoint that is too large for one machine, start it on several with torchrun (-m "
        "nxd_ckpt.cli from-dcp --all-ranks ...): each writes a share."
    ),
    operands=(
        ("DCP", "the directory, or its URL, that holds .metadata"),
        ("TAG", "the tag that is made: a directory or URL"),
    ),
    options=FromDcpOptions,
    run=_write("from_dcp", "dcp", "tag", _converted_lines),
)


def _unshard(args: argparse.Namespace) -> int:
    from nxd_ckpt.convert import unshard_checkpoint

    done = unshard_checkpoint(args.tag, args.out, **options_of(args, args.command.options))
    model, optimizer = (None if place is None else str(place) for place in done)
    document = {
        "model": model,
        "optim": optimizer,
        "files": dict(done.files),
        "nbytes": done.nbytes,
        "dry_run": args.dry_run,
    }
    if args.json or not args.quiet:
        text.show(document, _unshard_lines(document), as_json=args.json)
    return 0


def _unshard_lines(document: dict[str, Any]) -> Iterator[str]:
    done = "would be unsharded" if document["dry_run"] else "unsharded"
    yield f"{done}: {units.count(len(document['files']), 'file')}, {size(document['nbytes'])}"
    for part in ("model", "optim"):
        if document[part] is not None:
            yield f"  {part}  {document[part]}"


def _add_unshard_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-optim", dest="optim", action="store_const", const=False, help="leave out the optimizer")
    add_alias(parser, "--model-only", "optim", action="store_const", const=False)


UNSHARD = Command(
    "unshard",
    example="nxd-ckpt unshard run1/step_300 whole",
    summary="write model and optimizer as plain files of whole tensors",
    description=(
        "Make model.pt and optim.pt from a tag of any sizes, for torch.load and for programs without ranks; or "
        "safetensors, or several files for each. Every tensor is whole and stored by name, the optimizer's state by "
        "parameter name. The input is only read and verified, in little memory, and the output appears once all of it "
        "is written. Tags of neuronx-distributed record neither how parameters are partitioned nor their names in the "
        "optimizer: with tensor parallelism they need --partitions, and --saved-param-names."
    ),
    operands=(("TAG", "a tag's directory, or its URL"), ("OUT", "the directory or URL that is made")),
    add_flags=_add_unshard_flags,
    options=UnshardOptions,
    without=("optim",),
    run=_unshard,
)


def _pack_lines(document: dict[str, Any]) -> Iterator[str]:
    yield _first_line(document, "packed as", _files(document))


PACK = Command(
    "pack",
    example="nxd-ckpt pack run1/step_300 step_300.tar",
    summary="pack a checkpoint into one tar file",
    description=(
        "Make a tar file of one tag, of nxd_ckpt or neuronx-distributed, exactly as it is. Every file is verified by "
        "its digests, and the archive appears once it is whole. Every command and function that reads a checkpoint "
        "directory also reads the archive, without unpacking it; a compressed one is unpacked first, to $TMPDIR."
    ),
    operands=(
        ("TAG", "a tag's directory, or its URL"),
        ("OUT", "the archive that is made: a path or URL that ends in .tar, .tar.zst, .tar.gz, .tar.bz2 or .tar.xz"),
    ),
    options=PackOptions,
    run=_write("pack_checkpoint", "tag", "out", _pack_lines),
)
