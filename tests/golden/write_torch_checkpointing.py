"""Writes golden directories by the real torch_checkpointing: ``python -m tests.golden.write_torch_checkpointing TAR``.

Needs ``pip install --no-deps torch_checkpointing==0.1.1`` and torch 2.11 or newer. Beside each directory is
``NAME.pt``, the whole state as torch gathers it. The library gathers what ranks hold on CUDA; gloo does so here.
"""

from __future__ import annotations

import os
import socket
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_metadata import DefaultShardingMetadata
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.state_transformations import optimizer_transform_pre
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

RESHARDED = ItemSpec(resharder=DefaultResharder())
BOTH = {"model": RESHARDED, "optimizer": RESHARDED}
SAFETENSORS = ItemSpec(
    resharder=DefaultResharder(), layout=LayoutInfo("rank_{rank}/model.safetensors", SafetensorsSerialization())
)
RANKS = {"one": 1, "fsdp2": 2, "fsdp2_tp": 4, "safetensors": 2, "boxes": 2}


class Boxed(DefaultResharder):  # type: ignore[misc,unused-ignore]
    """Records where a tensor belongs as the tensor itself says it."""

    def extract_sharding_metadata(self, item_key: str, value: Any) -> Any:
        return {(name,): DefaultShardingMetadata.from_tensor(tensor) for name, tensor in value.items()}


class Net(nn.Module):
    """Rows that two ranks cannot share equally."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def manager(items: dict[str, ItemSpec]) -> CheckpointManager:
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(
        CheckpointManager.Config(items=items, save=SyncCheckpointSaverConfig(), storage_config=storage)
    )


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    if name == "fsdp2_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
    elif RANKS[name] > 1:
        fully_shard(net, mesh=init_device_mesh("cpu", (RANKS[name],), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    for _ in range(2):
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return tree.full_tensor().clone() if isinstance(tree, DTensor) else tree


def boxes(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a tensor whose columns two ranks share, and the whole of it."""
    full = torch.arange(24.0).reshape(4, 6)
    local = full[:, 3 * rank : 3 * rank + 3].clone()
    about = {
        "global_shape": (4, 6),
        "global_offsets": ((0, 3 * rank), (2, 3 * rank)),
        "local_offsets": ((0, 0), (2, 0)),
        "local_sizes": ((2, 3), (2, 3)),
    }
    for key, value in about.items():
        setattr(local, key, value)
    return {"weight": local}, {"weight": full}


def write(rank: int, root: str, name: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS[name]),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
    )
    dist.init_process_group("gloo")
    DefaultMetadataManager._all_gather_pickled_data = gathered
    if name == "boxes":
        model, full = boxes(rank)
        state, truth, items = {"model": model}, {"model": full}, {"model": ItemSpec(resharder=Boxed())}
    else:
        net, optimizer = trained(name)
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
        truth = whole(state)
        if name == "fsdp2_tp":
            state["optimizer"] = optimizer_transform_pre(optimizer.state_dict())
        items = {**BOTH, "model": SAFETENSORS} if name == "safetensors" else BOTH
    saver = manager(items)
    for step in (1, 2):
        saver.save(f"{root}/{name}/step_{step}", {**state, "train_state": {"step": step}})
    saver.close()
    if rank == 0:
        torch.save(truth, f"{root}/{name}.pt")
    dist.destroy_process_group()


def gathered(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    every: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(every, data, group=process_group)
    return dict(enumerate(every))


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        for name, ranks in RANKS.items():
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                port = probe.getsockname()[1]
            spawn(write, (root, name, port), nprocs=ranks)
        with tarfile.open(sys.argv[1], "w:xz") as tar:
            for path in sorted(Path(root).iterdir()):
                tar.add(path, path.name)


if __name__ == "__main__":
    main()
