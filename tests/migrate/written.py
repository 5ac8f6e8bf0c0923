"""Directories as the Neuron trainers write them, of an :class:`OldRun`: generated, file by file.

Provenance: every name and key is from the projects' sources, which sources.md here lists with repository and path
(neuronx-distributed 0.18; neuronx-distributed-training, ``nlp_overrides.py``, ``exp_manager.py`` and
``model_utils.py``; optimum-neuron 0.4.5, ``modeling_utils.py``, ``transformations_utils.py`` and
``trainers/transformers.py``). How ranks hold the tensors is ``tests.hugging_face.reference``'s, with torch alone; that
its order of query heads is that of optimum-neuron's ``compute_query_indices_for_rank`` was checked for 63 sizes.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt.core.names import rank_file
from tests.hugging_face.reference import State
from tests.migrate.old_run import ADAMW, GROUPS, STEPS, OldRun, is_decayed
from tests.tag.xser_files import save_xser

NXDT_NAME = f"hf_llama3_8B--step={STEPS}-consumed_samples={STEPS * 2}.0.ckpt"


def write_nxd(
    tag: Path,
    run: OldRun,
    *,
    dp: int = 1,
    zero1: bool = True,
    masters: bool = False,
    xser: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A tag of neuronx-distributed, plain or xser, with both markers. The model's weights are cast to ``dtype``."""
    save = save_xser if xser else torch.save
    (tag / "model").mkdir(parents=True)
    (tag / "optim").mkdir()
    for pp, tp in product(range(run.job.pp), range(run.job.tp)):
        weights = {name: tensor.to(dtype) for name, tensor in _local(run, run.weights, tp, pp).items()}
        save(weights, tag / "model" / rank_file(0, None, tp, pp))
        for dp_rank in range(dp if zero1 else 1):
            tree = _zero1(run, tp, pp, dp, dp_rank, masters) if zero1 else _plain(run, tp, pp)
            save(tree, tag / "optim" / rank_file(dp_rank, None, tp, pp))
    for marker in ("checkpoint", "done"):
        (tag / marker).write_text("1")
    return tag


def write_legacy(place: Path, run: OldRun) -> Path:
    """NxD 0.3's directories of ranks, each with the dict of a script."""
    for pp, tp in product(range(run.job.pp), range(run.job.tp)):
        folder = place / f"tp_rank_{tp:02d}_pp_rank_{pp:02d}"
        folder.mkdir(parents=True)
        payload = {"model": _local(run, run.weights, tp, pp), "optimizer": _plain(run, tp, pp)}
        torch.save({**payload, "scheduler": run.scheduler, "epoch": 7}, folder / "checkpoint.pt")
    return place


def names_by_group(run: OldRun) -> list[list[list[str]]]:
    """The optimizer's parameters, by stage and param group."""
    return [_groups(run, pp) for pp in range(run.job.pp)]


def write_nxdt(folder: Path, run: OldRun, **options: Any) -> Path:
    """``checkpoints/NAME.ckpt`` of neuronx-distributed-training: the user content is Lightning's dict without
    state_dict and optimizer_states."""
    tag = write_nxd(folder / "checkpoints" / NXDT_NAME, run, **options)
    content = {
        "epoch": 0,
        "global_step": STEPS,
        "pytorch-lightning_version": "2.5.0",
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 1, "completed": 0}}}},
        "callbacks": {
            "NeMoModelCheckpoint": {"best_model_score": torch.tensor(float(STEPS)), "dirpath": "checkpoints"}
        },
        "lr_schedulers": [run.scheduler],
        "hparams_name": "cfg",
        "hyper_parameters": {
            "cfg": {
                "model_source": "hf",
                "wrap_with_zero": True,
                "distributed_strategy": {"tensor_model_parallel_size": run.job.tp, "kv_replicator": run.job.copies},
            }
        },
    }
    torch.save(content, tag / "user_content.pt")
    return tag


def write_optimum(folder: Path, run: OldRun, **options: Any) -> Path:
    """``checkpoint-N`` of optimum-neuron 0.2.1 to 0.4.5; 0.2.0 did not say ``peft_type``."""
    place = folder / f"checkpoint-{STEPS}"
    shards = write_nxd(place / "shards", run, **options)
    for stage in range(run.job.pp):
        (shards / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(metadata_of(run, stage), indent=4))
    (place / "config.json").write_text(json.dumps(run.job.model.config))
    (place / "trn_config.json").write_text(json.dumps({"tensor_parallel_size": run.job.tp, "use_xser": False}))
    (place / "trainer_state.json").write_text(json.dumps({"global_step": STEPS, "epoch": 0.5, "log_history": []}))
    (place / "training_args.bin").write_bytes(b"a pickle of transformers' TrainingArguments")
    torch.save(run.scheduler, place / "scheduler.pt")
    return place


def write_pickled_optimum(folder: Path, run: OldRun, **options: Any) -> Path:
    """``checkpoint-N`` of optimum-neuron 0.0.22 to 0.2.0 (v0.2.0, ``distributed/base.py`` and ``utils.py``):
    its metadata are pickled. Gate and up are apart (``decoder_models.py``, ``LLamaParallelMLP``)."""
    assert not run.job.fused_mlp
    place = write_optimum(folder, run, **options)
    for stage in range(run.job.pp):
        path = place / "shards" / f"mp_metadata_pp_rank_{stage}.json"
        path.unlink()
        torch.save(pickled_metadata_of(run), path.with_suffix(".pt"))
    (place / "trn_config.json").unlink()
    return place


def pickled_metadata_of(run: OldRun) -> dict[str, Any]:
    """What ``save_model_sharded_checkpoint`` pickled, the same for each stage: ``named_parameters`` of NxD's pipeline
    are those of the whole model."""
    job, model = run.job, run.job.model
    has_copies = job.qkv in ("linear", "fused")
    places = [f"model.layers.{layer}.self_attn" for layer in range(model.layers if has_copies else 0)]
    return {
        "sharded_metadata": {name: _kind(_cut(run, name)) for name in run.job.rank(run.weights)},
        "gqa_qkv_metadata": {
            "original_names_to_gqa_qkv_names": {
                f"{at}.{letter}_proj.weight": f"{at}.qkv_proj.weight_{'qkv' if job.qkv == 'fused' else letter}"
                for at in places
                for letter in "qkv"
            },
            "output_projections_names": {f"{at}.o_proj.weight" for at in places},
            "num_attention_heads": model.heads if has_copies else None,
            "num_key_value_heads": model.kv_heads if has_copies else None,
            "kv_size_multiplier": job.copies if has_copies else None,
            "fuse_qkv": job.qkv == "fused" if has_copies else None,
            "q_output_size_per_partition": model.hidden // job.tp if has_copies else None,
            "kv_output_size_per_partition": (
                model.kv_heads * model.head_dim * job.copies // job.tp if has_copies else None
            ),
        },
    }


def _kind(cut: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "sharded" if cut["tensor_model_parallel"] else "tied",
        "partition_dim": cut.get("partition_dim"),
    }


def metadata_of(run: OldRun, stage: int) -> dict[str, Any]:
    """What ``create_parameter_metadata`` makes of the model on that stage."""
    names = list(_local(run, run.weights, 0, stage))
    modules = []
    for layer in range(run.job.model.layers):
        at = f"model.layers.{layer}"
        mine = any(name.startswith(f"{at}.") for name in names)
        modules.append({"module_fully_qualified_name": f"{at}.self_attn", "specs": _attention(run) if mine else []})
        modules.append({"module_fully_qualified_name": f"{at}.mlp", "specs": _mlp(run) if mine else []})
    return {
        "parameters": {name: _cut(run, name) for name in names},
        "model_weight_transformation_specs": modules,
    }


def _cut(run: OldRun, name: str) -> dict[str, Any]:
    if "norm" in name:
        return {"tensor_model_parallel": False}
    dim = int(name.endswith(("o_proj.weight", "down_proj.weight")))
    stride = 2 if "gate_up" in name else 1
    return {
        "tensor_model_parallel": True,
        "partition_dim": dim,
        "partition_stride": stride,
        "num_partitions": run.job.tp,
    }


def _attention(run: OldRun) -> list[Any]:
    job, model = run.job, run.job.model
    if job.qkv == "separate":
        return []
    spec = {
        "gqa_qkv_projection_name": "qkv_proj",
        "query_projection_name": "q_proj",
        "key_projection_name": "k_proj",
        "value_projection_name": "v_proj",
        "output_projection_name": "o_proj",
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "kv_size_multiplier": job.copies,
        "q_output_size_per_partition": model.hidden // job.tp,
        "kv_output_size_per_partition": model.kv_heads * model.head_dim * job.copies // job.tp,
        "fuse_qkv": job.qkv == "fused",
        "bias": False,
        "tp_size": job.tp,
        "peft_type": None,
    }
    return [["GQAQKVColumnParallelLinearSpec", spec]]


def _mlp(run: OldRun) -> list[Any]:
    spec = {
        "fused_linear_name": "gate_up_proj",
        "linear_names": ["gate_proj", "up_proj"],
        "bias": False,
        "fuse_axis": 0,
        "original_dims": [run.job.model.intermediate] * 2,
        "tp_size": run.job.tp,
        "peft_type": None,
    }
    return [["FusedLinearsSpec", spec]]


def _local(run: OldRun, state: State, tp: int, pp: int) -> State:
    held = run.job.rank(state, tp)
    return {name: tensor.clone() for name, tensor in held.items() if run.job.stage(name) == pp}


def _groups(run: OldRun, pp: int) -> list[list[str]]:
    names = list(_local(run, run.weights, 0, pp))
    return [[name for name in names if is_decayed(name) == decayed] for decayed in (True, False)]


def _options(run: OldRun, groups: list[list[str]]) -> list[dict[str, Any]]:
    found, begin = [], 0
    for options, names in zip(GROUPS, groups, strict=True):
        own = list(range(begin, begin + len(names)))
        found.append(
            {**ADAMW, "betas": list(ADAMW["betas"]), **options, "lr": run.lr, "initial_lr": 0.01, "params": own}
        )
        begin += len(names)
    return found


def _entries(run: OldRun, tp: int, pp: int, dp: int, dp_rank: int) -> dict[int, dict[str, Any]]:
    names = [name for group in _groups(run, pp) for name in group]
    held = {kind: _local(run, state, tp, pp) for kind, state in run.moments.items()}
    return {
        index: {"step": STEPS, **{kind: _shard(local[name], dp, dp_rank) for kind, local in held.items()}}
        for index, name in enumerate(names)
    }


def _plain(run: OldRun, tp: int, pp: int) -> dict[str, Any]:
    return {"state": _entries(run, tp, pp, 1, 0), "param_groups": _options(run, _groups(run, pp))}


def _zero1(run: OldRun, tp: int, pp: int, dp: int, dp_rank: int, masters: bool) -> dict[str, Any]:
    groups, held = _groups(run, pp), _local(run, run.weights, tp, pp)
    names = [name for group in groups for name in group]
    tree = {
        "state": {},
        "param_groups": _options(run, groups),
        "base_state": _entries(run, tp, pp, dp, dp_rank),
        "shape_info": {index: list(held[name].shape) for index, name in enumerate(names)},
    }
    if masters:
        tree["sharded_master_weights"] = {i: _shard(held[name], dp, dp_rank) for i, name in enumerate(names)}
    return tree


def _shard(tensor: torch.Tensor, dp: int, dp_rank: int) -> torch.Tensor:
    missing = -len(tensor) % dp
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]).chunk(dp)[dp_rank].clone()


def write_old_optimum(folder: Path, run: OldRun) -> Path:
    """``checkpoint-N`` of optimum-neuron before 0.0.22 (v0.0.20, ``distributed/base.py``): NxD's files of ranks, xser.
    Gate and up are apart (``decoder_models.py``, ``LLamaParallelMLP``)."""
    assert not run.job.fused_mlp
    place = folder / f"checkpoint-{STEPS}"
    (place / "tensor_parallel_shards").mkdir(parents=True)
    for pp, tp in product(range(run.job.pp), range(run.job.tp)):
        held = _local(run, run.weights, tp, pp)
        cuts = {name: _cut(run, name) for name in held}
        content = {
            "model": {**held, "model.rotary_emb.inv_freq": torch.ones(2)},
            "sharded_metadata": {name: _kind(cut) for name, cut in cuts.items()},
            "optimizer_state_dict": _plain(run, tp, pp),
        }
        save_xser(content, place / "tensor_parallel_shards" / f"tp_rank_{tp:02d}_pp_rank_{pp:02d}")
    (place / "config.json").write_text(json.dumps(run.job.model.config))
    (place / "trainer_state.json").write_text(json.dumps({"global_step": STEPS}))
    torch.save(run.scheduler, place / "scheduler.pt")
    return place
