"""A saved optimizer as one rank of another job holds it: found by parameter name, shards cut anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import zero1_shape
from nxd_ckpt.core.reads import CutIndex, Read
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import IncompatibleState, OptimizerMismatch, TopologyMismatch
from nxd_ckpt.formats.tensors import Assembly, TensorStub, by_digest, iter_tensors
from nxd_ckpt.live.optimizer_state import STEP
from nxd_ckpt.live.parameters import form_of, is_tensor
from nxd_ckpt.live.state import MASTER_WEIGHTS, OptimizerForm, OptimizerSlot
from nxd_ckpt.live.zero1 import EXPERT_KEYS, MASTERS
from nxd_ckpt.reshard.optimizer_names import OptimizerNames
from nxd_ckpt.reshard.reshard_context import ReshardContext, assembled
from nxd_ckpt.reshard.resharded_model import ReshardedModel
from nxd_ckpt.reshard.saved_optimizer import SavedOptimizer, SavedSlot, saved_optimizer
from nxd_ckpt.tag.state_dicts import refuse_numbers

Covers = Callable[[str], bool]
"""Tells by a global name whether something is left out."""


def _covers_nothing(name: str) -> bool:
    return False


@dataclass(frozen=True)
class _Found:
    """A live parameter in the tag: the stage, the name and the slot that it was saved under."""

    pp_rank: int
    name: str
    slot: SavedSlot


class ReshardedOptimizer:
    """The optimizer's part of a tag, beside its ``model``. Reads trees only, each once."""

    def __init__(self, context: ReshardContext, names: OptimizerNames, model: ReshardedModel) -> None:
        self._context, self._names, self._model = context, names, model
        self._saved: dict[Coordinates, SavedOptimizer] = {}
        self._compared: set[str] = set()

    @cached_property
    def stages(self) -> dict[int, Mapping[str, SavedSlot]]:
        """The slots that each pipeline stage saved that may matter to this rank, by name, in order of their number."""
        return {pp_rank: saved.slots for pp_rank, saved in self._references.items()}

    @cached_property
    def slots(self) -> dict[str, SavedSlot]:
        """Those of all these stages, of the first one that has the name."""
        found: dict[str, SavedSlot] = {}
        for slots in self.stages.values():
            for name, slot in slots.items():
                found.setdefault(name, slot)
        return found

    @cached_property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The options of every param group, also of those without parameters; of the stage that has most of them."""
        return max((saved.groups for saved in self._references.values()), key=len, default=())

    @cached_property
    def general(self) -> Mapping[str, Any]:
        """State that is no parameter's, the same on all ranks."""
        return next((saved.general for saved in self._references.values()), {})

    @cached_property
    def own(self) -> Mapping[str, Any]:
        """What the optimizer's class has in its state dict beside torch's keys, the same on all ranks."""
        return next((saved.own for saved in self._references.values()), {})

    def group_order(self, form: OptimizerForm, covers: Covers = _covers_nothing) -> list[int]:
        """The number of the saved group that each live param group (without experts' own) was, as far as it has one."""
        order, begin = [], 0
        for number, size in enumerate(form.groups[: form.ordinary[1] if form.ordinary else None]):
            wanted = [slot for slot in form.slots[begin : begin + size] if not covers(f"optim/{slot.name}")]
            order.append(self._find(wanted[0].name).slot.group if wanted else number)
            begin += size
        return order

    def entries(self) -> Iterator[str]:
        """The global names of all that it was saved with; the parameter's where there is no state of it."""
        yield from (f"optim/state/{key}" for key in self.general)
        for name, slot in self.slots.items():
            yield from [f"optim/{name}/{entry}" for entry in slot.state] or [f"optim/{name}"]

    def has(self, name: str) -> bool:
        """True if the saved optimizer had the live parameter of that name."""
        return self._held(name) is not None

    def tree(
        self, form: OptimizerForm, ignores: Covers = _covers_nothing, covers: Covers = _covers_nothing
    ) -> dict[str, Any]:
        """The state dict of an optimizer of that form, without the entries that ``ignores`` says.

        Parameters whose names ``covers`` says, with all below, need not be in the tag.

        Raises:
            OptimizerMismatch: a parameter that the saved one did not have, an entry that is not of its parameter's
                shape, or a param group of parameters that were saved with different options.
            ShapeMismatch, TopologyMismatch, IncompatibleState: a tensor cannot be cut anew; says why.
        """
        slots = [replace(slot, spec=self._context.live_spec(slot.name, slot.spec)) for slot in form.slots]
        found = [None if covers(f"optim/{slot.name}") else self._find(slot.name) for slot in slots]
        entries: dict[Any, Any] = {}
        masters: dict[int, Any] = {}
        for index, (slot, saved) in enumerate(zip(slots, found, strict=True)):
            if saved is None:
                continue
            self._refuse_entries_elsewhere(slot, saved)
            wanted = [key for key in saved.slot.state if not ignores(f"optim/{slot.name}/{key}")]
            state = {key: self._entry(slot, saved, key) for key in wanted}
            if saved.slot.master is not None and MASTER_WEIGHTS in state:
                masters[index] = state.pop(MASTER_WEIGHTS)
            if state:
                entries[index] = state
        self._refuse_shared(slots, found)
        entries |= {key: value for key, value in self.general.items() if not ignores(f"optim/state/{key}")}
        groups = self._groups(form, [None if saved is None else saved.slot for saved in found])
        if form.kind == "plain":
            return {"state": entries, "param_groups": groups, **self.own}
        tree: dict[str, Any] = {"state": {}, "param_groups": groups, "base_state": entries}
        if form.ordinary is not None:
            slots_before, groups_before = form.ordinary
            # NxD counts the first from the keys of "state", which is empty: always 1.
            offsets = (1, groups_before, slots_before, slots_before)
            tree = {**dict(zip(EXPERT_KEYS, offsets, strict=True)), **tree}
        tree["shape_info"] = {index: torch.Size(slot.spec.shape) for index, slot in enumerate(slots)}
        return tree | ({MASTERS: masters} if masters else {}) | dict(self.own)

    def slot(self, name: str, spec: ParameterSpec) -> SavedSlot | None:
        """What was saved for the parameter ``spec``; None where the optimizer had no such parameter.

        Raises IncompatibleState where some of its shards have more state than others.
        """
        saved = self._held(name)
        if saved is None:
            return None
        self._refuse_entries_elsewhere(OptimizerSlot(name, self._context.live_spec(name, spec)), saved)
        return saved.slot

    def entry(self, name: str, key: str, spec: ParameterSpec) -> Assembly | None:
        """The state ``key`` (or master weights) of the parameter ``spec``, cast to its dtype; None where there is none.

        Raises OptimizerMismatch if it is not shaped like the parameter.
        """
        leaf = self.value(name, key, spec)
        return Assembly.of(leaf).cast(spec.dtype) if isinstance(leaf, (TensorStub, Assembly)) else None

    def value(self, name: str, key: str, spec: ParameterSpec) -> Any:
        """The same in the dtype that it was saved in, or the plain value that is there instead."""
        saved = self._held(name)
        if saved is None or saved.slot.state.get(key) is None:
            return None
        return self._entry(OptimizerSlot(name, self._context.live_spec(name, spec)), saved, key)

    def as_held(self, name: str, key: str, spec: ParameterSpec) -> list[TensorStub]:
        """The state ``key``, whatever its shape, of each saving rank that held another part of the parameter ``spec``.

        Raises IncompatibleState if one of them has none.
        """
        found = self._find(name)
        reads = self._reads(OptimizerSlot(name, self._context.live_spec(name, spec)), found, found.slot.likely_shape)
        return [self._leaf_at(found, place, key) for place in dict.fromkeys(read.holder for read in reads)]

    def _entry(self, slot: OptimizerSlot, found: _Found, key: str) -> Any:
        """One entry of a parameter's state: cut anew if it is shaped like the parameter, scalars as they were."""
        context, name, reference = self._context, f"optim/{slot.name}/{key}", found.slot.state[key]
        if key == STEP:
            return reference
        alone = self.holds_whole(found.slot) and (context.live.tp, context.live.ep, slot.shards) == (1, 1, 1)
        if not is_tensor(reference):
            if not alone and any(leaf.shape for _, leaf in iter_tensors(reference)):
                raise OptimizerMismatch(
                    f"{name}: saved as a {type(reference).__name__} of tensors; only entries of the parameter's own "
                    "shape, and scalars, can be loaded on other sizes"
                )
            return reference
        dtype, shape = form_of(reference)
        whole = found.slot.likely_shape
        if not self.is_shaped_like(found.slot, shape):
            if not shape or alone:
                return reference
            raise OptimizerMismatch(
                f"{name}: saved with shape {shape} for a parameter that each rank held with shape {whole}; only "
                "entries of the parameter's own shape, and scalars, can be loaded on other sizes"
            )
        reads = self._reads(slot, found, whole)
        self._refuse_unequal_replicas(name, context.saved_spec(slot.name, slot.spec, whole), found, key)
        stubs = {read.holder: self._leaf_at(found, read.holder, key) for read in reads}
        return assembled(name, dtype, zero1_shape(slot.spec.shape, slot.shards), reads, stubs, shape)

    def is_shaped_like(self, slot: SavedSlot, shape: tuple[int, ...]) -> bool:
        """Whether a saved entry of ``shape`` is cut as its parameter was."""
        return shape == zero1_shape(slot.likely_shape, self._shards(slot))

    def holds_whole(self, slot: SavedSlot) -> bool:
        """Whether a saving rank held all of the parameter's state: what it saved is then whole, whatever its shape."""
        return (self._context.saved.tp, self._context.saved.ep, self._shards(slot)) == (1, 1, 1)

    def _reads(self, slot: OptimizerSlot, found: _Found, whole: tuple[int, ...]) -> list[Read[CutIndex]]:
        """What all entries of a parameter that are shaped like it are read from."""
        return self._context.reads(
            f"optim/{slot.name}",
            self._context.saved_spec(slot.name, slot.spec, whole),
            slot.spec,
            saved_shards=self._shards(found.slot),
            shards=slot.shards,
            shard=slot.shard,
        )

    def _refuse_entries_elsewhere(self, slot: OptimizerSlot, found: _Found) -> None:
        """Raise IncompatibleState if a rank saved state that the rank which stands for all did not. Experts may differ,
        because each is another parameter.
        """
        mine = {key for key, value in found.slot.entries.items() if value is not None}
        whole = found.slot.shape
        if whole is None or (mine and len(mine) == len(found.slot.entries)):
            return
        for place in {read.holder for read in self._reads(slot, found, whole)}:
            other = self._saved_by(self._at(found, place)).slots.get(found.name, found.slot)
            more = {key for key, value in other.entries.items() if value is not None} - mine
            if more:
                near = self._context.near(found.pp_rank)
                raise self._only_here_and_there(found, ", ".join(sorted(map(str, more))), near)

    def _refuse_unequal_replicas(self, name: str, saved: ParameterSpec, found: _Found, key: str) -> None:
        """Of what is taken to be equal on all ranks, compare another rank's: of the weights, where there are any."""
        suspects = self._context.suspects(found.name, saved)
        if not suspects:  # as when only dp changes: the model's files are not even opened
            return
        has_weights = found.pp_rank in self._model.stages.get(found.name, ())
        if has_weights and found.name not in self._compared:
            self._model.refuse_unequal_replicas(found.name, found.pp_rank, saved)
            self._compared.add(found.name)
        for place, equal, attribute in suspects:
            if found.slot.expert and place.ep_rank:  # what weights that are in no file cannot show
                raise TopologyMismatch(
                    f"{name}: taken to be the same on each rank, but the optimizer has it among the experts: its "
                    f"attributes were lost; pass partitions= with its {attribute}"
                )
            # Of ZeRO-1 each has a shard of its own: no replicas.
            if has_weights or not equal or (self._context.is_sharded and place.ep_rank):
                continue
            pair = [self._leaf_at(found, at, key) for at in (CutIndex(), place)]
            digests = {leaf.storage.crc32 for leaf in pair if isinstance(leaf, TensorStub)}
            if len(digests) == 2 and None not in digests:
                raise TopologyMismatch(
                    f"{name}: taken to be the same on each rank, but rank (tp {place.tp_rank}, ep {place.ep_rank}) "
                    f"saved other values than rank 0: its attributes were lost; pass partitions= with its {attribute}"
                )

    def _refuse_shared(self, slots: Sequence[OptimizerSlot], found: Sequence[_Found | None]) -> None:
        """Raise OptimizerMismatch where two live parameters would take the state of a single one."""
        first: dict[tuple[int, str], str] = {}
        for slot, saved in zip(slots, found, strict=True):
            if saved is None:
                continue
            other = first.setdefault((saved.pp_rank, saved.name), slot.name)
            if other != slot.name:
                raise OptimizerMismatch(
                    f"optimizer: {other!r} and {slot.name!r} were one parameter (tied) when "
                    f"{self._context.opened.where} was saved, live they are two; tie them, or load with optimizer=None"
                )

    def _leaf_at(self, found: _Found, place: CutIndex, key: str) -> Any:
        at = self._at(found, place)
        slot = self._saved_by(at).slots.get(found.name)
        leaf = None if slot is None else slot.state.get(key)
        if not is_tensor(leaf):
            raise self._only_here_and_there(found, key, at)
        return leaf

    def _only_here_and_there(self, found: _Found, key: str, at: Coordinates) -> IncompatibleState:
        return IncompatibleState(
            f"{self._context.opened.where}: the rank at {at} saved no {key} for {found.name!r}, others did; the files "
            "are of two saves, or the parameter had a gradient on some ranks only"
        )

    def _at(self, found: _Found, place: CutIndex) -> Coordinates:
        """The saving rank whose file holds what is at ``place``."""
        dp_rank = place.ep_rank
        if self._context.is_sharded:
            dp_rank = place.shard * self._context.saved.ep + place.ep_rank if found.slot.expert else place.shard
        return Coordinates(found.pp_rank, dp_rank, place.tp_rank)

    def _shards(self, slot: SavedSlot) -> int:
        if not self._context.is_sharded:
            return 1
        return self._context.saved.expert_dp if slot.expert else self._context.saved.dp

    def _groups(self, form: OptimizerForm, saved: Sequence[SavedSlot | None]) -> list[dict[str, Any]]:
        """Param groups with the options that their parameters were saved with; none where all of them are None."""
        groups, begin = [], 0
        for number, size in enumerate(form.groups):
            own = [slot for slot in saved[begin : begin + size] if slot is not None]
            for slot in own[1:]:
                self._refuse_other_options(number, own[0], slot)
            # Experts' groups are numbered anew, and so are the parameters in them.
            first, first_group = form.ordinary if form.ordinary and number >= form.ordinary[1] else (0, 0)
            by_number = {} if size else dict(enumerate(self.groups))  # an empty group has only its number
            options = own[0].options if own else by_number.get(number - first_group, {})
            groups.append({**options, "params": list(range(begin - first, begin - first + size))})
            begin += size
        return groups

    def _refuse_other_options(self, number: int, first: SavedSlot, other: SavedSlot) -> None:
        same = (first.group, first.expert) == (other.group, other.expert)
        options = set() if same else {*first.options, *other.options}
        differ = sorted(name for name in options if not _equal(first.options.get(name), other.options.get(name)))
        if differ:
            values = first.options.get(differ[0]), other.options.get(differ[0])
            raise OptimizerMismatch(
                f"optimizer: the live param group {number} holds parameters that {self._context.opened.where} has in "
                f"groups {first.group} and {other.group}, which differ in {', '.join(differ)} ({differ[0]}: "
                f"{values[0]!r} and {values[1]!r}); build param_groups so that each holds parameters of one saved group"
            )

    def _find(self, name: str) -> _Found:
        found = self._held(name)
        if found is None:
            raise OptimizerMismatch(
                f"optimizer: {self._context.opened.where} has no entry for {name!r}: it was frozen, or not passed to "
                f"the optimizer, when that was saved. It has {first_of(self.slots)}; build param_groups of the same "
                "parameters"
            )
        return found

    def _held(self, name: str) -> _Found | None:
        for pp_rank, slots in self.stages.items():
            held = [alias for alias in self._context.names(name) if alias in slots]
            if len(held) > 1:
                raise OptimizerMismatch(
                    f"optimizer: {', '.join(held)} are one parameter live (tied), but each had a state of its own when "
                    f"{self._context.opened.where} was saved; untie them, or load with optimizer=None"
                )
            if held:
                return _Found(pp_rank, held[0], slots[held[0]])
        return None

    @cached_property
    def _references(self) -> dict[int, SavedOptimizer]:
        """What a saving rank of each stage has that tells what any does; none of a tag without an optimizer."""
        stages = self._context.stages if self._context.opened.parts.optimizer is not None else ()
        return {pp_rank: self._saved_by(self._context.near(pp_rank)) for pp_rank in stages}

    def _saved_by(self, at: Coordinates) -> SavedOptimizer:
        if at not in self._saved:
            context, opened = self._context, self._context.opened
            names = self._names.of_rank(context, at)
            tree = opened.optimizer_tree(at, names)
            if "base_state" not in tree and opened.parts.optimizer != "plain":
                raise OptimizerMismatch(
                    f"{opened.where}: the optimizer's shards were cut in a way that only it knows "
                    "(zero1_optimizer=True for one that is not ZeRO-1); load them on the sizes that they were saved on"
                )
            if opened.manifest is None:
                refuse_numbers(tree, names, opened.where)
            prefix, shape = self._names.prefix(context, at), context.recorded_shape
            self._saved[at] = saved_optimizer(tree, names, prefix, shape, opened.where)
        return self._saved[at]


def _equal(one: Any, other: Any) -> bool:
    one, other = by_digest(one), by_digest(other)
    return type(one) is type(other) and bool(one == other)
