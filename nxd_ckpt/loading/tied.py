"""Comparison of saved tensors of which a live model can hold only one, since it ties their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from nxd_ckpt.errors import IncompatibleState
from nxd_ckpt.formats.tensors import Assembly, TensorStub
from nxd_ckpt.tag.equality import are_equal
from nxd_ckpt.tag.reading import LeafReader


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
    """Yield pairs of tied names under which ``tree`` has different tensors (`are_equal`)."""
    for name, leaf in tree.items():
        names = aliases(name)
        if len(names) < 2:
            continue
        first = next((alias for alias in names if alias in tree), name)
        first_leaf = tree[first]
        if first == name or not isinstance(leaf, (TensorStub, Assembly)):
            continue
        if isinstance(first_leaf, (TensorStub, Assembly)) and not are_equal(first_leaf, leaf, name, reader):
            yield first, name
