"""NxD's grouped-query attention: attributes do not say how tensor-parallel ranks share its keys and values.

``GQAQKVColumnParallelLinear`` with ``kv_size_multiplier = m`` keeps ``m`` copies of each key and value head: the ranks
hold ``tp / m`` different parts, while the attributes of ``weight_k`` and ``weight_v`` say ``tp``. With ``fuse_qkv`` its
``weight_qkv`` has no attributes at all (source: ``neuronx_distributed.modules.qkv_linear``, 0.9 to 0.18).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nxd_ckpt.core.partition import Partition, Section

_KEYS_AND_VALUES = ("weight_k", "weight_v", "bias_k", "bias_v")
_SIZES = ("q_output_size_per_partition", "kv_output_size_per_partition")


def partitions_of(model: torch.nn.Module, tp: int) -> Iterator[tuple[torch.nn.Parameter, Partition | None]]:
    """Yield the parameters of such modules whose attributes are wrong or absent, each with its cut over ``tp`` ranks.

    The cut is None if several parts are shared: which ranks share one depends on the hardware (Trn1: r and r + tp/m,
    Trn2: neighbours), and query heads are in another order for each ``tp / m``.
    """
    for module in model.modules():
        copies = getattr(module, "kv_size_multiplier", None)
        if not isinstance(copies, int) or copies < 1 or tp % copies:
            continue
        parts = tp // copies
        regular = copies == 1 or parts == 1
        fused = getattr(module, "weight_qkv", None)
        if isinstance(fused, torch.nn.Parameter) and fused.dim() and regular:
            query, key = (getattr(module, size, None) for size in _SIZES)
            if isinstance(query, int) and isinstance(key, int) and query + 2 * key == fused.shape[0]:
                shared = Section(key * parts, parts)
                yield fused, Partition(0, fused=(Section(query * tp, tp), shared, shared))
        for name in _KEYS_AND_VALUES if copies > 1 else ():
            parameter = getattr(module, name, None)
            if isinstance(parameter, torch.nn.Parameter) and getattr(parameter, "tensor_model_parallel", False):
                yield parameter, Partition() if regular else None
