"""Weights saved in full precision, for a job that trains rounded ones beside master weights.

The master weights take the saved values, bit for bit, and the model takes their rounding. (The planner lets a model in
full precision take saved master weights.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Piece, zero1_pieces, zero1_shape
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.live.parameters import form_of, is_tensor
from nxd_ckpt.live.state import MASTER_WEIGHTS, OptimizerForm, OptimizerSlot
from nxd_ckpt.live.zero1 import MASTERS
from nxd_ckpt.load.placing import part_of
from nxd_ckpt.tag.reading import Leaf


@dataclass(frozen=True)
class ExactWeights:
    """Full-precision weights for master weights, partitioned like this rank's parameters.

    ``by_name`` has them by their names in the model, of which tied ones have several; ``by_slot`` by slots of the
    optimizer.
    """

    by_name: Mapping[str, Leaf]
    by_slot: Sequence[tuple[int, OptimizerSlot, Leaf]]

    def rounded(self, tree: Mapping[str, Any], live: Mapping[str, ParameterSpec]) -> dict[str, Any]:
        """Return the model's tree with these weights in the dtype of the ``live`` ones."""
        cast = {name: Assembly.of(leaf).cast(live[name].dtype) for name, leaf in self.by_name.items()}
        return {**tree, **cast}

    def put_into(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a ZeRO-1 optimizer's tree with this rank's shards of these; saved master weights stay."""
        shards = {number: _shard_of(leaf, slot) for number, slot, leaf in self.by_slot}
        return {**tree, MASTERS: {**shards, **tree.get(MASTERS, {})}} if shards else tree


def of_other_dtype(tree: Mapping[str, Any], live: Mapping[str, ParameterSpec]) -> dict[str, Leaf]:
    """Return the tensors of a model's tree that were saved in another dtype than this rank's ``live`` ones have."""
    tensors = {name: leaf for name, leaf in tree.items() if name in live and is_tensor(leaf)}
    return {name: leaf for name, leaf in tensors.items() if form_of(leaf)[0] != live[name].dtype}


def exact_weights(
    saved: Mapping[str, Leaf],
    form: OptimizerForm,
    aliases: Callable[[str], Sequence[str]],
    ignores: Callable[[str], bool],
) -> ExactWeights:
    """Return the ``saved`` weights for which an optimizer of that ``form`` has master weights of their dtype.

    ``aliases`` gives all names of a parameter; ``ignores`` selects master weights, by global name, that are not loaded.
    """
    by_name: dict[str, Leaf] = {}
    by_slot = []
    for number, slot in enumerate(form.slots):
        weights = {name: saved[name] for name in aliases(slot.name) if name in saved}
        fits = weights and all(form_of(leaf) == (slot.master_dtype, slot.spec.shape) for leaf in weights.values())
        if fits and not ignores(f"optim/{slot.name}/{MASTER_WEIGHTS}"):
            by_name |= weights
            by_slot.append((number, slot, next(iter(weights.values()))))
    return ExactWeights(by_name, by_slot)


def _shard_of(leaf: Leaf, slot: OptimizerSlot) -> Leaf:
    whole = Box.whole(leaf.shape)
    pieces = zero1_pieces([Piece(whole, whole)], leaf.shape, slot.shards, slot.shard)
    return part_of(leaf, pieces, zero1_shape(leaf.shape, slot.shards))
