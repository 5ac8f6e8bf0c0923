"""The golden checkpoints: which there are, what each rank held when they were saved, and live objects to load into."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Topology
from tests.live.doubles import ShardedOptimizer

CONFIGURATIONS = [
    "a_dp2_zero1_pt",
    "b_dp2_zero1_xser",
    "c_dp2_tp2_zero1_xser",
    "d_dp4_zero1_xser",
    "e_dp2_tp2_bf16_master_pt",
    "f_dp2_tp2_bf16_master_avoid_lp_xser",
    "g_dp2_tp2_nozero1_xser",
    "h_tp2_pp2_zero1_xser",
    "i_dp2_tp2_ep2_nozero1_xser",
    "i_dp4_ep2_zero1_pt",
    "j_dp2_zero1_xser_async_kept2",
    "l_dp2_zero1_dcp_async",
    "s_tp2_stride2_nozero1_pt",
]


@dataclass(frozen=True)
class Saved:
    """One configuration: its directory, and its ``config.json``."""

    root: Path
    config: dict[str, Any]

    @property
    def directory(self) -> Path:
        """What was passed to ``save_checkpoint``."""
        return self.root / "ckpt"

    @property
    def tags(self) -> list[str]:
        """Not what a load of another test has noted beside them."""
        return sorted(path.name for path in self.directory.iterdir() if not path.name.startswith("."))

    @property
    def topologies(self) -> list[Topology]:
        """The sizes as each global rank saw them."""
        sizes = {name: self.config[name] for name in ("dp", "tp", "pp", "ep")}
        return [
            Topology(**sizes, dp_rank=at["dp"], tp_rank=at["tp"], pp_rank=at["pp"]) for at in self.config["rank_coords"]
        ]

    def held(self, tag: str, rank: int) -> dict[str, Any]:
        """Model, optimizer, scheduler, user content and parameters of the global ``rank`` at the save."""
        tagged = self.root / "expected" / f"{tag}.rank_{rank:04d}.pt"
        path = tagged if tagged.exists() else self.root / "expected" / f"rank_{rank:04d}.pt"
        found: dict[str, Any] = torch.load(path, weights_only=False)
        return found


def saved(golden: Path, name: str) -> Saved:
    root = golden / name
    return Saved(root, json.loads((root / "config.json").read_text()))


def module_like(held: dict[str, Any]) -> torch.nn.Module:
    """A module with the parameters (NxD's attributes on them) and buffers that were held, all filled with ones."""
    parameters = {about["name"]: about for about in held["params"]}
    root = torch.nn.Module()
    for name, tensor in held["model"].items():
        owner, leaf = _owner(root, name)
        value = torch.ones_like(tensor)
        if name not in parameters:
            owner.register_buffer(leaf, value)
            continue
        about = parameters[name]
        parameter = torch.nn.Parameter(value, requires_grad=about["requires_grad"])
        for attribute in _ATTRIBUTES:
            if about[attribute] is not None:
                setattr(parameter, attribute, about[attribute])
        owner.register_parameter(leaf, parameter)
    return root


def groups_like(held: dict[str, Any], model: torch.nn.Module) -> list[dict[str, Any]]:
    """Param groups for an optimizer of ``model``, in the order in which they were held."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [{"params": [parameters[name] for name in names]} for names in held["optimizer_param_names"]]


_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "num_partitions",
    "rank_ordering",
    "expert_model_parallel",
)


def _owner(root: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, torch.nn.Module())
        root = root.get_submodule(part)
    return root, leaf


def sharded(golden_one: Saved, rank: int, held: dict[str, Any], model: torch.nn.Module) -> ShardedOptimizer:
    """A ZeRO-1 optimizer as the rank had it, with other options than the saved ones."""
    return ShardedOptimizer(
        groups_like(held, model),
        rank,
        golden_one.config["dp_groups"],
        save_master_weights=golden_one.config["master_in_ckpt"],
        lr=0.5,
        betas=(0.5, 0.5),
    )
