"""Comparing trees of tensors bit for bit."""

from typing import Any

import torch


def difference(expected: Any, actual: Any, where: str = "tree") -> str | None:
    """The first place where two trees differ in type, keys, order, dtype or a bit; None if nowhere."""
    if type(expected) is not type(actual):
        return f"{where}: expected {type(expected).__name__}, found {type(actual).__name__}"
    if isinstance(expected, torch.Tensor):
        same = expected.dtype == actual.dtype and expected.shape == actual.shape
        return None if same and torch.equal(_bits(expected), _bits(actual)) else f"{where}: tensors differ"
    if isinstance(expected, dict):
        if list(expected) != list(actual):
            return f"{where}: expected keys {list(expected)}, found {list(actual)}"
        pairs = [(key, expected[key], actual[key]) for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return f"{where}: expected {len(expected)} items, found {len(actual)}"
        pairs = list(zip(range(len(expected)), expected, actual, strict=True))
    else:
        return None if expected == actual else f"{where}: expected {expected!r}, found {actual!r}"
    found = (difference(left, right, f"{where}[{key!r}]") for key, left, right in pairs)
    return next((text for text in found if text is not None), None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
