"""Tags of jobs whose optimizer has state, and what that is in Hugging Face's terms: all cut by hand."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from nxd_ckpt import Topology
from tests.hugging_face.reference import Job, State
from tests.hugging_face.saved import local_state, ranks_of
from tests.interop.saving import save_as_every_rank

FROZEN = "model.norm.weight"
"""Never had a gradient: no state, but master weights."""

STEP = 7.0
GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 0.1, "betas": [0.8, 0.9], "weight_decay": 0.1},
    {"lr": 0.1, "betas": [0.8, 0.9], "weight_decay": 0.0},
)


def group_of(name: str) -> int:
    """Norms are not decayed."""
    return int("norm" in name)


def whole_state(job: Job, *, masters: bool) -> dict[str, State]:
    """By kind of state, that of each Hugging Face tensor; every number of all is another one."""
    state = job.model.state()
    trained = {name: tensor for name, tensor in state.items() if name != FROZEN}
    found = {
        "exp_avg": {name: tensor / 3 for name, tensor in trained.items()},
        "exp_avg_sq": {name: (tensor / 5).bfloat16() for name, tensor in trained.items()},
    }
    return found | ({"master_weights": {name: tensor / 7 for name, tensor in state.items()}} if masters else {})


def expected_tensors(job: Job, *, masters: bool) -> State:
    """What the files of an export hold."""
    kinds = whole_state(job, masters=masters)
    return {f"{name}/{kind}": tensor for kind, held in kinds.items() for name, tensor in held.items()}


def expected_document(job: Job) -> dict[str, Any]:
    """What optimizer.json holds; groups list names in any order."""
    names = sorted(job.model.state())
    groups = [{**options, "params": [n for n in names if group_of(n) == i]} for i, options in enumerate(GROUPS)]
    steps = {name: {"step": STEP} for name in names if name != FROZEN}
    return {"format_version": 1, "param_groups": groups, "state": steps}


def save_trained(directory: Path, job: Job, *, dp: int, zero1: bool, names: bool = True, **options: Any) -> Path:
    """The tag of the job on ``dp`` data-parallel ranks; with ZeRO-1 it has master weights."""
    topologies = ranks_of(job, dp)

    def what(rank: int) -> dict[str, Any]:
        at = topologies[rank]
        groups = _groups(local_state(job, job.model.state(), at), apart=zero1 and job.ep > 1)
        tree = _zero1(job, at, groups) if zero1 else _plain(job, at, groups)
        model = local_state(job, job.model.state(), at)
        return {"model": model, "optimizer": tree, **({"param_names": groups} if names else {})}

    save_as_every_rank(directory, "step_1", topologies, what, durable=False, **options)
    return directory / "step_1"


def tensors(directory: Path) -> State:
    """All of the optimizer's files, as the safetensors library reads them; the index of several agrees."""
    files = sorted(directory.glob("optimizer*.safetensors"))
    state: State = {}
    places: dict[str, str] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            state |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            places |= dict.fromkeys(file.keys(), path.name)
    index = directory / "optimizer.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        assert places == json.loads(index.read_text())["weight_map"]
    return state


def document(directory: Path) -> dict[str, Any]:
    """optimizer.json, with names in order, without the number of files beside it."""
    found: dict[str, Any] = json.loads((directory / "optimizer.json").read_text())
    del found["files"]
    for group in found["param_groups"]:
        group["params"].sort()
    return found


def _groups(held: State, *, apart: bool) -> list[list[str]]:
    """The names of each param group; experts in groups of their own behind the others, if they are apart."""
    experts = [name for name in held if apart and "expert_mlps" in name]
    ordinary = [name for name in held if name not in experts]
    return [
        [name for name in names if group_of(name) == number]
        for names in ([ordinary, experts] if apart else [ordinary])
        for number in range(len(GROUPS))
    ]


def _plain(job: Job, at: Topology, groups: list[list[str]]) -> dict[str, Any]:
    names = [name for group in groups for name in group]
    return {"state": _entries(job, at, names, dp=1, dp_rank=0), "param_groups": _options(groups)}


def _zero1(job: Job, at: Topology, groups: list[list[str]]) -> dict[str, Any]:
    apart = len(groups) > len(GROUPS)
    first = [name for group in groups[: len(GROUPS)] for name in group]
    second = [name for group in groups[len(GROUPS) :] for name in group]
    held = local_state(job, job.model.state(), at)
    masters = local_state(job, whole_state(job, masters=True)["master_weights"], at)
    parts = [(first, at.dp, at.dp_rank), (second, at.expert_dp, at.expert_dp_rank)]
    base: dict[int, Any] = {}
    shards: dict[int, Any] = {}
    for begin, (names, dp, dp_rank) in zip((0, len(first)), parts, strict=True):
        entries = _entries(job, at, names, dp=dp, dp_rank=dp_rank)
        base |= {begin + index: entry for index, entry in entries.items()}
        shards |= {begin + index: _shard(masters[name], dp, dp_rank) for index, name in enumerate(names)}
    return {
        **(_offsets(len(first)) if apart else {}),
        "state": {},
        "param_groups": _options(groups[: len(GROUPS)]) + _options(groups[len(GROUPS) :]),
        "base_state": base,
        "shape_info": {index: list(held[name].shape) for index, name in enumerate([*first, *second])},
        "sharded_master_weights": shards,
    }


def _offsets(count: int) -> dict[str, int]:
    return {
        "ep_param_id_offset": 1,
        "ep_param_group_offset": len(GROUPS),
        "ep_base_state_offset": count,
        "ep_shape_info_offset": count,
    }


def _options(groups: list[list[str]]) -> list[dict[str, Any]]:
    found, begin = [], 0
    for options, names in zip(GROUPS, groups, strict=False):
        found.append({**options, "params": list(range(begin, begin + len(names)))})
        begin += len(names)
    return found


def _entries(job: Job, at: Topology, names: list[str], *, dp: int, dp_rank: int) -> dict[int, dict[str, Any]]:
    """By index, the state of each parameter."""
    kinds = whole_state(job, masters=False)
    # A frozen tensor has no state, but is needed to lay out the others.
    filled = {kind: {**held, FROZEN: job.model.state().get(FROZEN, torch.zeros(1))} for kind, held in kinds.items()}
    local = {kind: local_state(job, held, at) for kind, held in filled.items()}
    return {
        index: {
            "step": torch.tensor(STEP),
            **{kind: _shard(held[name], dp, dp_rank) for kind, held in local.items()},
        }
        for index, name in enumerate(names)
        if name != FROZEN
    }


def _shard(tensor: torch.Tensor, dp: int, dp_rank: int) -> torch.Tensor:
    missing = -len(tensor) % dp
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]).chunk(dp)[dp_rank].clone()
