"""Comparison of saved tensors of which a live model can hold only one, since it ties their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.errors import IncompatibleState
from nxd_ckpt.formats.tensors import Assembly, TensorStub, allocated, byte_view, digest_of, itemsize
from nxd_ckpt.tag.reading import Leaf, LeafReader

_NBYTES = 4 * 2**20
"""Bytes of each of two tensors that are compared at once."""


def refuse_unequal_ties(
    where: str,
    tree: Mapping[str, object],
    aliases: Callable[[str], Sequence[str]],
    reader: Callable[[], AbstractContextManager[LeafReader]],
) -> None:
    """Check that the tensors of ``tree`` under the names of one live tensor (``aliases``) are equal.

    Raises:
        IncompatibleState: two tensors differ, of which a load would drop one.
    """
    for first, name in unequal_ties(tree, aliases, reader):
        raise IncompatibleState(
            f"{where} holds different values for model/{first} and model/{name}, which are one tied tensor in the live "
            f"model; build the model without that tie, or choose one: ignore_keys=['model/{name}'] loads model/{first}"
            f", ignore_keys=['model/{first}'] the other one"
        )


def unequal_ties(
    tree: Mapping[str, object],
    aliases: Callable[[str], Sequence[str]],
    reader: Callable[[], AbstractContextManager[LeafReader]],
) -> Iterator[tuple[str, str]]:
    """Yield pairs of tied names under which ``tree`` has different tensors; in bounded memory.

    Digests are compared if files have them; else the bytes are read, unless both are the same place in a file.
    """
    for name, leaf in tree.items():
        first = next((alias for alias in aliases(name) if alias in tree), name)
        first_leaf = tree[first]
        if first == name or not isinstance(leaf, (TensorStub, Assembly)):
            continue
        if isinstance(first_leaf, (TensorStub, Assembly)) and not _equal(leaf, first_leaf, name, reader):
            yield first, name


def _equal(a: Leaf, b: Leaf, name: str, reader: Callable[[], AbstractContextManager[LeafReader]]) -> bool:
    if a == b:
        return True
    if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype:
        return False
    digests = digest_of(a), digest_of(b)
    if None not in digests and _is_row_major(a) and _is_row_major(b):
        return digests[0] == digests[1]
    wholes = Assembly.of(a), Assembly.of(b)
    if wholes[0].fragments == wholes[1].fragments:
        return True
    with reader() as open_reader:
        return all(
            torch.equal(*(_bytes(open_reader, whole.within(box), name) for whole in wholes))
            for box in _boxes(tuple(a.shape), itemsize(a.dtype))
        )


def _is_row_major(leaf: Leaf) -> bool:
    """Return whether its bytes are those of its storage, in the order of its elements."""
    if not isinstance(leaf, TensorStub):
        return False
    return leaf.is_contiguous and leaf.nbytes == leaf.storage.nbytes


def _bytes(reader: LeafReader, part: Assembly, name: str) -> torch.Tensor:
    out = allocated(part.shape, part.dtype)
    reader.read_into(part, out, f"model/{name}", compare=False)
    reader.finish()
    return torch.frombuffer(byte_view(out), dtype=torch.uint8) if out.numel() else torch.empty(0, dtype=torch.uint8)


def _boxes(shape: tuple[int, ...], size: int) -> Iterator[Box]:
    """Yield boxes of at most ``_NBYTES``, cut along one dimension, which together are all of ``shape``."""
    whole = Box.whole(shape)
    if not shape or not whole.numel:
        yield whole
        return
    dim = max(range(len(shape)), key=shape.__getitem__)
    step = max(1, _NBYTES // (size * whole.numel // shape[dim]))
    for start in range(0, shape[dim], step):
        yield whole.narrowed(dim, start, min(step, shape[dim] - start))
