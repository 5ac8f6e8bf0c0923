"""xser format: a state as a file of references, and one file per tensor.

``NAME.pt`` holds the state with a `TensorReference` for each tensor, ``NAME.pt.info.pt`` the result of `info`, and each
``NAME.pt.tensors/tensor_{tid}.pt`` one tensor. Source: torch-xla's ``utils/serialization.py`` and NxD's checkpoints.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from nxd_ckpt.core.parameter_names import EXTRA_STATE
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.formats.memory import TENSORS, torch_dtype
from nxd_ckpt.formats.strides import note, stride_of
from nxd_ckpt.formats.tensors import TensorReference, map_tensors

__all__ = ["TensorReference", "balance", "info", "normalise", "split"]


def split(tree: Any) -> tuple[Any, list[tuple[int, Any]]]:
    """Return ``tree`` with references for its tensors, and the tensors with their tids.

    A tid counts every tensor depth first, dicts in their order, CPU and 0-dim tensors included; a tensor that occurs
    twice has two tids.
    """
    tensors: list[tuple[int, Any]] = []

    def refer(tensor: Any) -> TensorReference:
        tensors.append((len(tensors), tensor))
        stride = stride_of(tensor)
        return TensorReference(len(tensors) - 1, None if stride is None else note(stride))

    return map_tensors(tree, refer), tensors


def references_of(tree: Any) -> Any:
    """Return the content of the reference file of a state dict."""
    return split(normalise(tree))[0]


def info(tensors: Iterable[tuple[int, Any]], expert: Collection[int] = ()) -> dict[int, dict[str, Any]]:
    """Return the content of ``NAME.pt.info.pt`` for (tid, tensor) pairs.

    ``expert`` are the tids of expert parameters.
    """
    return {
        tid: {
            "dtype": torch_dtype(tensor.dtype) if isinstance(tensor.dtype, str) else tensor.dtype,
            "shape": torch.Size(tensor.shape),
            "expert_model_parallel": tid in expert,
        }
        for tid, tensor in tensors
    }


def balance(nbytes: Sequence[int], n: int) -> list[int]:
    """Return which of ``n`` ranks writes each tensor, from the tensors' bytes.

    Like NxD: smallest first, each to the rank with the least bytes so far; ties go to the lower tid and rank.
    """
    owners = [0] * len(nbytes)
    ranks = [(0, rank) for rank in range(n)]
    for index in sorted(range(len(nbytes)), key=lambda index: nbytes[index]):
        load, owners[index] = heapq.heappop(ranks)
        heapq.heappush(ranks, (load + nbytes[index], owners[index]))
    return owners


def normalise(tree: Any) -> Any:
    """Return ``tree`` with OrderedDicts as dicts, and ``betas`` and ``shape_info`` as lists, as NxD writes them.

    Other tuples and sizes keep their type, and modules' extra state all types, so that a load returns them unchanged.
    """
    if isinstance(tree, TENSORS):
        return tree
    if type(tree) in (dict, OrderedDict):
        return {key: _normalised(key, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(normalise, tree))
    return tree


def _normalised(key: Any, value: Any) -> Any:
    if isinstance(key, str) and key.endswith(EXTRA_STATE):
        return value
    try:
        return _listed(value) if key in _AS_LISTS else normalise(value)
    except RecursionError:
        raise UnsupportedState(f"{key!r}: its value contains itself, or is nested too deeply to be saved") from None


_AS_LISTS = ("betas", "shape_info")


def _listed(tree: Any) -> Any:
    """Return ``tree`` with lists for tuples and sizes."""
    if isinstance(tree, dict):
        return {key: _listed(value) for key, value in tree.items()}
    return list(map(_listed, tree)) if isinstance(tree, (list, tuple)) else tree
