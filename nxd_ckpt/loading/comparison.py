"""Comparison of live values with what was meant to be there, and what is made of the differences.

Values are compared as they are, and tensors by digest: by the one in the tag's index, or for a tensor that was put
together by the one of its bytes in that moment, before a live object had them. No file is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.partition import Piece, zero1_pieces, zero1_shape
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CorruptCheckpoint, ResumeDiffers
from nxd_ckpt.formats.assembly import box_of
from nxd_ckpt.formats.crc32 import BLOCK, block_crcs, combine_blocks, crc32
from nxd_ckpt.formats.memory import allocated, byte_view, bytes_at, copy_values
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS
from nxd_ckpt.formats.tensors import Assembly, Path, TensorStub, dtype_name, form_of, iter_leaves
from nxd_ckpt.live.dtensor import local_of
from nxd_ckpt.live.optimizer_state import Slot
from nxd_ckpt.live.torch_xla import to_cpu
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.reshard.summary import ABSENT, equal_values
from nxd_ckpt.tag.reading import Leaf, LeafReader

_SHOWN = 5
"""Differences that an error names."""

_PLAIN = (bool, int, float, complex, str, type(None))

Digests = Callable[[Leaf], int | None]
"""Returns the CRC-32 of the row-major bytes of a leaf; None if it was not read."""


def recorded_digest(leaf: Leaf) -> int | None:
    """Return the digest of exactly this tensor, row-major, in the tag; None if it has none."""
    return leaf.storage.crc32 if isinstance(leaf, TensorStub) and leaf.is_record else None


class Witness:
    """Digests of the tensors of a load: those of the tag, and of those that it puts together what it `saw`."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def digest(self, leaf: Leaf) -> int | None:
        """Return the digest that the live tensor should have: `recorded_digest`, or of what it saw; None without."""
        recorded = recorded_digest(leaf)
        return self._seen.get(id(leaf)) if recorded is None else recorded

    def saw(self, leaf: Leaf, value: torch.Tensor) -> None:
        """Remember a leaf as it was read: a contiguous CPU tensor."""
        if recorded_digest(leaf) is None and id(leaf) not in self._seen:
            self._seen[id(leaf)] = crc32(byte_view(value))


class Comparison:
    """Comparison of live values with those that were saved, whose digests ``digest`` knows.

    ``findings`` are the differences. ``everything``: also large tensors on devices. ``verify_again`` is called with the
    first tensor that differs from its record in the tag.
    """

    def __init__(
        self,
        reader: LeafReader,
        digest: Digests,
        *,
        everything: bool,
        verify_again: Callable[[Leaf, str], None],
    ) -> None:
        self._reader = reader
        self._digest = digest
        self._verify_again: Callable[[Leaf, str], None] | None = verify_again
        self._digests = LiveDigests(reader, everything)
        self._everything = everything
        self.findings: list[Finding] = []

    def finish(self) -> list[Finding]:
        """Return all differences, when all digests are computed."""
        self._digests.finish()
        return self.findings

    @contextmanager
    def capturing(self, part: str) -> Iterator[None]:
        """Context in which a part is captured; an error in that, which may be user code's, proves nothing."""
        try:
            yield
        except CorruptCheckpoint:
            raise
        except Exception as error:
            message = f"it cannot be captured, as a save would have to: {type(error).__name__}: {error}"
            self.find("parts", part, message, True)

    def find(self, kind: str, name: str, message: str, by_user: bool) -> None:
        self.findings.append((doubt if by_user else problem)(kind, name, message))

    def compare(self, kind: str, name: str, saved: Any, now: Any, by_user: bool) -> list[tuple[Path, Leaf, Any]]:
        """Compare what was saved under a name: a leaf, or all those of a tree.

        Return the tensors in it that are live in the form that was saved: path, leaf and live tensor.
        """
        if isinstance(saved, (TensorStub, Assembly)):
            return [((), saved, now)] if self.compare_tensors(kind, name, saved, now, by_user) else []
        values = dict(iter_leaves(now))
        return [
            (path, leaf, values[path])
            for path, leaf in iter_leaves(saved)
            if self._compare(kind, "/".join(map(str, (name, *path))), leaf, values.get(path, ABSENT), by_user)
        ]

    def compare_shard(self, slot: Slot, by_user: bool) -> bool:
        """Compare a ZeRO-1 shard with its parameter. Return whether it was compared, and is equal."""
        key = slot.key
        if not (self._everything or key.is_cpu or key.nbytes <= SMALL):
            return False
        is_equal = _is_shard_of_parameter(slot)
        if not is_equal:
            name = slot.global_name(MASTER_WEIGHTS)
            self.find("weights", name, "it is not this rank's shard of the loaded parameter", by_user)
        return is_equal

    def _compare(self, kind: str, name: str, saved: Any, now: Any, by_user: bool) -> bool:
        """Compare one value, or begin to. Return whether both are tensors of one form."""
        if isinstance(saved, (TensorStub, Assembly)):
            return self.compare_tensors(kind, name, saved, now, by_user)
        self._compare_values(kind, name, saved, now, by_user)
        return False

    def compare_tensors(self, kind: str, name: str, saved: Leaf, now: Any, by_user: bool) -> bool:
        """Compare a tensor, or begin to. Return whether both are tensors of one form."""
        if not isinstance(now, (torch.Tensor, int, float)):
            self.find(kind, name, "the tag holds it, and the live objects do not: it was not loaded", by_user)
            return False
        live = local_of(now) if isinstance(now, torch.Tensor) else torch.as_tensor(now)
        if dtype_name(live.dtype) != saved.dtype or live.shape != saved.shape:
            self._compare_numbers(kind, name, saved, live, by_user)
            return False
        if not live.nbytes:
            return True
        self.compare_bytes(kind, name, saved, live, by_user)
        return True

    def compare_bytes(self, kind: str, name: str, saved: Leaf, live: torch.Tensor, by_user: bool) -> None:
        """Compare the bytes of a tensor that has the form of ``saved``, or begin to."""
        expected = self._digest(saved)
        if expected is None:
            self.find(kind, name, "it was not read", by_user)
        elif is_at_once(live):
            self._judge(kind, name, saved, expected, by_user, digest_at_once(live))
        else:
            self._digests.add(name, live, partial(self._judge, kind, name, saved, expected, by_user))

    def _judge(self, kind: str, name: str, saved: Leaf, expected: int, by_user: bool, found: int) -> None:
        if found == expected:
            return
        if self._verify_again is not None and recorded_digest(saved) is not None and not by_user:
            verify_again = self._verify_again
            self._verify_again = None
            verify_again(saved, name)
        message = f"the live tensor is not the one that was saved: expected CRC-32 {expected:08x}, found {found:08x}"
        self.find(kind, name, message, by_user)

    def _compare_numbers(self, kind: str, name: str, saved: Leaf, live: torch.Tensor, by_user: bool) -> None:
        """Compare a count or an option, which the live optimizer may keep in another form."""
        if saved.numel != 1 or live.numel() != 1 or kind == "weights":
            expected = f"{saved.dtype} {list(saved.shape)}"
            found = "{} {}".format(*form_of(live))
            self.find(kind, name, f"expected {expected}, as it was saved, found {found}", by_user)
            return
        out = allocated(saved.shape, saved.dtype)
        self._reader.read_into(saved, out, name, compare=False)
        self._reader.finish()
        number, found_number = out.item(), live.detach().cpu().item()  # a cast to another dtype may round
        if not equal_values(number, found_number):
            self.find(kind, name, f"expected {number!r}, as it was saved, found {found_number!r}", by_user)

    def _compare_values(self, kind: str, name: str, saved: Any, now: Any, by_user: bool) -> None:
        if isinstance(now, torch.Tensor) and isinstance(saved, (int, float)) and now.numel() == 1:
            value = now.detach().cpu().reshape(())
            if equal_values(torch.as_tensor(saved, dtype=value.dtype), value):
                return
            now = value.item()
        elif equal_values(saved, now) and (type(saved) is type(now) or not isinstance(saved, _PLAIN)):
            return
        self.find(kind, name, f"expected {saved!r}, as it was saved, found {now!r}", by_user)


def _is_shard_of_parameter(slot: Slot) -> bool:
    values, shard = to_cpu([slot.parameter, slot.key])
    whole = Box.whole(tuple(values.shape))
    expected = torch.zeros(zero1_shape(whole.size, slot.shards), dtype=shard.dtype)
    for piece in zero1_pieces([Piece(whole, whole)], whole.size, slot.shards, slot.shard):
        box_of(expected, piece.local).copy_(box_of(values, piece.box))
    return expected.shape == shard.shape and crc32(byte_view(expected)) == crc32(byte_view(shard.contiguous()))


def _in_words(findings: Sequence[Finding]) -> str:
    """Return the first findings, and how many more there are."""
    texts = [f"{each.what}: {each.message}" for each in findings[:_SHOWN]]
    more = f"; and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
    return "; ".join(texts) + more


def is_proved(options: LoadOptions) -> bool:
    """Return whether live state is compared: with ``verify=False``, no digest is."""
    return options.prove is True or (options.prove is None and options.verify is not False)


def judge(findings: Sequence[Finding], where: str, prove: bool | None) -> None:
    """Raise ResumeDiffers for problems; warn of what user code may explain, unless all is to be proved."""
    problems = [each for each in findings if each.severity == "problem" or prove]
    doubts = [each for each in findings if each not in problems]
    if problems:
        raise ResumeDiffers(
            f"{where} was loaded, and the live objects are not what was saved: {_in_words(problems)}. Do not train on "
            "from this state. prove=False loads without this comparison"
        )
    if doubts:
        logger.warning(
            "%s was loaded; what code of yours (hooks, state_dict and load_state_dict of own classes) does in a load "
            "is not proved: %s. prove=True makes this an error",
            where, _in_words(doubts),
        )  # fmt: skip


SMALL = 2**16
"""Bytes of a tensor that takes no time: even on a device it is always compared."""

_AT_ONCE = 2**17
"""Bytes of a tensor on the host whose digest takes less time than handing it to another thread."""

_TOGETHER = 64 * 2**20
"""Bytes of tensors that come from a device in one transfer."""


class _Tensor(NamedTuple):
    """A tensor, and the digest of each of its blocks; ``take`` gets that of all of them."""

    nbytes: int
    crcs: list[int]
    take: Callable[[int], None]


_Block = tuple[list[int], int, memoryview]
"""Digests of a tensor's blocks, the number of one of them, and its bytes."""


class LiveDigests:
    """Digests of the row-major bytes of tensors, on the host and on devices.

    They are computed on the threads of ``reader``. Of tensors on a device only small ones are, unless ``everything``
    is to be compared: each costs a transfer.
    """

    def __init__(self, reader: LeafReader, everything: bool) -> None:
        self._reader = reader
        self._everything = everything
        self._tensors: list[_Tensor] = []
        self._on_host: list[tuple[str, _Tensor, memoryview]] = []
        self._on_device: list[tuple[_Tensor, torch.Tensor]] = []
        self._on_device_nbytes = 0

    def add(self, name: str, tensor: torch.Tensor, take: Callable[[int], None]) -> None:
        """Call ``take``, by the time that `finish` returns, with the CRC-32 of a tensor that is no DTensor."""
        nbytes = tensor.nbytes
        if not tensor.is_cpu:
            if self._everything or nbytes <= SMALL:
                self._add_on_device(_Tensor(nbytes, [], take), tensor)
        elif not is_dense(tensor):
            item = self._added(_Tensor(nbytes, [], take))
            self._reader.call(name, partial(_digest_copy, item.crcs, tensor.detach()))
        else:
            item = self._added(_Tensor(nbytes, [0] * -(-nbytes // BLOCK), take))
            self._on_host.append((name, item, byte_view(tensor)))

    def finish(self) -> None:
        """Compute all digests, and hand them over.

        Those on the host are begun here: a thread that wants the interpreter back after each block, while this one
        looks at tensors, holds up both.
        """
        self._transfer()
        for name, blocks in self._batches():
            self._reader.call(name, partial(_digest, blocks))
        self._reader.finish()
        tensors = self._tensors
        self._tensors = []
        for item in tensors:
            item.take(combine_blocks(item.crcs, item.nbytes))

    def _added(self, item: _Tensor) -> _Tensor:
        self._tensors.append(item)
        return item

    def _batches(self) -> Iterator[tuple[str, list[_Block]]]:
        """Yield blocks of tensors on the host, about as many bytes each time, and the name of the last tensor."""
        waiting = self._on_host
        self._on_host = []
        blocks: list[_Block] = []
        nbytes = 0
        name = ""
        for name, item, memory in waiting:
            for number in range(len(item.crcs)):
                block = memory[number * BLOCK : (number + 1) * BLOCK]
                blocks.append((item.crcs, number, block))
                nbytes += len(block)
                if nbytes >= BLOCK:
                    yield name, blocks
                    blocks = []
                    nbytes = 0
        if blocks:
            yield name, blocks

    def _add_on_device(self, item: _Tensor, tensor: torch.Tensor) -> None:
        if self._on_device_nbytes + item.nbytes > _TOGETHER:
            self._transfer()
        self._on_device.append((self._added(item), tensor))
        self._on_device_nbytes += item.nbytes

    def _transfer(self) -> None:
        waiting = self._on_device
        self._on_device = []
        self._on_device_nbytes = 0
        for (item, _), value in zip(waiting, to_cpu([tensor.detach() for _, tensor in waiting]), strict=True):
            _digest_copy(item.crcs, value)


def is_at_once(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the host, dense, and small: its digest is best taken on this thread."""
    return tensor.nbytes <= _AT_ONCE and tensor.is_cpu and is_dense(tensor)


def digest_at_once(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor that `is_at_once`."""
    return crc32(bytes_at(tensor.nbytes)(tensor.data_ptr()))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor on the host has its row-major bytes."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _digest(blocks: list[_Block]) -> None:
    for crcs, number, block in blocks:
        crcs[number] = crc32(block)


def _digest_copy(crcs: list[int], tensor: torch.Tensor) -> None:
    dense = allocated(tuple(tensor.shape), dtype_name(tensor.dtype))
    copy_values(dense, tensor)
    crcs += block_crcs(byte_view(dense)) or [0]
