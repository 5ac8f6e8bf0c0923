"""A tag's optimizer by Hugging Face's names: state tensors, cut like their weights, and a plain document for the rest.

Reads trees, and of tensors only scalars.

If NxD keeps copies of a key-value head, the first copy's state is used, as for its weights. NxD sums the gradients of
the copies (over its kv-shared groups), so each copy has the gradient, and the moments, of Hugging Face's one head.
Their sum or mean would be wrong.

An expert that never had a gradient has no state. If all experts of a layer are one tensor, its part is zero there, as
where its gradients were zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from nxd_ckpt.errors import IncompatibleState, KeyMismatch, UnsupportedState
from nxd_ckpt.formats.memory import allocated
from nxd_ckpt.formats.optimizer_trees import STEP
from nxd_ckpt.formats.tensors import form_of, is_tensor
from nxd_ckpt.hugging_face.hf_slice import HfTensor, NxdTensor
from nxd_ckpt.hugging_face.mapped_tag import MappedTag
from nxd_ckpt.hugging_face.packed_tensors import PackedTensor
from nxd_ckpt.reshard.saved_optimizer import SavedSlot
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import refuse_per_rank
from nxd_ckpt.tag.reading import LeafReader

FORMAT_VERSION = 1
_SHOWN = 8


class MappedOptimizer:
    """The optimizer of the tag ``opened``, whose model is ``mapped``.

    Raises:
        PartNotFound: the tag has no optimizer.
        OptimizerMismatch: the optimizer's parameters have no names.
        IncompatibleState: ranks saved their own values of it.
    """

    def __init__(self, opened: OpenTag, mapped: MappedTag) -> None:
        self._opened = opened
        self._mapped = mapped
        self._saved = mapped.named_optimizer()
        refuse_per_rank(opened, "optim")

    @cached_property
    def tensors(self) -> list[HfTensor | PackedTensor]:
        """States that are shaped like a Hugging Face tensor, in the model's order.

        Raises:
            IncompatibleState: ranks, or parts of one tensor, have different kinds of state.
        """
        states = [
            HfTensor(tensor.hf_slice, form_of(leaf)[0], tensor.source, key)
            for tensor in self._mapped.tensors
            if (slot := self._slots.get(tensor.source.name)) is not None
            for key, leaf in slot.state.items()
            if not _is_scalar(key, leaf, tensor.source)
        ]
        idle = {
            tensor.weight: tensor.shape
            for tensor in self._mapped.tensors
            if (slot := self._slots.get(tensor.source.name)) is not None and not slot.entries
        }
        return self._mapped.packed(states, idle)

    @cached_property
    def document(self) -> dict[str, Any]:
        """Param groups with their Hugging Face tensors, and state that is a number, such as steps, by tensor.

        Raises:
            UnsupportedState: an option, or state of no parameter, is no plain value.
            IncompatibleState: parts of one Hugging Face tensor are in different groups, or have made different steps.
        """
        groups: dict[tuple[int, str], dict[str, Any]] = {}
        placed: dict[str, tuple[tuple[int, str], dict[str, Any]]] = {}
        with self._opened.reader() as reader:
            values = _PlainValues(self._opened.where, reader)
            for tensor in self._mapped.tensors:
                slot = self._slots.get(tensor.source.name)
                if slot is None:
                    continue
                name = self._mapped.in_file(tensor.name)
                options = values.of(slot.options, "param_groups")
                scalars = {
                    key: self._mapped.entry(tensor.source, key) if is_tensor(leaf) else leaf
                    for key, leaf in slot.entries.items()
                    if _is_scalar(key, leaf, tensor.source)
                }
                # Stages and experts number their groups separately; groups of one number and options are merged.
                placement = ((slot.group, repr(options)), values.of(scalars, name))
                if name not in placed:
                    groups.setdefault(placement[0], {**options, "params": []})["params"].append(name)
                first = placed.setdefault(name, placement)
                if not first[1] and placement[0] == first[0]:
                    first = placed[name] = placement
                if first != placement and (slot.entries or placement[0] != first[0]):
                    raise IncompatibleState(
                        f"{self._opened.where}: {name} is one tensor in Hugging Face's files, but its parts, such as "
                        f"{tensor.name}, are in different param groups, or have made different numbers of steps"
                    )
            general = values.of(self._saved.general, "state")
        in_order = [group for _, group in sorted(groups.items(), key=lambda each: each[0][0])]
        state = {name: scalars for name, (_, scalars) in placed.items() if scalars}
        document = {"format_version": FORMAT_VERSION, "param_groups": in_order, "state": state}
        return {**document, "general": general} if general else document

    @property
    def steps(self) -> int | None:
        """Number of steps that the optimizer has made; None if it does not count them."""
        counts = [entries[STEP] for entries in self.document["state"].values() if STEP in entries]
        return int(max(counts)) if counts else None

    def renamed(self, name: Callable[[str], str]) -> dict[str, Any]:
        """Return the document with ``name(tensor)`` for each tensor."""
        groups = [
            {**group, "params": [name(tensor) for tensor in group["params"]]} for group in self.document["param_groups"]
        ]
        state = {name(tensor): values for tensor, values in self.document["state"].items()}
        return {**self.document, "param_groups": groups, "state": state}

    def require_all(self) -> None:
        """Check by trees and scalars that all of it can be exported.

        Raises:
            KeyMismatch: a parameter of the optimizer is in no Hugging Face tensor.
            OptimizerMismatch: a state has another shape than its parameter.
            UnsupportedState: an option, or state, that is neither a tensor nor plain.
        """
        taken = {tensor.source.name for tensor in self._mapped.tensors}
        names = [name for name in self._saved.slots if name not in taken | self._mapped.left_out]
        if names:
            raise KeyMismatch(
                f"{self._opened.where}: the optimizer has state of {', '.join(names[:_SHOWN])} ({len(names)} "
                "parameters), which the model in this tag does not have; pass param_names= as it was saved"
            )
        for tensor in self.tensors:
            self._mapped.assembly(tensor)
        packed = [tensor for tensor in self.tensors if isinstance(tensor, PackedTensor)]
        parts = [part for tensor in packed for part, _ in tensor.parts]
        single = [tensor for tensor in self.tensors if not isinstance(tensor, PackedTensor)]
        self._mapped.refuse_lost_values([*single, *parts])
        self.document  # noqa: B018

    @cached_property
    def _slots(self) -> dict[str, SavedSlot]:
        """Saved slots of the tag's tensors that are parameters of the optimizer, by name."""
        sources = {tensor.source.name: tensor.source for tensor in self._mapped.tensors}
        slots = {name: self._mapped.slot(source) for name, source in sources.items()}
        return {name: slot for name, slot in slots.items() if slot is not None}


class _PlainValues:
    """Conversion of an optimizer's plain state to JSON values; a tensor of one element becomes a number."""

    def __init__(self, where: str, reader: LeafReader) -> None:
        self._where = where
        self._reader = reader

    def of(self, value: Any, name: str) -> Any:
        """Return ``value`` as a JSON value. Raises UnsupportedState if it has none."""
        if is_tensor(value) and value.numel == 1:
            scalar = allocated(value.shape, value.dtype)
            self._reader.read_into(value, scalar, f"optim/{name}", compare=True, verified=False)
            self._reader.finish()
            return scalar.item()
        if isinstance(value, (list, tuple)):
            return [self.of(item, name) for item in value]
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: self.of(item, f"{name}/{key}") for key, item in value.items()}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UnsupportedState(
            f"{self._where}: optimizer, {name}: {type(value).__name__} is neither state shaped like its "
            "parameter nor a plain value; such an optimizer cannot be exported"
        )


def _is_scalar(key: str, leaf: Any, source: NxdTensor) -> bool:
    return key == STEP or not is_tensor(leaf) or (not form_of(leaf)[1] and bool(source.local_shape))
