"""Saved tensors of which a live model can hold only one, since it ties their names: they must be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.errors import IncompatibleState
from nxd_ckpt.formats.tensors import Assembly, TensorStub, allocated, byte_view, digest_of, itemsize
from nxd_ckpt.tag.reading import Leaf, LeafReader

_NBYTES = 4 * 2**20
"""Of each of two tensors, what is compared at once."""


def refuse_unequal_ties(
    where: str,
    tree: Mapping[str, object],
    aliases: Callable[[str], Sequence[str]],
    reader: Callable[[], AbstractContextManager[LeafReader]],
) -> None:
    """Check that what ``tree`` has under the names of one live tensor (``aliases``) is equal.

    Raises:
        IncompatibleState: two tensors differ, of which a load would drop one.
    """
    for first, name in unequal_ties(tree, aliases, reader):
        raise IncompatibleState(
            f"{where} holds different values for model/{first} and model/{name}, which are one tied tensor in the live "
            f"model; build the model without that tie, or choose one: ignore_keys=['model/{name}'] takes model/{first}"
            f", ignore_keys=['model/{first}'] the other one"
        )


def unequal_ties(
    tree: Mapping[str, object],
    aliases: Callable[[str], Sequence[str]],
    reader: Callable[[], AbstractContextManager[LeafReader]],
) -> Iterator[tuple[str, str]]:
    """Pairs of tied names under which ``tree`` has different tensors; in bounded memory.

    Digests tell where files have them; else the bytes are read, but for those of one place in a file.
    """
    for name, leaf in tree.items():
        first = next((other for other in aliases(name) if other in tree), name)
        other = tree[first]
        if first == name or not isinstance(leaf, (TensorStub, Assembly)):
            continue
        if isinstance(other, (TensorStub, Assembly)) and not _equal(leaf, other, name, reader):
            yield first, name


def _equal(one: Leaf, other: Leaf, name: str, reader: Callable[[], AbstractContextManager[LeafReader]]) -> bool:
    if one == other:
        return True
    if tuple(one.shape) != tuple(other.shape) or one.dtype != other.dtype:
        return False
    digests = digest_of(one), digest_of(other)
    if None not in digests and _is_row_major(one) and _is_row_major(other):
        return digests[0] == digests[1]
    wholes = Assembly.of(one), Assembly.of(other)
    if wholes[0].fragments == wholes[1].fragments:
        return True
    with reader() as open_reader:
        return all(
            torch.equal(*(_bytes(open_reader, whole.within(box), name) for whole in wholes))
            for box in _boxes(tuple(one.shape), itemsize(one.dtype))
        )


def _is_row_major(leaf: Leaf) -> bool:
    """Whether its bytes are those of its storage, in the order of its elements."""
    if not isinstance(leaf, TensorStub):
        return False
    return leaf.is_contiguous and leaf.nbytes == leaf.storage.nbytes


def _bytes(reader: LeafReader, part: Assembly, name: str) -> torch.Tensor:
    out = allocated(part.shape, part.dtype)
    reader.read_into(part, out, f"model/{name}", compare=False)
    reader.finish()
    return torch.frombuffer(byte_view(out), dtype=torch.uint8) if out.numel() else torch.empty(0, dtype=torch.uint8)


def _boxes(shape: tuple[int, ...], size: int) -> Iterator[Box]:
    """Boxes of at most :data:`_NBYTES`, cut along one dimension, which together are all of ``shape``."""
    whole = Box.whole(shape)
    if not shape or not whole.numel:
        yield whole
        return
    dim = max(range(len(shape)), key=shape.__getitem__)
    step = max(1, _NBYTES // (size * whole.numel // shape[dim]))
    for start in range(0, shape[dim], step):
        yield whole.narrowed(dim, start, min(step, shape[dim] - start))
