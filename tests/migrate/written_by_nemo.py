"""Checkpoints of neuronx-nemo-megatron, of an :class:`OldRun`: generated, file by file.

Provenance: every name and key is from the project's sources, which sources.md here lists (aws-neuron/
neuronx-nemo-megatron, ``nlp_overrides.py``, ``serialization.py``, ``model_utils.py``, ``modelPT.py``, and its scripts
that convert to and from Hugging Face). How ranks hold the tensors is written out here with torch alone.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nxd_ckpt.formats.tensors import map_tensors
from tests.hugging_face.reference import Model, State
from tests.migrate.old_run import ADAMW, GROUPS, STEPS, OldRun, is_decayed

NEMO_NAME = f"megatron_llama--step={STEPS}-consumed_samples={STEPS * 2}.0.ckpt"
_MODULE = "nemo.collections.nlp.parts.serialization"


class TensorReference:
    """What its own xser leaves in a tensor's place."""

    def __init__(self, tid: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.tid, self.shape, self.dtype = tid, shape, dtype


TensorReference.__module__ = _MODULE


@dataclass(frozen=True)
class NemoJob:
    """How it trains. ``fused`` is one query_key_value, not query and key_value; without ``dp`` there is no ZeRO-1.
    ``weightless``: weights are only in the optimizer."""

    tp: int = 2
    pp: int = 1
    virtual_pp: int = 1
    dp: int | None = None
    fused: bool = True
    tied: bool = False
    xser: bool = False
    weightless: bool = False


def write_nemo(place: Path, run: OldRun, job: NemoJob, name: str = NEMO_NAME) -> Path:
    """A directory of each rank, with the file of one checkpoint in each."""
    for pp, tp in product(range(job.pp), range(job.tp)):
        rank = f"mp_rank_{tp:02d}" if job.pp == 1 else f"tp_rank_{tp:02d}_pp_rank_{pp:03d}"
        content = _content(run, job, tp, pp)
        if job.dp is None:
            content["optimizer_states"] = [_optimizer(run, job, tp, pp)]
        _save(content, place / rank / name, job, weights=not job.weightless)
        for dp_rank in range(job.dp or 0):
            states = [_optimizer(run, job, tp, pp, dp_rank)]
            if job.weightless:
                states[0]["untrained_buffers"] = {}
            stem, last, _ = name.removesuffix(".ckpt").partition("-last")
            folder = place / rank / "optim" / f"dp_rank_{dp_rank:03d}"
            _save(states, folder / f"{stem}-optimizer_states{last}.ckpt", job)
    return place


def _content(run: OldRun, job: NemoJob, tp: int, pp: int) -> dict[str, Any]:
    """Lightning's dict, OmegaConf turned to containers, without callbacks."""
    cfg = {"wrap_with_zero": job.dp is not None, "virtual_pipeline_model_parallel_size": job.virtual_pp}
    content = {
        "epoch": 0,
        "global_step": STEPS,
        "pytorch-lightning_version": "1.9.5",
        "loops": {"fit_loop": {"state_dict": {}}},
        "lr_schedulers": [run.scheduler],
        "hparams_name": "cfg",
        "hyper_parameters": {"cfg": cfg},
    }
    chunks = [_chunk(run, run.weights, job, tp, pp, number) for number in range(job.virtual_pp)]
    if job.virtual_pp == 1:
        state = {f"model.{name}": tensor for name, tensor in chunks[0].items()}
        return {**content, "state_dict": {**state, "untrained_buffer_names": []}}
    return {
        **content,
        "state_dict": {"untrained_buffer_names": []},
        **{f"model{number}": _nested(chunk) for number, chunk in enumerate(chunks)},
    }


def _nested(chunk: State) -> dict[str, Any]:
    """As ``state_dict_for_save_checkpoint`` nests it: flat in the encoder."""
    inside: dict[str, Any] = {}
    found = {"language_model": inside}
    for name, tensor in chunk.items():
        if ".encoder." in name:
            inside.setdefault("encoder", {})[name.removeprefix("language_model.encoder.")] = tensor
        elif ".embedding." in name:
            inside["embedding"] = {"word_embeddings": {"weight": tensor}}
        elif name == "word_embeddings.weight":
            found["word_embeddings_for_head"] = {"weight": tensor}
    return found


def _chunk(run: OldRun, state: State, job: NemoJob, tp: int, pp: int, number: int) -> State:
    """What a rank holds of one of its virtual stages, layers from 0 on."""
    model, stages = run.job.model, job.pp * job.virtual_pp
    count, first = model.layers // stages, (number * job.pp + pp) * (model.layers // stages)
    held: State = {}
    if pp == number == 0:
        held["language_model.embedding.word_embeddings.weight"] = _cut(state["model.embed_tokens.weight"], job, tp)
    for layer in range(count):
        above = f"language_model.encoder.layers.{layer}."
        held |= {f"{above}{name}": one for name, one in _layer(state, model, first + layer, job, tp).items()}
    if pp == job.pp - 1 and number == job.virtual_pp - 1:
        held["language_model.encoder.final_layernorm.weight"] = state["model.norm.weight"]
        if not job.tied:
            held["language_model.output_layer.weight"] = _cut(state["lm_head.weight"], job, tp)
        elif job.pp > 1:
            held["word_embeddings.weight"] = _cut(state["model.embed_tokens.weight"], job, tp)
    return {name: tensor.clone() for name, tensor in held.items()}


def _layer(state: State, model: Model, number: int, job: NemoJob, tp: int) -> State:
    at = f"model.layers.{number}"
    q, k, v = (state[f"{at}.self_attn.{name}_proj.weight"] for name in "qkv")
    if job.fused:
        attention = {"query_key_value": _by_head(model, q, k, v)}
    else:
        attention = {"query": q, "key_value": _by_head(model, k, v)}
    halves = [_cut(state[f"{at}.mlp.{name}_proj.weight"], job, tp) for name in ("gate", "up")]
    return {
        "input_layernorm.weight": state[f"{at}.input_layernorm.weight"],
        **{f"self_attention.{name}.weight": _cut(tensor, job, tp) for name, tensor in attention.items()},
        "self_attention.dense.weight": _cut(state[f"{at}.self_attn.o_proj.weight"], job, tp, dim=1),
        "post_attention_layernorm.weight": state[f"{at}.post_attention_layernorm.weight"],
        "mlp.dense_h_to_4h.weight": torch.cat(halves),
        "mlp.dense_4h_to_h.weight": _cut(state[f"{at}.mlp.down_proj.weight"], job, tp, dim=1),
    }


def _by_head(model: Model, *tensors: torch.Tensor) -> torch.Tensor:
    """For each key-value head the rows of each tensor that belong to it."""
    return torch.cat([part for parts in zip(*(one.chunk(model.kv_heads) for one in tensors)) for part in parts])  # noqa: B905


def _cut(tensor: torch.Tensor, job: NemoJob, tp: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(job.tp, dim)[tp]


def _optimizer(run: OldRun, job: NemoJob, tp: int, pp: int, dp_rank: int = 0) -> dict[str, Any]:
    def local(state: State) -> State:
        chunks = (_chunk(run, state, job, tp, pp, number).items() for number in range(job.virtual_pp))
        return {f"{number}.{name}": tensor for number, chunk in enumerate(chunks) for name, tensor in chunk}

    weights, moments = local(run.weights), {kind: local(state) for kind, state in run.moments.items()}
    groups = [[name for name in weights if is_decayed(name) == decayed] for decayed in (True, False)]
    names = [name for group in groups for name in group]
    options: list[dict[str, Any]] = []
    for one, group in zip(GROUPS, groups, strict=True):
        own = [names.index(name) for name in group]
        options.append({**ADAMW, **one, "lr": run.lr, "initial_lr": 0.01, "params": own})
    entries = {
        index: {"step": STEPS, **{kind: _shard(held[name], job, dp_rank) for kind, held in moments.items()}}
        for index, name in enumerate(names)
    }
    if job.dp is None:
        return {"state": entries, "param_groups": options}
    return {
        "state": {},
        "base_state": entries,
        "shape_info": {index: weights[name].shape for index, name in enumerate(names)},
        "param_groups": options,
        "sharded_master_weights": {i: _shard(weights[name], job, dp_rank) for i, name in enumerate(names)},
    }


def _shard(tensor: torch.Tensor, job: NemoJob, dp_rank: int) -> torch.Tensor:
    dp = job.dp or 1
    padding = tensor.new_zeros(-len(tensor) % dp, *tensor.shape[1:])
    return torch.cat([tensor, padding]).chunk(dp)[dp_rank].clone()


def _save(content: Any, path: Path, job: NemoJob, *, weights: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not job.xser:
        torch.save(content, path)
        return
    tensors: list[torch.Tensor] = []

    def refer(tensor: torch.Tensor) -> TensorReference:
        tensors.append(tensor)
        return TensorReference(len(tensors) - 1, tensor.shape, tensor.dtype)

    tree = map_tensors(content, refer)
    folder = path.with_name(f"{path.name}.tensors")
    folder.mkdir()
    for tid, tensor in enumerate(tensors if weights else ()):
        torch.save(tensor, folder / f"tensor_{tid}.pt")
    with _modules(_MODULE.split(".")):
        torch.save(tree, path)


class _modules:
    """The class's module, which is not installed here, while it is pickled."""

    def __init__(self, parts: Iterable[str]) -> None:
        names = list(parts)
        self._names = [".".join(names[: count + 1]) for count in range(len(names))]

    def __enter__(self) -> None:
        module = ModuleType(_MODULE)
        module.__dict__["TensorReference"] = TensorReference
        sys.modules |= dict.fromkeys(self._names, module)

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            del sys.modules[name]
