"""``import_checkpoint``: a Hugging Face directory as a tag of a job of given sizes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from nxd_ckpt.convert.conversion import ExecutionOptions, convert
from nxd_ckpt.convert.export import DTYPES
from nxd_ckpt.convert.import_plan import Import, import_plan
from nxd_ckpt.convert.inputs import open_model
from nxd_ckpt.convert.job import Job
from nxd_ckpt.convert.locations import Options, StrPath, locate_output, location_of, written_with
from nxd_ckpt.convert.model_files import config_in, read_config
from nxd_ckpt.convert.worker_pool import joined
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument, as_checkpoint_errors
from nxd_ckpt.layout.mappings import Given, find_mapping
from nxd_ckpt.runtime.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.runtime.coordination.agreement import on_all
from nxd_ckpt.runtime.views.imported_model import ImportTarget


@as_checkpoint_errors()
def import_checkpoint(
    hf_directory: StrPath,
    tag: StrPath,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    virtual_pp: int = 1,
    config: StrPath | None = None,
    mapping: Given = None,
    kv_size_multiplier: int = 1,
    hardware: str = "trn1",
    pad_attn_heads: bool = False,
    qkv_linear: bool = False,
    fuse_qkv: bool = False,
    coalesce_qkv: bool = False,
    split_gate_up: bool = False,
    dtype: str | None = None,
    use_xser: bool = False,
    stages: Sequence[Sequence[str]] | None = None,
    model_key: str = "model",
    num_workers: int = 1,
    all_ranks: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    storage_options: Options | None = None,
    output_options: Options | None = None,
    durable: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
    progress: bool = False,
) -> Import:
    """Make ``tag`` of the model in ``hf_directory``, as a job of the given sizes would have saved it.

    The tag holds the model alone. It is written as any conversion's: rank by rank in bounded memory, about 100 MiB for
    each worker, and visible when it is complete.

    Args:
        hf_directory: a directory or URL with safetensors files, or one file with the whole model: safetensors, or a
            state dict that torch.save wrote, of which plain data is read, no code. It is only read.
        tag: the tag's directory or URL that is made, outside ``hf_directory``.
        dp, tp, pp, ep: the job's sizes. ``ep`` must divide ``dp``.
        virtual_pp: chunks of the model that each rank of an interleaved pipeline holds (virtual_pipeline_size).
        config: the model's config.json, or a directory with one; by default the one of ``hf_directory``.
        mapping: the name of a shipped mapping, a JSON file or document; by default chosen by config.json.
        kv_size_multiplier: how often the job keeps each key-value head.
        hardware: "trn1" or "trn2": the order of those copies.
        pad_attn_heads: the job pads its query heads with zeros to a multiple of ``tp``; on trn1.
        qkv_linear: the model has ``GQAQKVColumnParallelLinear`` (weight_q, weight_k, weight_v), not three layers.
        fuse_qkv: the same with ``fuse_qkv=True`` (weight_qkv), with or without ``qkv_linear``.
        coalesce_qkv: the model has one ``ColumnParallelLinear`` for q, k and v.
        split_gate_up: the model has gate_proj and up_proj, not gate_up_proj.
        dtype: "float32", "bfloat16" or "float16": what numbers of floating point are cast to; None keeps theirs.
        use_xser: write xser files.
        stages: the names of each pipeline stage; by default layers are spread evenly, in their order.
        model_key: where a file that torch.save wrote has the state dict, if it holds more.
        dry_run: write nothing, and raise nothing for names that are unknown or missing.
        num_workers, all_ranks, overwrite, storage_options, output_options, durable, timeout, progress: as for
            ``reshard``.

    Raises:
        KeyMismatch: names that no rule maps, with the closest rules; or tensors that the directory lacks.
        ShapeMismatch, TopologyMismatch: tensors or sizes that are not those of this config.json, or do not divide.
        DtypeMismatch: a value does not fit into ``dtype``.
        InvalidArgument: arguments that cannot be, or a ``tag`` that must not be touched.
        CheckpointNotFound, PartNotFound, MalformedFile, UnsupportedState: no directory, or not one that can be read.
    """
    execution = ExecutionOptions(num_workers, all_ranks, timeout, progress)
    variants = _variants(qkv_linear, fuse_qkv, coalesce_qkv, split_gate_up)

    plans: list[Import] = []

    def prepare(process: int, processes: int) -> Job:
        execution.validate()
        if dtype is not None and dtype not in DTYPES:
            raise InvalidArgument(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
        if virtual_pp < 1 or (virtual_pp > 1 and stages is not None):
            raise InvalidArgument(f"virtual_pp must be at least 1, and is for stages=None; found {virtual_pp}")
        topology = Topology(dp, tp, pp, ep)
        source = location_of(hf_directory, "input", storage_options)
        target = locate_output(tag, source, overwrite, written_with(storage_options, output_options))
        if config is None:
            document = open_model(source, model_key).config
        else:
            document = config_in(read_config(os.fspath(config), storage_options))
        chosen = find_mapping(mapping, document)
        sizes = chosen.sizes(document, kv_size_multiplier, hardware)
        sizes = replace(sizes, heads_of=tp if pad_attn_heads else 1)
        what = ImportTarget(topology, chosen, sizes, variants, dtype, use_xser, virtual_pp, stages, model_key)
        plans.append(import_plan(source, target, what))
        parts = Parts(model=True, use_xser=use_xser)
        return Job(source, target, what, parts, durable=durable, overwrite=overwrite)

    if dry_run:
        with joined(all_ranks, timeout) as agreement:
            on_all(agreement, lambda: prepare(agreement.rank, agreement.world_size))
    else:
        convert(prepare, execution)
    return plans[-1]


def _variants(qkv_linear: bool, fuse_qkv: bool, coalesce_qkv: bool, split_gate_up: bool) -> tuple[str, ...]:
    if coalesce_qkv and (qkv_linear or fuse_qkv):
        raise InvalidArgument("coalesce_qkv is for a model without qkv_linear and fuse_qkv: pass one or the other")
    asked = {
        "fuse_qkv": fuse_qkv,
        "qkv_linear": qkv_linear and not fuse_qkv,
        "coalesce_qkv": coalesce_qkv,
        "split_gate_up": split_gate_up,
    }
    return tuple(name for name, wanted in asked.items() if wanted)
