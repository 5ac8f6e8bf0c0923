"""Tags of jobs that train Hugging Face models, and the directories that are exported from them."""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_ckpt import Topology, convert
from nxd_ckpt.conversion.result import Converted
from nxd_ckpt.core.names import rank_file
from nxd_ckpt.layouts.weight_files import INDEX
from nxd_ckpt.output import image_writer
from nxd_ckpt.saving import planned_file
from tests.hugging_face.reference import Job, Model, State
from tests.interop.saving import save_as_every_rank


def save_job(directory: Path, job: Job, state: State, *, dp: int = 1, **options: Any) -> Path:
    """The tag that the job saves, its model having the Hugging Face tensors ``state`` and no attributes."""
    topologies = ranks_of(job, dp)

    def what(rank: int) -> dict[str, Any]:
        return {"model": local_state(job, state, topologies[rank])}

    save_as_every_rank(directory, "step_1", topologies, what, durable=False, **options)
    return directory / "step_1"


def write_as_nxd(directory: Path, job: Job, state: State) -> Path:
    """The same as neuronx-distributed writes it: no index, no manifest."""
    tag = directory / "step_1"
    (tag / "model").mkdir(parents=True)
    for pp_rank, ep_rank, tp_rank in product(range(job.pp), range(job.ep), range(job.tp)):
        at = Topology(dp=job.ep, tp=job.tp, pp=job.pp, ep=job.ep, dp_rank=ep_rank, tp_rank=tp_rank, pp_rank=pp_rank)
        name = rank_file(0, ep_rank if job.ep > 1 else None, tp_rank, pp_rank)
        torch.save(local_state(job, state, at), tag / "model" / name)
    for marker in ("checkpoint", "done"):
        (tag / marker).write_text("1")
    return tag


def ranks_of(job: Job, dp: int = 1) -> list[Topology]:
    sizes = Topology(dp=max(dp, job.ep), tp=job.tp, pp=job.pp, ep=job.ep)
    return [sizes.at(rank) for rank in range(sizes.world_size)]


def export(tag: Path, out: Path, job: Job, **options: Any) -> Converted:
    """With the job's config.json, beside the output, and its copies of heads."""
    config = write_config(out.parent / "config", job.model.config)
    how = {"kv_size_multiplier": job.copies, "hardware": job.hardware, **options}
    return convert(tag, out, to="hf", config=config, **how)


def local_state(job: Job, state: State, at: Topology) -> State:
    """What one rank saves."""
    held = job.rank(state, at.tp_rank, at.ep_rank)
    return {name: tensor for name, tensor in held.items() if job.stage(name) == at.pp_rank}


def live(state: State, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.nn.Module:
    """A module with parameters of these names, shapes and dtypes, whose values are others."""
    root = torch.nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(torch.full_like(tensor, -1, device=device, dtype=dtype)))
    return root


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    """A config.json."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path / "config.json"


def weights(directory: Path) -> State:
    """All tensors of a Hugging Face directory, read by the safetensors library; the index must agree with the files."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    document = json.loads(index.read_text())
    state: State = {}
    for file in sorted(set(document["weight_map"].values())):
        held = load_file(directory / file)
        assert {name for name, place in document["weight_map"].items() if place == file} == set(held)
        state |= held
    assert document["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    return state


def differences(expected: State, found: State) -> list[str]:
    """Names that only one has, or whose tensors are not bit for bit the same."""
    return [name for name in sorted({*expected, *found}) if not _same(expected.get(name), found.get(name))]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def write_files(path: Path, config: Mapping[str, Any], state: State) -> Path:
    """A directory with one file of weights; the path of its config.json."""
    place = write_config(path, config)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return place


def write_model(path: Path, model: Model, shards: int = 1) -> State:
    """A directory as save_pretrained makes it; what it holds."""
    state = model.state()
    write_config(path, model.config)
    if shards == 1:
        write_files(path, model.config, state)
        return state
    files = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    places = {name: files[number % shards] for number, name in enumerate(state)}
    for file in files:
        held = {name: state[name] for name, place in places.items() if place == file}
        save_file(held, path / file, metadata={"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return state


def use_small_waves(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have images filled in waves of so many bytes, which cut through tensors."""
    for module in (image_writer, planned_file):
        patch.setattr(module, "CRC_BLOCK", 16)
    patch.setattr(image_writer, "WAVE", nbytes)
    patch.setattr(image_writer, "PAGE", 0)
    patch.setattr(planned_file, "_ALIGNMENT", 1)
