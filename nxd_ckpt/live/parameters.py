"""Live tensors: their specification from NxD's attributes, their memory, and the ones that cannot be saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from nxd_ckpt import surroundings
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.formats.memory import has_own_operations, is_shards
from nxd_ckpt.formats.strides import Stride
from nxd_ckpt.formats.tensors import contiguous_stride, dtype_name, form_of
from nxd_ckpt.live import dtensor, torch_xla
from nxd_ckpt.live.dtensor import PLAIN

_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "num_partitions",
    "rank_ordering",
    "expert_model_parallel",
)
"""Attributes that NxD's parallel layers set on parameters."""


def spec_of(tensor: torch.Tensor, tp: int) -> ParameterSpec:
    """Return the specification of a parameter or buffer, from the attributes that NxD's parallel layers set on it.

    Without ``num_partitions`` (older NxD) a tensor-parallel parameter is cut over the ``tp`` ranks. A tensor-parallel
    parameter with a missing or impossible dimension is recorded as cut in an unknown way.
    """
    trainable = tensor.requires_grad and isinstance(tensor, torch.nn.Parameter)
    if not getattr(tensor, "tensor_model_parallel", False):
        return _whole(tensor.dtype, tensor.shape, trainable, bool(getattr(tensor, "expert_model_parallel", False)))
    dtype, shape = form_of(tensor)
    partition = _partition_of(tensor, tp)
    explicit = partition.partition_dim is not None and getattr(tensor, "num_partitions", None) is not None
    return ParameterSpec(dtype, shape, partition, trainable, explicit=explicit)


@lru_cache(maxsize=4096)
def _whole(dtype: torch.dtype, shape: torch.Size, trainable: bool, expert: bool) -> ParameterSpec:
    """Return the specification of a parameter that is not cut: most have few shapes, and share it."""
    return ParameterSpec(dtype_name(dtype), tuple(shape), Partition(expert=expert), trainable)


def traits_of(tensor: torch.Tensor) -> Hashable:
    """Return a key of everything about a tensor except its values; equal keys mean equal records in a save."""
    attributes = vars(tensor)
    # As text: a list could be changed in place.
    partition = str([attributes.get(name) for name in _ATTRIBUTES]) if attributes else None
    placed = dtensor.traits_of(tensor)
    return tensor.dtype, tensor.shape, tensor.device, type(tensor), tensor.requires_grad, partition, placed


def has_address(tensor: torch.Tensor) -> bool:
    """Return whether its memory address is known: not for XLA's lazy tensors, nor for tensors without memory."""
    return tensor.numel() > 0 and (tensor.is_cpu or not (tensor.is_meta or torch_xla.is_xla(tensor)))


def plain_address(tensor: torch.Tensor) -> int:
    """Return the address of a plain tensor on the CPU; 0 without memory, and for any other tensor."""
    return tensor.data_ptr() if type(tensor) in PLAIN and tensor.is_cpu else 0


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for the same memory seen the same way; without an address, for the same object only.
    """
    local = dtensor.local_of(tensor)
    place: Hashable = id(tensor)  # not that of ``local``: the next one may have it too
    if has_address(local) and not local.is_nested:
        form = tuple(local.shape), local.stride(), local.is_conj(), local.is_neg()
        place = local.device, local.data_ptr(), local.dtype, form
    return place if local is tensor else ("local", place)


def find_ties(tensors: Mapping[str, torch.Tensor], begins: Mapping[str, int]) -> dict[str, str]:
    """Map every name whose memory has several names to the first of them.

    Most ``begins`` where no other one does, by one quick look. Tensors of other classes have none: one of these may
    share memory with any.
    """
    alike = Counter(begins.values())
    memory = {name: memory_of(tensor) for name, tensor in tensors.items() if alike[0] or alike[begins[name]] > 1}
    times = Counter(memory.values())
    first = {place: name for name, place in reversed(memory.items())}
    return {name: first[place] for name, place in memory.items() if times[place] > 1}


def overlapping(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return two of these tensors, all with an address, that share some of their memory; None if there are none.

    Tensors that are the same memory seen the same way count as one.
    """
    every = sorted(map(_span, tensors.values()))
    if all(one[0] != other[0] or one[2] <= other[1] for one, other in pairwise(every)):
        return None
    different = {memory_of(tensor): name for name, tensor in reversed(list(tensors.items()))}
    spans = sorted((*_span(tensors[name]), name) for name in different.values())
    open_: list[tuple[str, int, str]] = []
    for device, begin, end, name in spans:
        open_ = [span for span in open_ if span[0] == device and span[1] > begin]
        for _, _, earlier in open_:
            if _share_elements(tensors[earlier], tensors[name]):
                return earlier, name
        open_.append((device, end, name))
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is expanded: several of its elements are one, and it cannot be written to."""
    if tensor.is_contiguous() or not has_address(tensor):
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _span(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Return the device, and the first byte in memory and the one after the last."""
    begin = tensor.data_ptr()
    device = "cpu" if tensor.is_cpu else str(tensor.device)  # whose text takes as long as all the rest
    return device, begin, begin + _reach(tensor)


def _reach(tensor: torch.Tensor) -> int:
    """Return the bytes of memory from the first element to the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.itemsize


def _share_elements(tensor_a: torch.Tensor, tensor_b: torch.Tensor) -> bool:
    """Return whether tensors whose spans of memory overlap have a byte in common; columns of one matrix have none."""
    (_, first_begin, end), (_, second_begin, last) = _span(tensor_a), _span(tensor_b)
    if tensor_a.is_contiguous() and tensor_b.is_contiguous():
        return True
    start = min(first_begin, second_begin)
    marks = torch.zeros(max(end, last) - start, dtype=torch.uint8)
    views = []
    for tensor, offset in ((tensor_a, first_begin), (tensor_b, second_begin)):
        steps = (*(step * tensor.element_size() for step in tensor.stride()), 1)
        views.append(marks.as_strided((*tensor.shape, tensor.element_size()), steps, offset - start))
    views[0].fill_(1)
    return bool(views[1].any())


def memory_for(live: Any) -> torch.Tensor | None:
    """Return the memory of a live tensor if saved bytes can be read straight into it: contiguous, on the CPU.

    None for any other. Who overwrites it calls `dtensor.tell_autograd`.
    """
    if not isinstance(live, torch.Tensor) or not live.is_cpu:
        return None
    local = dtensor.local_of(live)
    if not local.is_contiguous() or local.is_neg() or local.is_conj():
        return None
    return local.detach() if local.requires_grad else local


def stride_like(model: torch.Tensor | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of ``torch.zeros_like(model)`` if it has this shape; else contiguous ones.

    Kernels of fused optimizers go through a parameter and its state by address, so one order must serve both.
    """
    local = None if model is None else dtensor.local_of(model)
    if local is None or tuple(local.shape) != shape or torch_xla.is_xla(local) or local.is_contiguous():
        return contiguous_stride(shape)
    return _dense_stride(local)


def own_stride(value: torch.Tensor, model: torch.Tensor | None) -> Stride | None:
    """Return the strides to note of a tensor of state, which a load makes like ``model``; None if none are needed.

    They are noted if they differ from the model's, or from those of a tensor that is made without a model.
    """
    if not value.dim() or (is_row_major(value) and (model is None or is_row_major(model))):
        return None
    local = dtensor.local_of(value)
    if is_unusual(local) or local.is_meta or torch_xla.is_xla(local):
        return None
    shape = tuple(local.shape)
    steps = local.stride()
    as_parameter = steps == stride_like(model, shape)
    return None if as_parameter and steps == contiguous_stride(shape) else Stride(steps, as_parameter)


def is_row_major(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor's strides are those of a new one."""
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and tensor.stride() == contiguous_stride(tensor.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no gaps in its memory, as a slice has."""
    tensor = dtensor.local_of(tensor)
    return torch_xla.is_xla(tensor) or tensor.is_contiguous() or _dense_stride(tensor) == tensor.stride()


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``torch.empty_like(tensor)``."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def materialize(tensor: torch.Tensor) -> None:
    """Give a tensor on the meta device uninitialised memory on the CPU.

    It stays the same object with its attributes, so optimizers, and modules that share it, are unaffected.
    """
    on_host = torch.empty_like(tensor, device="cpu", memory_format=torch.preserve_format, requires_grad=False)
    if isinstance(tensor, torch.nn.Parameter):
        on_host = torch.nn.Parameter(on_host, requires_grad=tensor.requires_grad)
    vars(on_host).update(vars(tensor))
    torch.utils.swap_tensors(tensor, on_host)  # type: ignore[no-untyped-call]


def is_unusual(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has more than its elements.

    These are sparse, nested and quantized tensors, and subclasses with their own operations (masked, fake, ...), except
    DTensors.
    """
    if type(tensor) not in PLAIN:  # as nearly none is
        if dtensor.is_dtensor(tensor):
            return False
        if has_own_operations(tensor):
            return True
    return tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested


def refuse_unsupported(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedState for a tensor that is more than plain memory of this process."""
    is_spmd = torch_xla.is_spmd()
    is_usual_type = type(tensor) in PLAIN or dtensor.is_dtensor(tensor)
    if is_usual_type and not (is_spmd or tensor.is_meta or is_unusual(tensor)):
        refuse_short(name, tensor)
        return
    kind = type(tensor).__name__
    if kind == "XLAShardedTensor" or is_spmd:
        kind = "in an SPMD program (xr.use_spmd())"
        advice = "save it with torch_xla.experimental.distributed_checkpoint, or run one process per device"
    elif is_shards(tensor):
        kind = "a ShardedTensor, of which this process has some shards"
        advice = "make it a DTensor (FSDP with a device mesh), or save the tensors of its local_shards()"
    elif tensor.is_meta:
        kind = "on the meta device"
        advice = "give it values (to_empty, param_init_fn) before saving or loading"
    elif tensor.is_nested:
        kind = "a nested tensor"
        advice = "keep its parts (unbind()), or pad it (to_padded_tensor())"
    elif tensor.layout is not torch.strided:
        kind = f"of layout {tensor.layout}"
        advice = "densify it (to_dense())"
    elif is_unusual(tensor):
        kind = f"of dtype {tensor.dtype}" if tensor.is_quantized else f"a {type(tensor).__module__}.{kind}"
        advice = "save the dense tensors that it is made of"
    else:
        refuse_short(name, tensor)
        return
    raise UnsupportedState(f"{name} is {kind}, expected a plain dense tensor; {advice}")


def refuse_fake_mode() -> None:
    """Raise UnsupportedState if the caller is in a FakeTensorMode."""
    if surroundings.is_fake():
        raise UnsupportedState(
            "the call is made in torch's FakeTensorMode, in which tensors have no values: leave the mode before it"
        )


def refuse_short(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedState for a tensor that `is_short`."""
    if is_short(tensor):
        local = dtensor.local_of(tensor)
        raise UnsupportedState(
            f"{name}: its memory was freed or cut (untyped_storage().resize_()): the storage has "
            f"{local.untyped_storage().nbytes()} bytes, expected {_end_in_storage(local)}. Save and load when it has "
            "its memory and values: with FSDP1, outside of forward and backward"
        )


def is_short(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage ends before its last element: to read or write it would end the process."""
    local = dtensor.local_of(tensor)
    if (type(local) not in PLAIN and is_unusual(local)) or not has_address(local) or local.layout is not torch.strided:
        return False
    return local.untyped_storage().nbytes() < _end_in_storage(local)


def _end_in_storage(tensor: torch.Tensor) -> int:
    """Return the bytes from the beginning of the storage to the end of the last element."""
    return int(tensor.storage_offset()) * tensor.itemsize + _reach(tensor)


def _partition_of(tensor: torch.Tensor, tp: int) -> Partition:
    expert = bool(getattr(tensor, "expert_model_parallel", False))
    dim = getattr(tensor, "partition_dim", None)
    if dim is None or not -tensor.dim() <= dim < tensor.dim():
        return Partition(expert=expert, known=False)
    ordering = getattr(tensor, "rank_ordering", None)
    try:
        return Partition(
            partition_dim=dim % tensor.dim(),
            partition_stride=int(getattr(tensor, "partition_stride", None) or 1),
            num_partitions=int(getattr(tensor, "num_partitions", None) or tp),
            rank_ordering=None if ordering is None else tuple(int(rank) for rank in ordering),
            expert=expert,
        )
    except InvalidArgument:
        return Partition(expert=expert, known=False)


def broadcast_ranks(model: Any) -> dict[int, tuple[int, ...]]:
    """Return the ranks that get a buffer of the first of them before the next use, by the buffer's id.

    DistributedDataParallel gives it to them.
    """
    kind = torch.nn.parallel.DistributedDataParallel
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    buffers: dict[int, tuple[int, ...]] = {}
    for wrapper in (each for each in modules if isinstance(each, kind)):
        own: Any = wrapper
        if not own.will_sync_module_buffers() or hasattr(own, "buffer_hook"):
            continue
        with suppress(KeyError):  # the group was destroyed
            ranks = tuple(torch.distributed.get_process_group_ranks(own.process_group))
            named = own.module.named_buffers()
            buffers |= {id(buffer): ranks for name, buffer in named if name not in own.parameters_to_ignore}
    return buffers
