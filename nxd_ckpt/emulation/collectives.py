"""Results of the collectives, as functions of the tensors that all ranks of the group contribute.

Inputs and results live on the caller's device; in between they are on the host. Results are new tensors without
gradient history, as torch-xla's are: autograd functions that wrap collectives bring their own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from nxd_ckpt.emulation.world import GroupMembers, NotEmulated
from nxd_ckpt.errors import InvalidArgument

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` on the CPU, without gradient history."""
    if tensor.device.type == "xla":
        import torch_xla

        # All pending work at once: fetching one tensor at a time would compute their common graph again for
        # each. Not torch_xla.sync(), which would also run the script's step closures.
        torch_xla._XLAC._xla_sync_live_tensors(str(tensor.device), [], True)
    return tensor.detach().cpu()


def fill(destination: torch.Tensor, value: torch.Tensor) -> None:
    """Put ``value`` into ``destination``, in place and unseen by autograd, as device collectives do.

    Raises:
        InvalidArgument: the shapes differ; ``copy_`` would broadcast.
    """
    if destination.shape != value.shape:
        raise InvalidArgument(
            f"output of a collective: expected shape {list(value.shape)}, found {list(destination.shape)}"
        )
    destination.data.copy_(value)


def all_reduce(peers: GroupMembers, reduce_type: str, tensor: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return the members' tensors reduced in group order, then multiplied by ``scale``."""
    parts = peers.gather(f"all_reduce({reduce_type})", to_host(tensor))
    return _reduced(reduce_type, parts, scale).to(tensor.device)


def all_gather(peers: GroupMembers, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return the members' tensors, concatenated along ``dim`` in group order."""
    return torch.cat(peers.gather(f"all_gather(dim={dim})", to_host(tensor)), dim).to(tensor.device)


def reduce_scatter(
    peers: GroupMembers, reduce_type: str, tensor: torch.Tensor, scale: float = 1.0, dim: int = 0
) -> torch.Tensor:
    """Return this member's slice along ``dim`` of the result of `all_reduce`.

    Raises:
        InvalidArgument: ``dim`` does not divide by the group's size.
    """
    shard = _equal_cut("reduce_scatter", tensor, dim, len(peers))
    parts = peers.gather(f"reduce_scatter({reduce_type}, dim={dim})", to_host(tensor))
    slices = [part.narrow(dim, peers.index * shard, shard) for part in parts]
    return _reduced(reduce_type, slices, scale).to(tensor.device)


def all_to_all(peers: GroupMembers, tensor: torch.Tensor, split_dim: int = 0, concat_dim: int = 0) -> torch.Tensor:
    """Slice ``i`` along ``split_dim`` goes to member ``i``; the slices received are joined along ``concat_dim``.

    Raises:
        InvalidArgument: ``split_dim`` does not divide by the group's size.
    """
    shard = _equal_cut("all_to_all", tensor, split_dim, len(peers))
    parts = peers.gather(f"all_to_all({split_dim}, {concat_dim})", to_host(tensor))
    slices = [part.narrow(split_dim, peers.index * shard, shard) for part in parts]
    return torch.cat(slices, concat_dim).to(tensor.device)


def permute(peers: GroupMembers, tensor: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the tensor of the member paired with this one as (source, target); zeros if no pair has it as target."""
    parts = peers.gather(f"collective_permute({[list(pair) for pair in pairs]})", to_host(tensor))
    sources = [source for source, target in pairs if target == peers.ranks[peers.index]]
    received = parts[peers.ranks.index(sources[0])] if sources else torch.zeros_like(parts[0])
    return received.to(tensor.device)


def broadcast(peers: GroupMembers, tensor: torch.Tensor, root: int) -> torch.Tensor:
    """Return the tensor of the member at position ``root`` of the group."""
    return peers.gather(f"broadcast(root={root})", to_host(tensor))[root].to(tensor.device)


def _reduced(reduce_type: str, parts: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
    if reduce_type not in _REDUCTIONS:
        raise NotEmulated(f"reduction {reduce_type!r}: CPU-XLA emulation knows {', '.join(_REDUCTIONS)}")
    result = reduce(_REDUCTIONS[reduce_type], parts)
    return result if scale == 1.0 else (result * scale).to(result.dtype)


def _equal_cut(call: str, tensor: torch.Tensor, dim: int, count: int) -> int:
    shard, rest = divmod(tensor.size(dim), count)
    if rest:
        raise InvalidArgument(
            f"{call}: dimension {dim} of a tensor of shape {list(tensor.shape)} does not divide by "
            f"the group's {count} ranks; pad it first"
        )
    return shard
