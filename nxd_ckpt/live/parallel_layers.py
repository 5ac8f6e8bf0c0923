"""Cuts of parameters as their layers tell them, for parameters whose attributes are lost, missing or wrong.

``.to(device)`` makes new parameters on XLA, without NxD's attributes. NxD's trainer gives those of the base model back,
but makes LoRA's adapters later and moves them by themselves, so these never have any. Nor have weights that its
``pad_model`` padded. Values tell nothing: each A is equal on all ranks until it is trained, and so are zeros.

Source: ``parallel_layers.layers``, ``modules.qkv_linear``, ``modules.lora`` and ``parallel_layers.pad`` of
neuronx_distributed, 0.9 to 0.18.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from nxd_ckpt.core.partition import Partition, Section
from nxd_ckpt.live.dtensor import is_dtensor
from nxd_ckpt.live.parameters import spec_of

_Cuts = dict[str, Partition | None]
"""Cuts of parameters by their names in a layer. None: only the values tell."""

_DIMENSIONS = {
    "ColumnParallelLinear": 0,
    "RowParallelLinear": 1,
    "ParallelEmbedding": 0,
    "OutputChannelParallelConv2d": 0,
    "InputChannelParallelConv2d": 1,
}
"""The dimension of the weight that NxD's layers cut, by class; a layer with a ``weight_partition_dim`` says it itself.
"""

_UNCUT = (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
"""Layers of torch that NxD's LoRA wraps, besides transformers' ``Conv1D``: each rank has all of them."""

_SIZES = ("q_output_size_per_partition", "kv_output_size_per_partition")

_ADAPTER = re.compile(r"lora_(?P<embedding>embedding_)?(?P<letter>[AB])\b")


def layer_partitions(model: torch.nn.Module, tp: int) -> Iterator[tuple[torch.nn.Parameter, Partition | None]]:
    """Yield parameters whose attributes are lost, missing or wrong, each with its cut over ``tp`` ranks.

    The cut is None if several ranks share each of several parts: which ones depends on the hardware (Trn1: r and r +
    parts, Trn2: neighbours), and query heads are in another order for each number of parts. It is not ``known`` if the
    layer cuts the parameter, but not in this shape.
    """
    found: set[int] = set()
    for module in model.modules():
        for name, cut in {**_layer_cuts(module, tp), **_adapter_cuts(module, tp)}.items():
            parameter = module.get_parameter(name)
            if id(parameter) in found or is_dtensor(parameter):  # an adapter's own layer comes after the wrapped one
                continue
            found.add(id(parameter))
            fits = cut is None or cut.section_layouts(tuple(parameter.shape), tp, 0) is not None
            yield parameter, cut if fits else Partition(known=False)


def _layer_cuts(layer: torch.nn.Module, tp: int) -> _Cuts:
    """Return the cuts of a parallel layer's own parameters that their attributes do not tell."""
    is_attention = isinstance(getattr(layer, "kv_size_multiplier", None), int)
    cuts = _attention_cuts(layer, tp) if is_attention else _weight_cuts(layer, tp)
    return {name: cut for name, cut in cuts.items() if isinstance(_own(layer).get(name), torch.nn.Parameter)}


def _own(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the layer's own parameters by name; those of a ScriptModule are in a mapping without ``get``."""
    return dict(layer._parameters.items())


def _weight_cuts(layer: Any, tp: int) -> _Cuts:
    kind = _kind_of(layer.__class__)
    weight = None if kind is None else _own(layer).get("weight")
    if kind is None or weight is None:
        return {}
    dim = getattr(layer, "weight_partition_dim", _DIMENSIONS[kind])
    stride = getattr(layer, "stride", 1) if kind.endswith("Linear") else 1
    size = getattr(layer, f"{'input' if kind.startswith('Row') else 'output'}_size_per_partition", weight.shape[dim])
    is_padded = weight.shape[dim] != size  # at its end, so not in each of the tensors that lie side by side
    expert = bool(getattr(weight, "expert_model_parallel", False))
    cut = Partition(dim, stride, tp, expert=expert, known=stride == 1 or not is_padded)
    cuts: _Cuts = {} if _is_marked(weight) else {"weight": cut}
    bias = _own(layer).get("bias")
    # With gather_output each rank has the whole bias.
    if _DIMENSIONS[kind] == 0 and bias is not None and not _is_marked(bias) and bias.shape[-1] == weight.shape[dim]:
        cuts["bias"] = replace(cut, partition_dim=bias.dim() - 1)
    return cuts


def _attention_cuts(layer: Any, tp: int) -> _Cuts:
    """Return the cuts in a ``GQAQKVColumnParallelLinear``.

    With ``kv_size_multiplier = m`` it keeps ``m`` copies of each key and value head: the ranks hold ``tp / m``
    different parts, while the attributes of ``weight_k`` and ``weight_v`` say ``tp``. With ``fuse_qkv`` its
    ``weight_qkv`` has none at all.
    """
    parts, rest = divmod(tp, max(layer.kv_size_multiplier, 1))
    if rest:
        return {}
    column = Partition(0, 1, tp)
    shared = column if parts == tp else Partition() if parts == 1 else None
    cuts: _Cuts = {"weight_q": column, "weight_k": shared, "weight_v": shared}
    query, key = (getattr(layer, size, None) for size in _SIZES)
    if shared is not None and isinstance(query, int) and isinstance(key, int):
        section = Section(key * parts, parts)
        cuts["weight_qkv"] = Partition(0, fused=(Section(query * tp, tp), section, section))
    cuts |= {name.replace("weight", "bias"): cut for name, cut in cuts.items()}
    return {name: cut for name, cut in cuts.items() if cut != column or not _is_marked(_own(layer).get(name))}


def _adapter_cuts(wrapped: torch.nn.Module, tp: int) -> _Cuts:
    """Return the cuts of a layer's LoRA adapters, from that of its weight, which ``B @ A`` is added to.

    Where ranks hold rows of the weight, they hold those of B and all of A, and where they hold columns, those of A and
    all of B. Attributes of B have no stride, even if it has those of a fused weight's rows.
    """
    base = getattr(wrapped, "base_layer", None)
    if not isinstance(base, torch.nn.Module):
        return {}
    is_uncut = isinstance(base, _UNCUT) or type(base).__name__ == "Conv1D"
    held = ((name, weight) for name, weight in _own(base).items() if name.startswith("weight"))
    weights = {name: weight for name, weight in held if weight is not None}
    cuts_of_base: _Cuts = dict.fromkeys(weights, Partition()) if is_uncut else {}
    cuts_of_base |= {name: spec_of(weight, tp).partition for name, weight in weights.items() if _is_marked(weight)}
    cuts_of_base |= {name: cut for name, cut in _layer_cuts(base, tp).items() if name in weights}
    cuts: _Cuts = {}
    for name, _ in wrapped.named_parameters() if cuts_of_base else ():
        adapter = _ADAPTER.match(name)
        last = name.rpartition(".")[2]
        if adapter is not None and (is_uncut or not adapter["embedding"]):
            cut = cuts_of_base.get(last, next(iter(cuts_of_base.values())))
            cuts[name] = _adapter_cut(cut, 0 if adapter["letter"] == "B" else 1)
    return cuts


def _adapter_cut(cut: Partition | None, dim: int) -> Partition | None:
    """Return the cut of the adapter's matrix that has the dimension ``dim`` of a base weight with this cut."""
    if cut is None:
        return None if dim == 0 else Partition()
    if not cut.known:
        return Partition(known=False)
    return cut if cut.partition_dim == dim else Partition()


@lru_cache(maxsize=4096)
def _kind_of(layer: type) -> str | None:
    """Return the class of NxD's parallel layers that it is, or extends."""
    return next((base.__name__ for base in layer.__mro__ if base.__name__ in _DIMENSIONS), None)


def _is_marked(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))
