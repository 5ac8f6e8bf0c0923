"""Checkpoints of torch-xla's scripts: what FSDP calls a shard, and what its metadata say (sources.md here has the
sources). tests/migrate/test_fsdp.py compares these files with those of the real FSDP, where torch-xla is installed.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.hugging_face.reference import State
from tests.migrate.old_run import ADAMW, GROUPS, STEPS, OldRun, is_decayed

WORLD_SIZE = 3
_SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
_ADAMW = {**ADAMW, "betas": list(ADAMW["betas"])}


def write_xm_save(path: Path, run: OldRun) -> Path:
    """One file with a script's dict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = [[name for name in run.weights if is_decayed(name) == decayed] for decayed in (True, False)]
    state, param_groups, begin = {}, [], 0
    for options, names in zip(GROUPS, groups, strict=True):
        numbers = range(begin, begin + len(names))
        begin += len(names)
        param_groups.append({**_ADAMW, **options, "lr": run.lr, "initial_lr": 0.01, "params": list(numbers)})
        for number, name in zip(numbers, names, strict=True):
            state[number] = {"step": torch.tensor(float(STEPS)), **moments_of(run, name)}
    optimizer = {"state": state, "param_groups": param_groups}
    content = {"model": run.weights, "optimizer": optimizer, "scheduler": run.scheduler, "epoch": 7}
    torch.save(content, path)
    return path


def write_fsdp(folder: Path, run: OldRun, *, flatten: bool = False, rows: bool = False) -> Path:
    """A file of each rank. Every layer is wrapped, and the model around them.

    ``flatten`` is ``flatten_parameters``, ``rows`` is ``shard_param_on_dim_0``.
    """
    folder.mkdir(parents=True)
    for rank in range(WORLD_SIZE):
        shards = FsdpRank(run.weights, rank, flatten=flatten, rows=rows)
        content = {
            "model": shards.state_dict,
            "shard_metadata": shards.metadata,
            "optimizer": _optimizer(run, shards),
            "scheduler": run.scheduler,
            "epoch": 7,
        }
        torch.save(content, folder / f"ckpt_rank-{rank:08d}-of-{WORLD_SIZE:08d}.pth")
    return folder


def write_trainer(folder: Path, run: OldRun) -> Path:
    """``checkpoint-N`` of transformers' trainer with torch-xla's FSDP (4.57, ``trainer.py``, ``_save_tpu`` and
    ``_save_optimizer_and_scheduler``): two files of each rank, beside the whole model."""
    place = folder / f"checkpoint-{STEPS}"
    place.mkdir(parents=True)
    for rank in range(WORLD_SIZE):
        shards = FsdpRank(run.weights, rank, flatten=False, rows=False)
        model = {"model": shards.state_dict, "shard_metadata": shards.metadata}
        optimizer = {"optimizer": _optimizer(run, shards), "shard_metadata": shards.metadata}
        for name, content in (("pytorch_model.bin", model), ("optimizer.pt", optimizer)):
            torch.save(content, place / f"rank{rank}-of-{WORLD_SIZE}-{name}")
        (place / f"rng_state_{rank}.pth").write_bytes(b"a pickle of generators")
    save_file({name: tensor.clone() for name, tensor in run.weights.items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(run.job.model.config))
    (place / "trainer_state.json").write_text(json.dumps({"global_step": STEPS}))
    (place / "training_args.bin").write_bytes(b"a pickle of transformers' TrainingArguments")
    torch.save(run.scheduler, place / "scheduler.pt")
    return place


class FsdpRank:
    """What one rank's model holds: ``units`` are its sharded parameters by prefix and name, each of these parameters
    of the model."""

    def __init__(self, weights: State, rank: int, *, flatten: bool, rows: bool) -> None:
        self._weights, self._rank, self._rows = weights, rank, rows
        self.units = {key: names for unit in _units(weights) for key, names in _sharded(unit, weights, flatten)}
        self._flatten = flatten

    @property
    def state_dict(self) -> State:
        return {
            _key(prefix, name): self.shard({one: self._weights[one] for one in names})
            for (prefix, name), names in self.units.items()
        }

    def shard(self, tensors: State) -> torch.Tensor:
        """This rank's part of what is one sharded parameter."""
        every = list(tensors.values())
        whole = every[0] if self._rows else torch.cat([one.flatten() for one in every])
        multiple = WORLD_SIZE if self._rows else WORLD_SIZE * 128
        padding = whole.new_zeros(-len(whole) % multiple, *whole.shape[1:])
        return torch.cat([whole, padding]).chunk(WORLD_SIZE)[self._rank].clone()

    @property
    def metadata(self) -> dict[str, Any]:
        """What ``xm.save`` makes of it: lists in place of tuples and sizes."""
        shard_info: dict[str, dict[str, Any]] = {prefix: {} for prefix, _ in self.units}
        flatten_info = {}
        for (prefix, name), names in self.units.items():
            shapes = [list(self._weights[one].shape) for one in names]
            numels = [self._weights[one].numel() for one in names]
            size = [sum(numels)] if self._flatten else shapes[0]
            shard_info[prefix][_shard_name(name)] = {"_orig_size": size, "_orig_name": name}
            if self._flatten:
                unit = prefix.removeprefix("_fsdp_wrapped_module.")
                inside = [f"_fpw_module.{one.removeprefix(f'{unit}.')}" for one in names]
                flatten_info[f"{prefix}.{name}".lstrip(".")] = [inside, shapes, numels]
        return {
            "shard_info": shard_info,
            "flatten_info": flatten_info,
            "buffer_info": {},
            "world_size": WORLD_SIZE,
            "rank": self._rank,
        }


def moments_of(run: OldRun, name: str) -> State:
    return {kind: held[name] for kind, held in run.moments.items()}


def _units(weights: State) -> Iterator[str]:
    """The wrapped modules, in the order of the model around them."""
    layers = {".".join(name.split(".")[:3]) for name in weights if ".layers." in name}
    yield from ("", *sorted(layers))


def _sharded(unit: str, weights: State, flatten: bool) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """(prefix, name) of each sharded parameter of a wrapped module, and the model's parameters in it."""
    mine = [name for name in weights if (name.startswith(f"{unit}.") if unit else ".layers." not in name)]
    prefix = f"_fsdp_wrapped_module.{unit}" if unit else ""
    if flatten:
        yield (prefix, "_fsdp_wrapped_module.flat_param_0"), mine
        return
    for name in mine:
        inside = name.removeprefix(f"{unit}.") if unit else name
        yield (prefix, f"_fsdp_wrapped_module._fpw_module.{inside}"), [name]


def _shard_name(name: str) -> str:
    return f"_fsdp_shard.{name}".replace(".", _SEPARATOR)


def _key(prefix: str, name: str) -> str:
    return f"{prefix}.{_shard_name(name)}" if prefix else _shard_name(name)


def _optimizer(run: OldRun, shards: FsdpRank) -> dict[str, Any]:
    """torch's optimizer over the shards; what is flat is all in one group."""
    apart = len(shards.units) == len(run.weights)
    groups = [
        [names for names in shards.units.values() if not apart or is_decayed(names[0]) == decayed]
        for decayed in ((True, False) if apart else (True,))
    ]
    numbers, state, param_groups = count(), {}, []
    for options, units in zip(GROUPS, groups, strict=False):
        own = [next(numbers) for _ in units]
        param_groups.append({**_ADAMW, **options, "lr": run.lr, "initial_lr": 0.01, "params": own})
        for number, names in zip(own, units, strict=True):
            kinds = {kind: shards.shard({name: held[name] for name in names}) for kind, held in run.moments.items()}
            state[number] = {"step": torch.tensor(float(STEPS)), **kinds}
    return {"state": state, "param_groups": param_groups}
