"""This process's place among those of the launcher, its connections to the others, and what all exchange over them.

An all-reduce, a reduce-scatter or a broadcast is one exchange, in which each rank of a group gets the contributions of
all, followed by a pure function of the list (see ``collectives``). It costs more bytes than a ring, and gives sums that
do not depend on how a ring cuts a tensor: all-reduce and reduce-scatter agree bit for bit with each other, and with a
loop over the ranks in one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from nxd_ckpt.errors import CheckpointError, InvalidArgument, UnsupportedState

# For mypy: torch.distributed does not declare what it exports.
# mypy: disable-error-code="attr-defined"




_HEADER_BYTES = 256


class NotEmulated(UnsupportedState, NotImplementedError):
    """The script used something that CPU-XLA emulation does not route between processes."""


class CollectiveMismatch(CheckpointError):
    """The ranks of a group met in different collectives: on devices this is a hang or garbage."""


class PeerLost(CheckpointError):
    """A rank of the group ended, or did not arrive in time, while this one was in a collective."""


class GroupMembers:
    """The ranks of one group, in the group's order, joined by a gloo group of their own.

    Args:
        store: where the members find each other; every member passes the same one, and no other group of the same
        ranks uses it.
        ranks: global ranks of the members.
        rank: global rank of this process, one of ``ranks``.
        timeout: how long a collective waits for the others.

    Construction is collective over ``ranks``. Raises `PeerLost` if a member does not come.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.index: int = self.ranks.index(rank)
        self._rank = rank
        self._timeout = timeout
        self._gloo: ProcessGroupGloo | None = None
        if len(self) > 1:
            try:
                own = PrefixStore(",".join(map(str, ranks)), store)
                with _stdout_to_stderr():
                    self._gloo = ProcessGroupGloo(own, self.index, len(self), timeout=timeout)
            except RuntimeError as error:
                raise self._lost("joining the group", error) from error

    def __len__(self) -> int:
        return len(self.ranks)

    def gather(self, call: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's tensor for ``call``, in group order: CPU tensors of one dtype and shape.

        Raises:
            CollectiveMismatch: the members' calls, dtypes or shapes differ; every member raises it.
            PeerLost: a member ended or did not come within the timeout.
        """
        self._agree(f"{call} of {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
        if self._gloo is None or tensor.numel() == 0:
            return [tensor.clone() for _ in self.ranks]
        # As bytes: gloo lacks some dtypes, and no arithmetic happens on the way.
        brought = tensor.contiguous().reshape(-1).view(torch.uint8)
        parts = self._allgather(call, brought)
        return [part.view(tensor.dtype).reshape(tensor.shape) for part in parts]

    def gather_bytes(self, call: str, payload: bytes) -> list[bytes]:
        """Return every member's payload, of any length, in group order. Raises as `gather` does."""
        sizes = [int(n) for n in self.gather(f"{call}: payload sizes", torch.tensor(len(payload)))]
        padded = payload.ljust(max(sizes), b"\0")
        brought = torch.frombuffer(bytearray(padded), dtype=torch.uint8) if padded else torch.empty(0)
        parts = self.gather(call, brought)
        return [part.numpy().tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Callable[[], None]:
        """Start to send a CPU tensor to the member at position ``peer``; the result waits until it is sent."""
        return self._start("send", tensor.contiguous(), peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Callable[[], None]:
        """Start to fill a contiguous CPU tensor from the member at position ``peer``; the result waits for it."""
        return self._start("recv", tensor, peer, tag)

    def _start(self, call: str, tensor: torch.Tensor, peer: int, tag: int) -> Callable[[], None]:
        if self._gloo is None:
            raise CollectiveMismatch(f"rank {self._rank}: {call} in a group without other ranks")
        work = getattr(self._gloo, call)([tensor], peer, tag)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(f"{call} with rank {self.ranks[peer]} of {list(tensor.shape)}", error) from error

        return wait

    def _agree(self, description: str) -> None:
        if self._gloo is None:
            return
        encoded = description.encode()[:_HEADER_BYTES].ljust(_HEADER_BYTES)
        headers = self._allgather(description, torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        calls = [header.numpy().tobytes().decode(errors="replace").rstrip() for header in headers]
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in zip(self.ranks, calls, strict=True))
            raise CollectiveMismatch(
                f"the ranks of group {list(self.ranks)} met in different collectives ({listed}). "
                "All its ranks must make the same calls in the same order, with the same dtypes and shapes."
            )

    def _allgather(self, call: str, flat: torch.Tensor) -> list[torch.Tensor]:
        assert self._gloo is not None  # callers returned early for a group of one
        parts = [torch.empty_like(flat) for _ in self.ranks]
        try:
            self._gloo.allgather([parts], [flat]).wait()
        except RuntimeError as error:
            raise self._lost(call, error) from error
        return parts

    def _lost(self, call: str, error: RuntimeError) -> PeerLost:
        return PeerLost(
            f"rank {self._rank}, {call}: a rank of group {list(self.ranks)} ended, or did not come within "
            f"{self._timeout.total_seconds():g} s; look at the other ranks' output ({error})"
        )


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr: gloo announces its connections on stdout, which belongs to the script."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


# For mypy: torch.distributed does not declare what it exports.
# mypy: disable-error-code="attr-defined"




TIMEOUT_VARIABLE = "NXD_CKPT_EMULATION_TIMEOUT"
PORT_VARIABLE = "NXD_CKPT_EMULATION_PORT"
_DEFAULT_TIMEOUT_SECONDS = 600.0


@dataclass
class World:
    """This process among its peers. ``groups`` in torch-xla's sense are lists of global ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    store: Store
    timeout: timedelta
    _peers: dict[tuple[int, ...], GroupMembers] = field(default_factory=dict, repr=False)

    def peers(self, groups: Sequence[Sequence[int]] | None = None) -> GroupMembers:
        """Return this rank's group among ``groups``; all ranks if there are none.

        Joined at the first use, then kept.

        Raises:
            InvalidArgument: this rank is in none of the groups.
        """
        for group in groups or [range(self.size)]:
            if self.rank in group:
                ranks = tuple(int(rank) for rank in group)
                if ranks not in self._peers:
                    store = PrefixStore("nxd_ckpt.emulation", self.store)
                    self._peers[ranks] = GroupMembers(store, ranks, self.rank, self.timeout)
                return self._peers[ranks]
        raise InvalidArgument(f"collective on rank {self.rank}: it is in none of the groups {groups}")


def world_from_environment() -> World:
    """Return the launcher's world; a world of one without a launcher.

    Raises:
        InvalidArgument: there are several processes, but the launcher did not start them.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size > 1 and PORT_VARIABLE not in os.environ:
        raise InvalidArgument(
            f"CPU-XLA emulation of {size} ranks: {PORT_VARIABLE} is not set; start the script with "
            f"python -m nxd_ckpt.emulation --nproc {size}"
        )
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT_SECONDS)))
    return World(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        # Not at MASTER_PORT, which is the script's: a store that outlived its process groups would hand the
        # addresses of the old group to the next one.
        store=TCPStore(
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            int(os.environ.get(PORT_VARIABLE, 0)),
            size,
            is_master=rank == 0,
            timeout=timeout,
        ),
        timeout=timeout,
    )
