"""The c10d backend "xla" of an emulated world: ``torch.distributed`` on XLA and CPU tensors, over gloo."""

# For mypy: the stubs of ProcessGroup are not those of what Python calls on it, and change with torch.
# mypy: disable-error-code="attr-defined, name-defined, override, call-arg, assignment"
from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nxd_ckpt.emulation import collectives
from nxd_ckpt.emulation.world import GroupMembers, NotEmulated

# Pairs, since a ReduceOp compares equal to its enum value but does not hash like it.
_REDUCE_TYPES = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.PRODUCT, "mul"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.BAND, "and"),
    (dist.ReduceOp.BOR, "or"),
)


def create_process_group(options: Any, _pg_options: Any) -> EmulatedProcessGroup:
    """c10d's creator function (extended form) for the backend "xla"."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return EmulatedProcessGroup(options.store, ranks, options.group_rank, options.timeout)


class EmulatedProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are done when they return. Missing ones raise, in c10d or here.

    Sends and receives are done after they were waited for, so that two ranks can exchange tensors.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], group_rank: int, timeout: timedelta) -> None:
        super().__init__(group_rank, len(ranks))
        self.peers: GroupMembers = GroupMembers(store, ranks, ranks[group_rank], timeout)
        self._name = ""
        # Of torch-xla's group: neuronx-distributed passes it to xla_model as ``groups=``.
        self._mesh: list[list[int]] = [list(ranks)]

    def getBackendName(self) -> str:
        return "xla"

    # The base class keeps the name in a C++ backend, which a Python process group does not have.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = _as_list(tensors)
        for tensor in tensors:
            collectives.fill(tensor, collectives.all_reduce(self.peers, _reduce_type(opts), tensor))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        for tensor in tensors:
            result = collectives.all_reduce(self.peers, _reduce_type(opts), tensor)
            if self.rank() == opts.rootRank:
                collectives.fill(tensor, result)
        return _done(tensors)

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        tensors = _as_list(tensors)
        for tensor in tensors:
            collectives.fill(tensor, collectives.broadcast(self.peers, tensor, opts.rootRank))
        return _done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        for received, tensor in zip(outputs, inputs, strict=True):
            self._spread("all_gather", tensor, received)
        return _done([t for received in outputs for t in received])

    allgather_coalesced = allgather

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        parts = self.peers.gather("all_gather_into_tensor", collectives.to_host(tensor))
        joined = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
        # Stacked or concatenated: the same bytes.
        stacked = output.shape == (len(parts), *tensor.shape)
        collectives.fill(output, joined.reshape(output.shape) if stacked else joined)
        return _done([output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return _done(outputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> dist.Work:
        for position, tensor in enumerate(inputs):
            self._spread("gather", tensor, outputs[position] if self.rank() == opts.rootRank else [])
        return _done([t for received in outputs for t in received])

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> dist.Work:
        for position, output in enumerate(outputs):
            blank = torch.zeros((len(self.peers), *output.shape), dtype=output.dtype)
            is_root = self.rank() == opts.rootRank
            brought = torch.stack([collectives.to_host(t) for t in inputs[position]]) if is_root else blank
            parts = self.peers.gather("scatter", brought)
            collectives.fill(output, parts[opts.rootRank][self.rank()])
        return _done(outputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        for output, tensors in zip(outputs, inputs, strict=True):
            reduced = collectives.reduce_scatter(self.peers, _reduce_type(opts), torch.stack(tensors))
            collectives.fill(output, reduced[0])
        return _done(outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        # Stacked or concatenated: the same bytes, cut into one block a rank.
        blocks = tensor.reshape(len(self.peers), -1)
        reduced = collectives.reduce_scatter(self.peers, _reduce_type(opts), blocks)
        collectives.fill(output, reduced.reshape(output.shape))
        return _done([output])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(outputs)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        received = collectives.all_to_all(self.peers, torch.stack(inputs))
        for output, part in zip(outputs, received, strict=True):
            collectives.fill(output, part)
        return _done(outputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        if output_sizes or input_sizes:
            raise NotEmulated("torch.distributed.all_to_all_single with split sizes: XLA devices lack it too")
        collectives.fill(output, collectives.all_to_all(self.peers, tensor))
        return _done([output])

    def barrier(self, opts: Any = None) -> dist.Work:
        self.peers.gather("barrier", torch.zeros(1))
        return _done([])

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> dist.Work:
        return _Pending([self.peers.send(collectives.to_host(tensor), destination, tag) for tensor in tensors])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        return _Pending([self._receive(tensor, source, tag) for tensor in tensors])

    def recv_anysource(self, *args: Any) -> dist.Work:
        raise NotEmulated("torch.distributed.recv without a source: name the rank to receive from")

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> Callable[[], None]:
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        wait = self.peers.recv(received, source, tag)

        def finish() -> None:
            wait()
            collectives.fill(tensor, received)

        return finish

    def _spread(self, call: str, tensor: torch.Tensor, received: Sequence[torch.Tensor]) -> None:
        parts = self.peers.gather(call, collectives.to_host(tensor))
        # A rank that receives nothing still takes part.
        for output, part in zip(received, parts, strict=bool(received)):
            collectives.fill(output, part)


class _Pending(dist.Work):
    """Work that the waiting rank finishes."""

    def __init__(self, finish: list[Callable[[], None]]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        while self._finish:
            self._finish.pop(0)()
        return True


def _reduce_type(opts: Any) -> str:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for operation, name in _REDUCE_TYPES:
        if op == operation:
            return name
    raise NotEmulated(f"reduction {op}: XLA devices lack it too; use SUM and scale the result")


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _done(tensors: list[torch.Tensor]) -> dist.Work:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)
    return work
