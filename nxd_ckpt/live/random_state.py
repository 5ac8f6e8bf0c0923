"""Random state of a process as plain data: Python's, NumPy's, torch's and torch-xla's generators."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from nxd_ckpt.live import torch_xla


def capture_random_state() -> dict[str, Any]:
    """Return the state of every generator that this process uses, as tensors, lists and numbers only."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch_xla.is_running():
        state["xla"] = list(torch_xla.random_state())
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `capture_random_state`; generators that this process does not use are skipped."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "torch_xla" in sys.modules and "xla" in state:
        torch_xla.set_random_state(*state["xla"])


def is_random_state(value: Any) -> bool:
    """Return whether ``value`` is a result of `capture_random_state`."""
    return isinstance(value, dict) and value.keys() - {"numpy", "xla"} == {"python", "torch"}
