"""Adapters as optimum-neuron writes them, generated from the facts of its sources, which sources.md here lists."""

import json
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt.core.names import rank_file
from tests.hugging_face.reference import Job
from tests.lora.adapters import ALPHA, RANK, adapters_of_rank
from tests.migrate.old_run import STEPS, OldRun
from tests.migrate.written import metadata_of, pickled_metadata_of

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ABOVE = "base_model.model."
"""What names begin with."""
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": LAYERS,
    "bias": "none", "base_model_name_or_path": None, "inference_mode": True,
}  # fmt: skip


def write_adapter(folder: Path, job: Job, name: str = "default") -> Path:
    """``checkpoint-N/adapter_NAME`` of optimum-neuron 0.2.1 to 0.4.5 (``peft/peft_model.py``, ``save_pretrained``)."""
    place = folder / f"checkpoint-{STEPS}"
    shards = place / f"adapter_{name}" / "adapter_shards"
    (shards / "model").mkdir(parents=True)
    run = OldRun(job, job.model.state(), {}, {}, 0.1, [])
    for pp in range(job.pp):
        for tp in range(job.tp):
            held = {key: one for key, one in adapters_of_rank(job, tp).items() if job.stage(key) == pp}
            content = {f"{ABOVE}{key}": tensor.clone() for key, tensor in held.items()}
            torch.save(content, shards / "model" / rank_file(0, None, tp, pp))
        (shards / f"mp_metadata_pp_rank_{pp}.json").write_text(json.dumps(_metadata(run, pp, list(held), name)))
    for marker in ("checkpoint", "done"):
        (shards / marker).write_text("1")
    (place / f"adapter_{name}" / "adapter_config.json").write_text(json.dumps(CONFIG))
    (place / "trainer_state.json").write_text(json.dumps({"global_step": STEPS}))
    return place


def write_pickled_adapter(folder: Path, job: Job) -> Path:
    """``checkpoint-N`` with the adapter "default" of optimum-neuron 0.0.24 to 0.2.0 (v0.1.0, ``utils/peft_utils.py``,
    ``save_pretrained``; ``distributed/utils.py``, ``_peft_tuner_linear_to_parallel_linear``), without pipeline stages.
    Where q, k and v became one layer their adapters were dropped. ``lm_head`` was trained whole.
    """
    place = folder / f"checkpoint-{STEPS}"
    shards = place / "adapter_shards"
    (shards / "model").mkdir(parents=True)
    run = OldRun(job, job.model.state(), {}, {}, 0.1, [])
    cuts: dict[str, Any] = {}
    content = pickled_metadata_of(run)
    for tp in range(job.tp):
        held = {key: one for key, one in adapters_of_rank(job, tp).items() if "qkv_proj" not in key}
        held["lm_head.weight"] = job.rank(job.model.state(), tp)["lm_head.weight"]
        named = {f"{ABOVE}{key}": one.clone() for key, one in held.items()}
        torch.save(named, shards / "model" / rank_file(0, None, tp, 0))
    for key, cut in content["sharded_metadata"].items():
        layer, _, last = key.rpartition(".")
        wrapped = layer.endswith("_proj") and "qkv_proj" not in key
        cuts[f"{ABOVE}{layer}.base_layer.{last}" if wrapped else f"{ABOVE}{key}"] = cut
        if wrapped:
            sharded = "lora_A" if cut["partition_dim"] else "lora_B"
            for part in ("lora_A", "lora_B"):
                tied = {"kind": "tied", "partition_dim": None}
                cuts[f"{ABOVE}{layer}.{part}.weight"] = cut if part == sharded else tied
    head = cuts.pop(f"{ABOVE}lm_head.weight")
    cuts |= {f"{ABOVE}lm_head.{kind}.weight": head for kind in ("original_module", "modules_to_save")}
    heads = content["gqa_qkv_metadata"]
    heads["original_names_to_gqa_qkv_names"] = {
        f"{ABOVE}{key}": f"{ABOVE}{one}" for key, one in heads["original_names_to_gqa_qkv_names"].items()
    }
    heads["output_projections_names"] = {f"{ABOVE}{key}" for key in heads["output_projections_names"]}
    torch.save({"sharded_metadata": cuts, "gqa_qkv_metadata": heads}, shards / "mp_metadata_pp_rank_0.pt")
    for marker in ("checkpoint", "done"):
        (shards / marker).write_text("1")
    (place / "adapter_config.json").write_text(json.dumps({**CONFIG, "modules_to_save": ["lm_head"]}))
    return place


def _metadata(run: OldRun, stage: int, adapters: list[str], name: str) -> dict[str, Any]:
    """That of the whole model, whose layers are wrapped."""
    found = metadata_of(run, stage)
    parameters = {}
    for key, cut in found["parameters"].items():
        layer, _, last = key.rpartition(".")
        parameters[f"{ABOVE}{layer}.base_layer.{last}" if layer.endswith("_proj") else f"{ABOVE}{key}"] = cut
    for key in adapters:
        layer, _, last = key.rpartition(".")
        parameters[f"{ABOVE}{layer}.{name}.{last}"] = {"tensor_model_parallel": False}
    for module in found["model_weight_transformation_specs"]:
        module["module_fully_qualified_name"] = f"{ABOVE}{module['module_fully_qualified_name']}"
        for _, spec in module["specs"]:
            spec["peft_type"] = "lora"
    return {**found, "parameters": parameters}
