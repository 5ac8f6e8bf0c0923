"""torch-xla: transfers between host and device that compile nothing.

Nothing here imports torch-xla: a tensor can only be on an XLA device in a process that has done so already. Statements
about torch-xla's behaviour were measured on 2.9 (PJRT CPU), with its ``CompileTime`` metric.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.formats.memory import copy_values, distinct
from nxd_ckpt.live.dtensor import local_of, tell_autograd

_DRAWS = 100_000
"""Maximum number of random tensors in one step: counting them again takes 50 µs each."""


def is_xla(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_xla)  # type: ignore[attr-defined]  # torch does not declare it


def is_spmd() -> bool:
    """Return whether this process uses torch-xla's SPMD mode (``xr.use_spmd()``)."""
    runtime = sys.modules.get("torch_xla.runtime")
    return runtime is not None and bool(runtime.is_spmd())


def is_running() -> bool:
    """Return whether this process uses XLA devices: its first device occupies them, importing torch-xla does not."""
    return "torch_xla" in sys.modules and bool(_loaded()._XLAC._xla_runtime_is_initialized())


def rank_threads() -> int:
    """Return the number of ranks that are threads of this process (``xmp.spawn`` on several devices); 0 for none."""
    if not is_running():
        return 0
    library = _loaded()._XLAC
    devices = int(library._xla_num_devices())
    return devices if devices > 1 and library._xla_get_replication_devices_count() else 0


def sync(tensors: Iterable[torch.Tensor] | None = None) -> None:
    """Finish pending device work, if this process uses XLA devices at all.

    All of it, as the training loop's own step mark does: a graph cut to some tensors would be one more compilation.
    But without marking a step: that moves the random seed on, and a run that saves would draw other numbers than one
    that does not.

    Beside the main thread only if there is any for ``tensors``: the main thread may be in the middle of a step of
    another model, whose tensors torch-xla would lose.

    Raises UnsupportedState if it has lost tensors.
    """
    if not is_running() or (tensors is not None and not _has_pending(tensors)):
        return
    library = _loaded()._XLAC
    device = library._xla_get_default_device()
    try:
        library._xla_sync_live_tensors(device, [], True)
    except RuntimeError as error:
        if "tensor_data" not in str(error):  # what other threads' steps lead to
            raise
        raise UnsupportedState(
            f"torch-xla could not finish the pending work on {device} ({str(error).strip()}): it loses tensors if "
            "another thread makes steps meanwhile, those of the steps too. Save in the thread that makes them, where "
            "async_save=True writes in the background; or mark the step (torch_xla.sync()) of what is saved before "
            "other steps begin, and save in a thread beside the main one. Start again from the last tag"
        ) from error
    # The token that orders collectives refers to the work just done, whose donated inputs are gone.
    library._set_all_reduce_token(device, None)


def _has_pending(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether there may be pending work for ``tensors``; True on the main thread."""
    look = getattr(_loaded()._XLAC, "_check_tensor_need_materialization", None)
    return threading.current_thread() is threading.main_thread() or look is None or any(look(list(tensors)))


def random_state() -> tuple[int, int]:
    """Return the current step's seed on the default device, and the number of random tensors made from it so far.

    Both are needed: the next step's seed comes from this step's, whatever was drawn in between. torch-xla's own
    ``get_rng_state`` returns the two as one number, from which only the rest of the current step could continue.
    """
    library = _loaded()._XLAC
    device = library._xla_get_default_device()
    running = int(library._xla_get_rng_seed(device))
    if not hasattr(library, "_get_base_seed_as_tensor"):  # another torch-xla than those tested
        return running, 0
    # Asking for the seed rewinds the generator to it: drawing as often as before brings it back.
    seed = int(library._get_base_seed_as_tensor(device).cpu()) % 2**64
    for draws in range(_DRAWS):
        if library._xla_get_rng_seed(device) == running:
            return seed, draws
        _draw(device)
    raise UnsupportedState(
        f"the XLA device made more than {_DRAWS} random tensors in one step, or its generator was set in the middle of "
        "a step: mark the step (torch_xla.sync()) before capturing random state"
    )


def set_random_state(seed: int, draws: int) -> None:
    """Continue from the ``seed`` and ``draws`` that `random_state` returned."""
    library = _loaded()._XLAC
    device = library._xla_get_default_device()
    library._xla_set_rng_seed(seed, device)
    for _ in range(draws):
        _draw(device)


def to_cpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values of ``tensors`` on the host, in order, with one grouped transfer for those on XLA devices.

    CPU tensors are returned themselves, not copied; those on other devices by ``.cpu()``. Call `sync` before: a tensor
    with pending work would be computed by a graph of its own, which is a compilation.
    """
    on_device = [tensor.detach() for tensor in tensors if is_xla(tensor)]
    fetched = iter(_loaded()._XLAC._xla_get_cpu_tensors(on_device) if on_device else ())
    return [next(fetched) if is_xla(tensor) else tensor.detach().cpu() for tensor in tensors]


@torch.no_grad()
def copy_in(live: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite ``live``, in place, with a CPU tensor of its shape and dtype; ``value`` may be reused afterwards.

    Of a DTensor, this rank's part is overwritten; of an expanded tensor, each element once.
    """
    tell_autograd(live)
    live = local_of(live)
    if not live.is_contiguous():
        live, value = distinct(live, live), distinct(value, live)
    if is_xla(live) and value.dim() == 0:
        value = _upload_scalar(value, live.device)
    # On XLA `copy_` from the host is an immediate upload, seen through every alias of `live`; assigning `.data` is not.
    copy_values(live.data, value)


def place(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor as a new tensor on ``device``; on the CPU, ``value`` itself."""
    if device.type == "xla" and value.dim() == 0:
        return _upload_scalar(value, device)
    return value.to(device)


def compile_count() -> int:
    """Return the number of graphs that torch-xla compiled so far in this process; 0 if it was never imported."""
    if "torch_xla" not in sys.modules:
        return 0
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


def _draw(device: str) -> None:
    torch.rand((), device=device)  # never computed, but counted when it is asked for


def _upload_scalar(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A 0-dimensional tensor as device data.

    ``.to(device)`` and ``copy_`` turn the values 0 and 1 into constants of the next graph: another graph, so another
    compilation, of a whole training step. The data loader's way of uploading does not.
    """
    uploaded: list[torch.Tensor] = _loaded()._XLAC._xla_tensors_from_aten([value.clone()], [str(device)])
    return uploaded[0]


def _loaded() -> Any:
    return sys.modules["torch_xla"]
