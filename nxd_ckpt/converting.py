"""``convert``: whatever checkpoint a path names, written as anything. A form a function; no form knows the sources."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from nxd_ckpt.conversion.result import Converted
from nxd_ckpt.conversion.to_dcp import to_dcp
from nxd_ckpt.conversion.to_files import MODEL, OPTIM, to_files
from nxd_ckpt.conversion.to_tag import to_nxd_tag, to_tag
from nxd_ckpt.conversion.to_tar import to_tar
from nxd_ckpt.core.option_classes import fields_of, options_of, takes
from nxd_ckpt.errors import InvalidArgument, as_checkpoint_errors
from nxd_ckpt.keywords import ConvertKeywords, UnshardKeywords
from nxd_ckpt.layouts.weight_files import WEIGHT_FILES
from nxd_ckpt.migrate.migrate import Translation
from nxd_ckpt.options.conversion import ConvertOptions, Form, UnshardOptions
from nxd_ckpt.options.execution import OutputOptions
from nxd_ckpt.output.locations import location_of, refuse_inside
from nxd_ckpt.output.source import Source, find_source
from nxd_ckpt.storage.urls import ARCHIVES, StrPath, is_url, join, local_path
from nxd_ckpt.tag.recognise import Program

Write = Callable[[Source, StrPath, ConvertOptions], Converted]


def _translated(write: Callable[[Translation, StrPath], Converted]) -> Write:
    """Return the writer of a form whose names are another program's."""
    return lambda source, dst, chosen: write(Translation(source, chosen), dst)


_SHARED = "all_ranks timeout"
_KEYS = "model_key optim_key"
_UNRECORDED = "partitions saved_param_names"
_MODEL = "config mapping kv_size_multiplier hardware dtype prefix key_mapping"
_TAG = f"dp tp pp ep stages use_xser num_workers {_SHARED}"
_FILES = "use_safetensors unshard_strategy size_per_shard sha256"

FORMS: Mapping[tuple[Form, str], tuple[Write, str]] = {
    ("tag", "own"): (to_tag, f"{_TAG} {_UNRECORDED} {_KEYS} optimizer optimizer_form optim_only"),
    ("tag", "nxd"): (
        to_nxd_tag,
        f"{_TAG} {_MODEL} model_key pad_attn_heads virtual_pp qkv_linear fuse_qkv coalesce_qkv split_gate_up",
    ),
    ("tag", "hf"): (_translated(Translation.to_tag), f"{_TAG} {_MODEL} {_UNRECORDED} optimizer optimizer_form"),
    ("dcp", "own"): (to_dcp, f"{_UNRECORDED} {_KEYS} optimizer flatten_optimizer_state sha256"),
    ("dcp", "hf"): (
        _translated(Translation.to_dcp),
        f"{_MODEL} {_KEYS} optimizer saved_param_names flatten_optimizer_state sha256",
    ),
    ("files", "own"): (to_files, f"{_FILES} {_UNRECORDED} {_KEYS} optimizer"),
    ("files", "hf"): (_translated(Translation.to_files), f"{_FILES} {_MODEL} saved_param_names optimizer"),
    ("hf", "hf"): (
        _translated(Translation.to_hf),
        f"{_MODEL} {_SHARED} saved_param_names optimizer tokenizer master_weights model pad_attn_heads "
        "size_per_shard sha256",
    ),
    ("torchtitan", "hf"): (
        _translated(Translation.to_torchtitan),
        f"{_MODEL} saved_param_names optimizer torchtitan_release sha256",
    ),
    ("tar", "own"): (to_tar, ""),
}
"""Writer of each form with each kind of names, and the options that mean something beside those of every output."""

_OF_DCP = (Program.TORCH_DCP, Program.TORCH_CHECKPOINTING)


@as_checkpoint_errors
@takes(ConvertOptions)
def convert(src: StrPath, dst: StrPath, **options: Unpack[ConvertKeywords]) -> Converted:
    """Make ``dst`` of any checkpoint, in the form ``to``.

    The source is recognised by its files: all that ``load_checkpoint`` reads. It is only read, as plain data, and its
    digests are verified where it has any. The result is equal to it in every bit, and appears when all of it is
    durable; a conversion that fails or is killed leaves nothing behind. Extra memory: about 100 MiB for each worker,
    for checkpoints of any size. Keywords are the fields of `nxd_ckpt.options.conversion.ConvertOptions`.

    Args:
        src: the checkpoint's directory, file or archive, or the URL of one.
        dst: directory, archive or URL of the result; for "torchtitan" the directory in which ``step-N`` is made, or
            ``step-0`` for a model without its optimizer.

    Raises:
        InvalidArgument: options contradict each other, the form or the source; or ``dst`` may not be replaced.
        CheckpointNotFound, PartNotFound: no checkpoint, an incomplete one, several, or ranks' files are missing.
        UnsupportedState: the form cannot hold this source; the message says what to do.
        CorruptCheckpoint: files are damaged, from two saves, or of two layouts.
        KeyMismatch: no rule maps a name, or tensors are missing.
        TopologyMismatch, ShapeMismatch: sizes do not divide a tensor, its cut is not known, or it does not fit
            config.json.
        OptimizerMismatch: the names of the optimizer's parameters are not known.
        DtypeMismatch: a value does not fit into ``dtype``.
        TagReplaced: the source was removed, or saved again, while it was read; there is no result.
        PeerTimeout: with ``all_ranks``, a rank did not join, or was lost.
    """
    chosen = options_of(ConvertOptions, options)
    form = _guessed(dst) if chosen.to is None else chosen.to
    kinds = [names for each, names in FORMS if each == form]
    source = find_source(src, chosen.storage_options)
    names = chosen.names or kinds[0]
    if names not in kinds:
        raise InvalidArgument(f"to={form!r} has names={' or '.join(map(repr, kinds))}; found {names!r}")
    if source.writer is Program.HUGGING_FACE and chosen.names is None and form == "tag":
        raise InvalidArgument(
            f"{source.root.path} has the form of a Hugging Face model: pass names='own' (--names own) to keep the "
            "names that are there, as a job with transformers' layers has them, or names='nxd' (--names nxd) for NxD's"
        )
    write, option_names = FORMS[form, names]
    _refuse_others(chosen, form, names, option_names)
    # Directories of tags and of torch DCP are called x.ckpt by others.
    ends = (*ARCHIVES, *(WEIGHT_FILES if form in ("files", "hf") else ()))
    if form != "tar" and os.fspath(dst).endswith(ends):
        raise InvalidArgument(
            f"output {os.fspath(dst)} is named as one file, but to={form!r} makes a directory: pass the directory's "
            "name, without the ending"
        )
    # Ranks' files may be below the path that was passed, and the rest of the checkpoint beside them.
    refuse_inside(source.root, location_of(dst, "output", chosen.written_with))
    part_keys = {"model": chosen.model_key, "optimizer": chosen.optim_key}
    keys = {part: key for part, key in part_keys.items() if key is not None}
    reads_keys = source.writer in _OF_DCP or (source.writer is Program.TORCH_XLA and form != "dcp")
    source = replace(source, keys=keys if reads_keys else {}, optimizer=chosen.optimizer)
    return write(source, dst, replace(chosen, to=form))


def _guessed(dst: StrPath) -> Form:
    """Return the form that the output's name shows. Raises InvalidArgument if it shows none."""
    name = os.fspath(dst)
    if name.endswith(ARCHIVES):
        return "tar"
    others = ", ".join(form for form in dict.fromkeys(form for form, _ in FORMS) if form != "tag")
    raise InvalidArgument(f"output {name}: its name shows no form; pass to=, tag (nxd_ckpt's own) or one of {others}")


def _refuse_others(chosen: ConvertOptions, form: Form, names: str, option_names: str) -> None:
    defaults = ConvertOptions()
    meaningful = {"to", "names", *(each.name for each in fields_of(OutputOptions)), *option_names.split()}
    for each in fields_of(ConvertOptions):
        if each.name not in meaningful and getattr(chosen, each.name) != getattr(defaults, each.name):
            others = [key for key, (_, options) in FORMS.items() if each.name in options.split()]
            where = " or ".join(f"to={form!r} with names={kind!r}" for form, kind in others)
            raise InvalidArgument(f"{each.name}= means nothing for to={form!r} with names={names!r}; it is for {where}")


@as_checkpoint_errors
@takes(UnshardOptions)
def unshard_checkpoint(
    dir: StrPath,
    target_dir: StrPath,
    optim: bool | None = None,
    *,
    save_overwrite: bool = False,
    quiet: bool = False,
    **options: Unpack[UnshardKeywords],
) -> tuple[Any, Any]:
    """OLMo-core's name for ``convert(to="files")``: returns the paths of model and optimizer, each None if absent.

    Args:
        dir: a checkpoint.
        target_dir: directory or URL of the result.
        optim: False leaves out the optimizer, True asks for it.
        save_overwrite: another name for ``overwrite``, OLMo-core's.
        quiet: show no progress.
    """
    chosen = options_of(UnshardOptions, options)
    values = {each.name: getattr(chosen, each.name) for each in fields_of(UnshardOptions)}
    values["overwrite"] = chosen.overwrite or save_overwrite
    values["progress"] = chosen.progress and not quiet
    done = convert(dir, target_dir, to="files", optimizer=optim, **values)

    def path(part: str) -> StrPath | None:
        name = next((name for name in done.files if name.startswith(part) and not name.endswith(".json")), None)
        if name is None:
            return None
        place = name.partition("/")[0]
        return join(done.target, place) if is_url(target_dir) else Path(local_path(target_dir)) / place

    return path(MODEL), path(OPTIM)
