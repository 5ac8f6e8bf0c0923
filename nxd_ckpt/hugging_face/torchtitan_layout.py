"""Tensors as TorchTitan lays them out: rows in pairs, dimensions swapped, q, k and v in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.core.torchtitan_names import TorchTitanNames
from nxd_ckpt.formats.tensors import Assembly, ReshapedAssembly


def laid_out(titan: TorchTitanNames, name: str, leaf: Assembly, sizes: Sizes) -> Assembly:
    """Return Hugging Face's tensor ``leaf`` as TorchTitan lays out ``name``."""
    if titan.has_pairs(name):
        half = sizes.get("head_dim") // 2
        heads = leaf.unflattened(0, (leaf.shape[0] // half // 2, 2, half))
        return ReshapedAssembly(leaf.shape, heads.permuted((0, 2, 1, 3)))
    if titan.is_swapped(name):
        first, second, *rest = range(len(leaf.base.shape))
        return ReshapedAssembly((leaf.shape[0], *leaf.shape[:0:-1]), leaf.base.permuted((first, *rest, second)))
    return leaf


def fused(titan: TorchTitanNames, names: Sequence[str], leaves: Sequence[Assembly], sizes: Sizes) -> Assembly:
    """Return q, k and v, from `laid_out`, as one tensor: for each key-value head its query heads, then k, then v."""
    groups, head_dim = sizes.get("kv_heads"), sizes.get("head_dim")
    rows = (head_dim // 2, 2) if titan.has_pairs(names[0]) else (head_dim,)
    counts = [leaf.shape[0] // head_dim // groups for leaf in leaves]
    parts, start = [], 0
    for leaf, count in zip(leaves, counts, strict=True):
        is_split = len(leaf.base.shape) > len(leaf.shape)
        heads = leaf.base.unflattened(0, (groups, count) if is_split else (groups, count, *rows))
        offset = (0, start, *(0 for _ in heads.shape[2:]))
        parts += [fragment.moved(offset) for fragment in heads.fragments]
        start += count
    columns = leaves[0].shape[1:]
    base = Assembly(leaves[0].dtype, (groups, start, *rows, *columns), tuple(parts))
    return ReshapedAssembly((groups * start * head_dim, *columns), base)
