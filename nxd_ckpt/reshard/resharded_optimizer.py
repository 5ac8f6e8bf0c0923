"""A saved optimizer as one rank of another job holds it: matched by parameter name, with ZeRO-1 shards recut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.name_patterns import PARAM_GROUPS, how_to_leave_out
from nxd_ckpt.core.partition import zero1_shape
from nxd_ckpt.core.reads import CutIndex, Read
from nxd_ckpt.core.suggestions import first_of, left_out
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import IncompatibleState, OptimizerMismatch, TopologyMismatch
from nxd_ckpt.formats.crc32 import digest_of_value
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS, MASTER_WEIGHTS, MASTERS, STEP, restore_types
from nxd_ckpt.formats.state import OptimizerForm, OptimizerSlot
from nxd_ckpt.formats.tensors import Assembly, TensorStub, by_digest, digest_of, form_of, is_tensor, iter_tensors
from nxd_ckpt.layouts.payload import refuse_numbers
from nxd_ckpt.reshard.reshard_context import ReshardContext, assembled
from nxd_ckpt.reshard.resharded_model import ReshardedModel
from nxd_ckpt.reshard.saved_optimizer import OptimizerNames, SavedOptimizer, SavedSlot, saved_optimizer

Covers = Callable[[str], bool]
"""A predicate on global names: True if the entry is to be left out."""


def _covers_nothing(name: str) -> bool:
    return False


@dataclass(frozen=True)
class _SavedParameter:
    """A live parameter's counterpart in the tag: its pipeline stage, its name there and its slot."""

    pp_rank: int
    name: str
    slot: SavedSlot


class _Holder(NamedTuple):
    """A saving rank: its coordinates, the place of its parts, its optimizer, and what it has of one parameter."""

    at: Coordinates
    place: CutIndex
    optimizer: SavedOptimizer
    slot: SavedSlot


class ReshardedOptimizer:
    """The optimizer of a tag; ``model`` is the model of the same tag. Reads trees only, each once."""

    def __init__(self, context: ReshardContext, names: OptimizerNames, model: ReshardedModel) -> None:
        self._context = context
        self._names = names
        self._model = model
        self._saved: dict[Coordinates, SavedOptimizer] = {}
        self._compared: set[Any] = set()
        self._holders: dict[Any, list[_Holder]] = {}

    @cached_property
    def stages(self) -> dict[int, Mapping[str, SavedSlot]]:
        """Slots by name, for each pipeline stage that may matter to this rank, in order of their number."""
        return {pp_rank: saved.slots for pp_rank, saved in self._references.items()}

    @cached_property
    def slots(self) -> dict[str, SavedSlot]:
        """Slots by name; the first pipeline stage that has a name wins."""
        first: dict[str, SavedSlot] = {}
        for slots in self.stages.values():
            for name, slot in slots.items():
                first.setdefault(name, slot)
        return first

    @cached_property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Options of every param group, also of empty ones, from the stage that has most groups."""
        return max((saved.groups for saved in self._references.values()), key=len, default=())

    @cached_property
    def general(self) -> Mapping[str, Any]:
        """State that belongs to no parameter, equal on all ranks."""
        return next((saved.general for saved in self._references.values()), {})

    @cached_property
    def own(self) -> Mapping[str, Any]:
        """Keys that the optimizer's class adds to torch's state dict, equal on all ranks."""
        return next((saved.own for saved in self._references.values()), {})

    def group_order(self, form: OptimizerForm, covers: Covers) -> list[list[int]]:
        """Return the saved groups' numbers for each live param group, without experts' own.

        Its own number if none fits.
        """
        order: list[list[int]] = []
        begin = 0
        for number, size in enumerate(form.groups[: form.ordinary[1] if form.ordinary else None]):
            own = [slot.name for slot in form.slots[begin : begin + size] if not covers(f"optim/{slot.name}")]
            loaded = self._find(own)
            order.append([*dict.fromkeys(loaded[name].slot.group for name in own)] or [number])
            begin += size
        return order

    def entries(self) -> Iterator[str]:
        """Yield the global names of all saved entries; the parameter's own name if it has no state."""
        yield from (f"optim/state/{key}" for key in self.general)
        for name, slot in self.slots.items():
            yield from [f"optim/{name}/{entry}" for entry in slot.state] or [f"optim/{name}"]

    def has(self, name: str) -> bool:
        """True if the saved optimizer had this live parameter."""
        return self._match(name) is not None

    def tree(
        self, form: OptimizerForm, ignores: Covers = _covers_nothing, covers: Covers = _covers_nothing
    ) -> dict[str, Any]:
        """Return the state dict of an optimizer of this form, without the entries for which ``ignores`` is true.

        Parameters for which ``covers`` is true ("optim/NAME") need not be in the tag.

        Raises:
            OptimizerMismatch: the tag lacks a parameter, an entry has not its parameter's shape, or a param group
                holds parameters that were saved with different options.
            ShapeMismatch, TopologyMismatch, IncompatibleState: a tensor cannot be recut; the message says why.
        """
        slots = [replace(slot, spec=self._context.live_spec(slot.name, slot.spec)) for slot in form.slots]
        by_name = self._find(slot.name for slot in slots if not covers(f"optim/{slot.name}"))
        matches = [by_name.get(slot.name) for slot in slots]
        entries: dict[Any, Any] = {}
        masters: dict[int, Any] = {}
        for index, (slot, saved) in enumerate(zip(slots, matches, strict=True)):
            if saved is None:
                continue
            self._refuse_differences(slot, saved, ignores)
            keys = [key for key in saved.slot.state if not ignores(f"optim/{slot.name}/{key}")]
            state = {key: self._entry(slot, saved, key) for key in keys}
            if saved.slot.master is not None and MASTER_WEIGHTS in state:
                masters[index] = state.pop(MASTER_WEIGHTS)
            if state:
                entries[index] = state
        self._refuse_shared(slots, matches)
        entries |= {key: value for key, value in self.general.items() if not ignores(f"optim/state/{key}")}
        groups = self._groups(form, [None if saved is None else saved.slot for saved in matches])
        if form.kind == "plain":
            return {"state": entries, "param_groups": groups, **self.own}
        tree: dict[str, Any] = {"state": {}, "param_groups": groups, "base_state": entries}
        if form.ordinary is not None:
            slots_before, groups_before = form.ordinary
            # NxD counts the first from the keys of "state", which is empty: always 1.
            offsets = (1, groups_before, slots_before, slots_before)
            tree = {**dict(zip(EXPERT_KEYS, offsets, strict=True)), **tree}
        tree["shape_info"] = {index: slot.spec.shape for index, slot in enumerate(slots)}
        return restore_types(tree | ({MASTERS: masters} if masters else {}) | dict(self.own))

    def slot(self, name: str, spec: ParameterSpec) -> SavedSlot | None:
        """Return the saved slot of the parameter ``spec``; None if the optimizer had no such parameter.

        Raises IncompatibleState if some ranks have more state than others, or other options.
        """
        saved = self._match(name)
        if saved is None:
            return None
        own = OptimizerSlot(name, self._context.live_spec(name, spec))
        self._refuse_differences(own, saved)
        for key, value in saved.slot.entries.items():
            if not is_tensor(value):  # which a caller may take as it is
                self._refuse_other_entry(own, saved, key)
        return saved.slot

    def entry(self, name: str, key: str, spec: ParameterSpec) -> Assembly | None:
        """Return the state ``key`` (or master weights) of the parameter ``spec``, cast to its dtype; None if absent.

        Raises OptimizerMismatch if it is not shaped like the parameter.
        """
        leaf = self.value(name, key, spec)
        return Assembly.of(leaf).cast(spec.dtype) if isinstance(leaf, (TensorStub, Assembly)) else None

    def value(self, name: str, key: str, spec: ParameterSpec) -> Any:
        """Return the state ``key`` of the parameter ``spec`` in its saved dtype, or its plain value; None if absent."""
        saved = self._match(name)
        if saved is None or saved.slot.state.get(key) is None:
            return None
        return self._entry(OptimizerSlot(name, self._context.live_spec(name, spec)), saved, key)

    def stubs_by_rank(self, name: str, key: str, spec: ParameterSpec) -> list[TensorStub]:
        """Return the state ``key``, of any shape, of each saving rank that held a part of the parameter ``spec``.

        Raises IncompatibleState if one of them has none.
        """
        saved = self._find([name])[name]
        reads = self._reads(OptimizerSlot(name, self._context.live_spec(name, spec)), saved, saved.slot.likely_shape)
        return [self._leaf_at(saved, place, key) for place in dict.fromkeys(read.holder for read in reads)]

    def _entry(self, slot: OptimizerSlot, saved: _SavedParameter, key: str) -> Any:
        """Return one entry of a parameter's state: recut if shaped like the parameter, else as saved.

        Raises IncompatibleState if ranks that should have it alike differ.
        """
        entry = self._recut(slot, saved, key)
        self._refuse_other_entry(slot, saved, key)
        return entry

    def _recut(self, slot: OptimizerSlot, saved: _SavedParameter, key: str) -> Any:
        context = self._context
        name = f"optim/{slot.name}/{key}"
        reference = saved.slot.state[key]
        if key == STEP:
            return reference
        alone = self.holds_whole(saved.slot) and (context.live.tp, context.live.ep, slot.shards) == (1, 1, 1)
        if not is_tensor(reference):
            if not alone and any(leaf.shape for _, leaf in iter_tensors(reference)):
                raise OptimizerMismatch(
                    f"{name}: saved as a {type(reference).__name__} of tensors. On other parallel sizes only scalars, "
                    "and entries of the parameter's own shape, can be loaded; load it on the saved sizes"
                )
            return reference
        dtype, shape = form_of(reference)
        whole = saved.slot.likely_shape
        if not self.is_shaped_like(saved.slot, shape):
            if self._context.is_sharded and self._context.opened.manifest is None:
                self._refuse_missing_shards(name, saved.slot, shape)
            if not shape or alone:
                return reference
            raise OptimizerMismatch(
                f"{name}: saved with shape {shape} for a parameter that each rank held with shape {whole}. On other "
                "parallel sizes only scalars, and entries of the parameter's own shape, can be loaded; load it on the "
                "saved sizes"
            )
        reads = self._reads(slot, saved, whole)
        self._refuse_unequal_replicas(name, context.saved_spec(slot.name, slot.spec, whole), saved, key)
        stubs = {read.holder: self._leaf_at(saved, read.holder, key) for read in reads}
        return assembled(name, dtype, zero1_shape(slot.spec.shape, slot.shards), reads, stubs, shape)

    def _refuse_missing_shards(self, name: str, slot: SavedSlot, shape: tuple[int, ...]) -> None:
        """Raise OptimizerMismatch for a shard of another number of ranks, in a tag without a manifest."""
        whole = slot.likely_shape
        shards = self._shards(slot)
        if 0 < len(shape) == len(whole):
            raise OptimizerMismatch(
                f"{self._context.opened.where}: {name} has shape {shape}, expected {zero1_shape(whole, shards)}, a "
                f"shard of {whole} over {shards} ranks; files of ranks are missing, or of two saves"
            )

    def is_shaped_like(self, slot: SavedSlot, shape: tuple[int, ...]) -> bool:
        """True if a saved entry of ``shape`` is cut as its parameter was."""
        return shape == zero1_shape(slot.likely_shape, self._shards(slot))

    def holds_whole(self, slot: SavedSlot) -> bool:
        """True if one saving rank held all of the parameter's state, so that any shape of it is whole."""
        return (self._context.saved.tp, self._context.saved.ep, self._shards(slot)) == (1, 1, 1)

    def _reads(
        self, slot: OptimizerSlot, saved: _SavedParameter, whole: tuple[int, ...]
    ) -> list[Read[CutIndex]]:
        """Return the reads for entries that are shaped like the parameter; ``whole`` is its shape on a saving rank."""
        return self._context.reads(
            f"optim/{slot.name}",
            self._context.saved_spec(slot.name, slot.spec, whole),
            slot.spec,
            saved_shards=self._shards(saved.slot),
            shards=slot.shards,
            shard=slot.shard,
        )

    def _holders_of(self, slot: OptimizerSlot, saved: _SavedParameter) -> list[_Holder]:
        """Return the ranks that saved parts or copies of the parameter, of those that this rank compares.

        These are the first one, those at its place, so that all ranks together compare all, and one of each stage.
        """
        sizes = self._context.saved
        live = self._context.live
        shards = self._shards(saved.slot)
        key = saved.pp_rank, saved.name, slot.shards, slot.shard
        if key not in self._holders:
            numbers = [
                _overlapping(sizes.tp, live.tp, live.tp_rank, live.tp_rank if sizes.tp == live.tp else 0),
                _overlapping(sizes.ep, live.ep, live.ep_rank, live.ep_rank if sizes.ep == live.ep else 0),
                _overlapping(shards, slot.shards, slot.shard, 0),
            ]
            places = [CutIndex(*place) for place in product(*numbers)]
            place_by_rank = {self._at(saved, place): place for place in places}
            place_by_rank |= {self._at(replace(saved, pp_rank=stage), places[0]): places[0] for stage in self.stages}
            nothing = replace(saved.slot, entries={}, master=None)
            holders: list[_Holder] = []
            for at, place in place_by_rank.items():
                optimizer = self._saved_by(at)
                if at.pp_rank == saved.pp_rank or saved.name in optimizer.slots:
                    holders.append(_Holder(at, place, optimizer, optimizer.slots.get(saved.name, nothing)))
            self._holders[key] = holders
        return self._holders[key]

    def _refuse_other_entry(self, slot: OptimizerSlot, saved: _SavedParameter, key: str) -> None:
        holders = self._holders_of(slot, saved)
        if len(holders) > 1:
            spec = self._context.saved_spec(slot.name, slot.spec, saved.slot.likely_shape)
            values = ((self._part(own, spec, key), own.slot.state.get(key)) for own in holders)
            self._refuse_other_values(f"optim/{slot.name}/{key}", values)

    def _part(self, holder: _Holder, spec: ParameterSpec, key: str) -> Any:
        """Return what the holder's entry is, equal for holders that have it alike; None if that is not known."""
        value = holder.slot.state.get(key)
        place = holder.place
        if key == STEP or not is_tensor(value) or not self.is_shaped_like(holder.slot, form_of(value)[1]):
            return key
        pieces = spec.partition.pieces(spec.shape, place.tp_rank, self._context.saved.tp, place.ep_rank)
        return pieces and (pieces, place.shard)

    def _refuse_differences(
        self, slot: OptimizerSlot, saved: _SavedParameter, ignores: Covers = _covers_nothing
    ) -> None:
        """Raise IncompatibleState if ranks saved other kinds of state than the reference rank, options or values."""
        holders = self._holders_of(slot, saved)
        for holder in holders:
            if holder.slot.shape != saved.slot.shape:
                raise IncompatibleState(
                    f"{self._context.opened.where}: the rank at {holder.at} saved {saved.name!r} with shape "
                    f"{holder.slot.shape}, others with {saved.slot.shape}. The files are from two saves; load another "
                    "tag"
                )
            for key in sorted(holder.slot.filled ^ saved.slot.filled):
                if not ignores(f"optim/{slot.name}/{key}"):
                    at = holder.at if key in saved.slot.filled else self._context.near(saved.pp_rank)
                    raise self._saved_by_some(saved, key, at)
        group = saved.pp_rank, saved.slot.group, saved.slot.expert
        if len(holders) < 2 or (group in self._compared and len(self.stages) == 1):
            return
        self._compared.add(group)
        listed = [self._values_of(holder, saved.slot.group, ignores) for holder in holders]
        for name in dict.fromkeys(name for values in listed for name in values):
            self._refuse_other_values(name, ((name, values.get(name, Ellipsis)) for values in listed))

    def _values_of(self, holder: _Holder, group: int, ignores: Covers) -> dict[str, Any]:
        """Return the options of a holder's group, called ``group``, and what belongs to no parameter, by name."""
        options = {} if ignores(PARAM_GROUPS) else holder.slot.options
        values = {f"{PARAM_GROUPS}/{group}/{key}": value for key, value in options.items()}
        values |= {f"optim/{key}": value for key, value in holder.optimizer.own.items()}
        general = {f"optim/state/{key}": value for key, value in holder.optimizer.general.items()}
        return values | {name: value for name, value in general.items() if not ignores(name)}

    def _refuse_other_values(self, name: str, values: Iterable[tuple[Any, Any]]) -> None:
        """Raise IncompatibleState if two ranks have other values of the same part."""
        first: dict[Any, Any] = {}
        for part, value in values:
            digest = _digest(value)
            if None not in (part, digest) and first.setdefault(part, digest) != digest:
                sizes = self._context.saved.describe()
                live = self._context.live.describe()
                mixed = "files of two saves are mixed, or " if self._context.opened.manifest is None else ""
                raise IncompatibleState(
                    f"{self._context.opened.where}: {name} differed between the ranks that saved it ({sizes}), and "
                    f"{mixed}nothing tells whose this job ({live}) takes. {how_to_leave_out([name])}"
                )

    def _refuse_unequal_replicas(self, name: str, spec: ParameterSpec, saved: _SavedParameter, key: str) -> None:
        """Raise TopologyMismatch if ranks that should be replicas differ; compares weights where the tag has them."""
        suspects = self._context.suspects(saved.name, spec)
        if not suspects:  # as when only dp changes: the model's files are not even opened
            return
        has_weights = saved.pp_rank in self._model.stages.get(saved.name, ())
        if has_weights and saved.name not in self._compared:
            self._model.refuse_unequal_replicas(saved.name, saved.pp_rank, spec)
            self._compared.add(saved.name)
        for place, equal, attribute in suspects:
            if saved.slot.expert and place.ep_rank:  # weights cannot show it if they are in no file
                raise TopologyMismatch(
                    f"{name}: expected to be equal on all ranks, but the optimizer has it among the experts. The "
                    f"parameter's attributes were lost; pass partitions= with its {attribute}"
                )
            # With ZeRO-1 each rank has a shard of its own, no replica.
            if has_weights or not equal or (self._context.is_sharded and place.ep_rank):
                continue
            pair = [self._leaf_at(saved, at, key) for at in (CutIndex(), place)]
            digests = {leaf.storage.crc32 for leaf in pair if isinstance(leaf, TensorStub)}
            if len(digests) == 2 and None not in digests:
                raise TopologyMismatch(
                    f"{name}: expected to be equal on all ranks, but rank (tp {place.tp_rank}, ep {place.ep_rank}) "
                    f"saved other values than rank 0. Its attributes were lost; pass partitions= with its {attribute}"
                )

    def _refuse_shared(self, slots: Sequence[OptimizerSlot], matches: Sequence[_SavedParameter | None]) -> None:
        """Raise OptimizerMismatch if two live parameters would take the state of a single one."""
        first: dict[tuple[int, str], str] = {}
        for slot, saved in zip(slots, matches, strict=True):
            if saved is None:
                continue
            owner = first.setdefault((saved.pp_rank, saved.name), slot.name)
            if owner != slot.name:
                raise OptimizerMismatch(
                    f"optimizer: {owner!r} and {slot.name!r} were one tied parameter when {self._context.opened.where} "
                    "was saved, but are two parameters now; tie them, or load with optimizer=None"
                )

    def _leaf_at(self, saved: _SavedParameter, place: CutIndex, key: str) -> Any:
        at = self._at(saved, place)
        slot = self._saved_by(at).slots.get(saved.name)
        leaf = None if slot is None else slot.state.get(key)
        if not is_tensor(leaf):
            raise self._saved_by_some(saved, key, at)
        return leaf

    def _saved_by_some(self, saved: _SavedParameter, key: str, at: Coordinates) -> IncompatibleState:
        return IncompatibleState(
            f"{self._context.opened.where}: the rank at {at} saved no {key} for {saved.name!r}, but others did. The "
            "files are from two saves, or the parameter had a gradient on some ranks only; load another tag"
        )

    def _at(self, saved: _SavedParameter, place: CutIndex) -> Coordinates:
        """Return the coordinates of the saving rank whose file holds the cut at ``place``."""
        dp_rank = place.ep_rank
        if self._context.is_sharded:
            dp_rank = place.shard * self._context.saved.ep + place.ep_rank if saved.slot.expert else place.shard
        return Coordinates(saved.pp_rank, dp_rank, place.tp_rank)

    def _shards(self, slot: SavedSlot) -> int:
        if not self._context.is_sharded:
            return 1
        return self._context.saved.expert_dp if slot.expert else self._context.saved.dp

    def _groups(self, form: OptimizerForm, saved: Sequence[SavedSlot | None]) -> list[dict[str, Any]]:
        """Return param groups with their saved options; no options if every entry of ``saved`` is None."""
        groups = []
        begin = 0
        for number, size in enumerate(form.groups):
            own = [slot for slot in saved[begin : begin + size] if slot is not None]
            for slot in own[1:]:
                self._refuse_other_options(number, own[0], slot)
            # Experts' groups, and the parameters in them, are counted from 0 again.
            first, first_group = form.ordinary if form.ordinary and number >= form.ordinary[1] else (0, 0)
            by_number = {} if size else dict(enumerate(self.groups))  # an empty group has only its number
            options = own[0].options if own else by_number.get(number - first_group, {})
            groups.append({**options, "params": list(range(begin - first, begin - first + size))})
            begin += size
        return groups

    def _refuse_other_options(self, number: int, first: SavedSlot, other: SavedSlot) -> None:
        options = set() if first.options is other.options else {*first.options, *other.options}
        keys = sorted(key for key in options if _digest(first.options.get(key)) != _digest(other.options.get(key)))
        if keys:
            values = first.options.get(keys[0]), other.options.get(keys[0])
            raise OptimizerMismatch(
                f"optimizer: the live param group {number} holds parameters that {self._context.opened.where} has in "
                f"groups {first.group} and {other.group}, whose options differ: {', '.join(keys)} ({keys[0]} is "
                f"{values[0]!r} and {values[1]!r}). Build param_groups so that each holds parameters of one saved group"
            )

    def _find(self, names: Iterable[str]) -> dict[str, _SavedParameter]:
        """Return these parameters by name. Raises OptimizerMismatch for those that the tag lacks."""
        matches = {name: self._match(name) for name in names}
        absent = [name for name, match in matches.items() if match is None]
        if absent:
            raise OptimizerMismatch(
                f"optimizer: {self._context.opened.where} has no entry for {first_of(absent, repr)}: when it was "
                "saved, they were frozen, not passed to the optimizer, or had other names. It has "
                f"{first_of(self.slots)}; build param_groups of the same parameters. To go on with others, which then "
                f"start fresh, leave their state out with {left_out(absent)}"
            )
        return {name: match for name, match in matches.items() if match is not None}

    def _match(self, name: str) -> _SavedParameter | None:
        for pp_rank, slots in self.stages.items():
            names = [alias for alias in self._context.names(name) if alias in slots]
            if len(names) > 1:
                raise OptimizerMismatch(
                    f"optimizer: {', '.join(names)} are one tied parameter now, but each had its own state when "
                    f"{self._context.opened.where} was saved; untie them, or load with optimizer=None"
                )
            if names:
                return _SavedParameter(pp_rank, names[0], slots[names[0]])
        return None

    @cached_property
    def _references(self) -> dict[int, SavedOptimizer]:
        """The optimizer of one reference rank of each stage; empty if the tag has no optimizer."""
        stages = self._context.stages if self._context.opened.parts.optimizer is not None else ()
        return {pp_rank: self._saved_by(self._context.near(pp_rank)) for pp_rank in stages}

    def _saved_by(self, at: Coordinates) -> SavedOptimizer:
        if at not in self._saved:
            context = self._context
            opened = self._context.opened
            names = self._names.of_rank(context, at)
            tree = opened.optimizer_tree(at, names)
            if "base_state" not in tree and opened.parts.optimizer != "plain":
                raise OptimizerMismatch(
                    f"{opened.where}: only the optimizer knows how its shards were cut (it was saved with "
                    "zero1_optimizer=True, but is no ZeRO-1 optimizer); load it on the sizes that it was saved on"
                )
            if opened.manifest is None:
                refuse_numbers(tree, names, opened.where)
            prefix = self._names.prefix(context, at)
            shape = context.recorded_shape
            self._saved[at] = saved_optimizer(tree, names, prefix, shape, opened.where)
        return self._saved[at]


def _overlapping(parts: int, others: int, rank: int, first: int) -> list[int]:
    """Return ``first``, and those of equal ``parts`` of a whole that overlap the part ``rank`` of ``others``."""
    return list(dict.fromkeys((first, *range(rank * parts // others, -(-(rank + 1) * parts // others)))))


def _digest(value: Any) -> Any:
    """Return what is equal for equal values; None for a tensor without a digest."""
    return digest_of(value) if is_tensor(value) else digest_of_value(by_digest(value))
