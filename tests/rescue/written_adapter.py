"""Adapters as optimum-neuron writes them, generated from the facts of its sources, which docs/rescue.md lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt.layout.names import rank_file
from tests.hugging_face.reference import Job
from tests.lora.adapters import ALPHA, RANK, adapters_of_rank
from tests.rescue.old_run import STEPS, OldRun
from tests.rescue.written import metadata_of

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ABOVE = "base_model.model."
"""What names begin with."""


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
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": LAYERS,
        "bias": "none", "base_model_name_or_path": None, "inference_mode": True,
    }  # fmt: skip
    (place / f"adapter_{name}" / "adapter_config.json").write_text(json.dumps(config))
    (place / "trainer_state.json").write_text(json.dumps({"global_step": STEPS}))
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
