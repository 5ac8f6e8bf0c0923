"""torch-xla: transfers between host and device that compile nothing.

Nothing here imports torch-xla: a tensor can only be on an XLA device in a process that has done so already. What is
said of torch-xla's behaviour was measured on 2.9 (PJRT CPU), with its ``CompileTime`` metric.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


def is_xla(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "xla"


def is_spmd() -> bool:
    """Whether this process uses torch-xla's SPMD mode (``xr.use_spmd()``)."""
    runtime = sys.modules.get("torch_xla.runtime")
    return runtime is not None and bool(runtime.is_spmd())


def is_running() -> bool:
    """Whether this process uses XLA devices: importing torch-xla does not occupy any, its first device does."""
    return "torch_xla" in sys.modules and bool(_loaded()._XLAC._xla_runtime_is_initialized())


def sync() -> None:
    """Finish pending device work, if this process uses XLA devices at all.

    All of it, as the training loop's own step mark does: a graph cut to some tensors would be one more compilation.
    But without marking a step: that moves the random seed on, and a run that saves would draw other numbers than one
    that does not.
    """
    if is_running():
        library = _loaded()._XLAC
        device = library._xla_get_default_device()
        library._xla_sync_live_tensors(device, [], True)
        # The token that orders collectives refers to the work just done, whose donated inputs are gone.
        library._set_all_reduce_token(device, None)


def to_cpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values of ``tensors`` on the host, in order, with one grouped transfer for those on XLA devices.

    CPU tensors are returned as they are, not copied, those on other devices by ``.cpu()``. Call :func:`sync` before:
    a tensor with pending work would be computed by a graph of its own, which is a compilation.
    """
    on_device = [tensor.detach() for tensor in tensors if is_xla(tensor)]
    fetched = iter(_loaded()._XLAC._xla_get_cpu_tensors(on_device) if on_device else ())
    return [next(fetched) if is_xla(tensor) else tensor.detach().cpu() for tensor in tensors]


@torch.no_grad()
def copy_in(live: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite ``live``, in place, with a CPU tensor of its shape and dtype; ``value`` may be reused afterwards."""
    if is_xla(live) and value.dim() == 0:
        value = _upload_scalar(value, live.device)
    # On XLA `copy_` from the host is an immediate upload, seen through every alias of `live`; assigning `.data` is not.
    live.data.copy_(value)


def place(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor as a new tensor on ``device``; on the CPU, ``value`` itself."""
    if device.type == "xla" and value.dim() == 0:
        return _upload_scalar(value, device)
    return value.to(device)


def compile_count() -> int:
    """How many graphs torch-xla compiled so far in this process; 0 where it was never imported."""
    if "torch_xla" not in sys.modules:
        return 0
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


def _upload_scalar(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A 0-dimensional tensor as device data.

    ``.to(device)`` and ``copy_`` turn the values 0 and 1 into constants of the next graph: another graph, so another
    compilation, of a whole training step. The data loader's way of uploading does not.
    """
    uploaded: list[torch.Tensor] = _loaded()._XLAC._xla_tensors_from_aten([value.clone()], [str(device)])
    return uploaded[0]


def _loaded() -> Any:
    return sys.modules["torch_xla"]
