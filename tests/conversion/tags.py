"""Tags to convert, and what their content must be: put together and cut by hand, with nothing of the converter's."""

from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Topology, open_checkpoint
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.interop.saving import save_as_every_rank

Tree = dict[str, Any]

SHAPES = {"embed.weight": (7, 3), "up.weight": (11, 2), "up.bias": (11,), "unused.weight": (5, 2), "scale": (1,)}
"""The parameters of the example, in the optimizer's order. None has a number of rows that 2, 3 or 4 divides."""

UNUSED = "unused.weight"
"""Never had a gradient: the optimizer has no state for it, but master weights."""


def whole(*, master_weights: bool = True, step: int = 3) -> Tree:
    """The example's ZeRO-1 optimizer, unsharded."""
    drawn = torch.Generator().manual_seed(step)
    state, masters, shapes = {}, {}, {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        if name != UNUSED:
            moments = {key: torch.rand(shape, generator=drawn) for key in ("exp_avg", "exp_avg_sq")}
            state[index] = {"step": torch.tensor(float(step)), **moments}
        masters[index], shapes[index] = torch.rand(shape, generator=drawn), list(shape)
    groups = [
        {"lr": 0.1, "betas": [0.8, 0.9], "params": [0, 1, 2]},
        {"lr": 0.2, "betas": [0.8, 0.9], "params": [3, 4]},
    ]
    tree: Tree = {"state": {}, "param_groups": groups, "base_state": state, "shape_info": shapes}
    return tree | ({"sharded_master_weights": masters} if master_weights else {})


def sharded(tree: Tree, dp: int, dp_rank: int) -> Tree:
    """The shard of an unsharded optimizer: rows padded with zeros to a multiple of ``dp``, then cut."""

    def cut(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            return tensor
        missing = -len(tensor) % dp
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]).chunk(dp)[dp_rank]

    state = {index: {key: cut(value) for key, value in entry.items()} for index, entry in tree["base_state"].items()}
    masters = {index: cut(value) for index, value in tree.get("sharded_master_weights", {}).items()}
    return {**tree, "base_state": state} | ({"sharded_master_weights": masters} if masters else {})


def unsharded(trees: list[Tree]) -> Tree:
    """Shards put together again, in order of their ranks."""
    first = trees[0]

    def join(shards: list[Any], shape: list[int]) -> Any:
        is_shard = isinstance(shards[0], torch.Tensor) and shards[0].dim() > 0
        return torch.cat(shards)[: shape[0]] if is_shard else shards[0]

    shapes = first["shape_info"]
    state = {
        index: {key: join([tree["base_state"][index][key] for tree in trees], shapes[index]) for key in entry}
        for index, entry in first["base_state"].items()
    }
    masters = {
        index: join([tree["sharded_master_weights"][index] for tree in trees], shapes[index])
        for index in first.get("sharded_master_weights", {})
    }
    return {**first, "base_state": state} | ({"sharded_master_weights": masters} if masters else {})


def model() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(77)
    return {**{name: torch.rand(shape, generator=drawn) for name, shape in SHAPES.items()}, "seen": torch.tensor(9)}


def save_example(directory: Path, dp: int, tag: str = "step_3", *, step: int = 3, **options: Any) -> Path:
    """The example saved on ``dp`` ranks; the tag's directory."""
    tree = whole(step=step)

    def what(rank: int) -> dict[str, Any]:
        return {
            "model": model(),
            "optimizer": sharded(tree, dp, rank),
            "scheduler": {"last_epoch": step},
            "user_content": {"steps": step},
            "rank_content": {"rank": rank},
        }

    names = [list(SHAPES)[:3], list(SHAPES)[3:]]
    topologies = [Topology(dp=dp, rank=rank) for rank in range(dp)]
    save_as_every_rank(directory, tag, topologies, what, param_names=names, durable=False, **options)
    return directory / tag


def optimizers(tag: Path) -> list[Tree]:
    """What the optimizer's file of every rank of a tag holds; all of the tag is verified first."""
    assert () == verify_checkpoint(tag.parent, tag.name).problems
    checkpoint = open_checkpoint(tag.parent, tag.name)
    return [checkpoint.optimizer_state(rank) for rank in range(checkpoint.topology.world_size)]


def plainly(tree: Any) -> Any:
    """A tree whatever order its keys had, and whether its sequences were lists or tuples."""
    if isinstance(tree, dict):
        return {key: plainly(tree[key]) for key in sorted(tree, key=str)}
    return [plainly(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a directory, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def remains(directory: Path) -> list[str]:
    """Hidden files that attempts left in a checkpoint directory.

    Without the marks of the directory and of runs that were saved, and the verdicts of the job before.
    """
    found = list(contents(directory / ".nxd_ckpt"))
    kept = ["place", "runs/", *(file.removesuffix("spared") for file in found if file.endswith("/spared"))]
    return [file for file in found if not file.startswith(tuple(kept))]


def as_nxd(tag: Path) -> Path:
    """Without what is ours, as neuronx-distributed writes it: one digest for each tensor."""
    for index in (tag / "index").iterdir():
        index.unlink()
    (tag / "index").rmdir()
    (tag / "manifest.json").unlink()
    return tag
