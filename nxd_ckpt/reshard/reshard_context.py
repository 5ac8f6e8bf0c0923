"""From the sizes that a tag was saved on to those that it is loaded on: places, cuts and specifications of both sides.

How a parameter was cut comes from the manifest, for tags without one from how the live parameter is cut.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.reads import Cut, CutIndex, Read
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.strides import dense, stride_of
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub
from nxd_ckpt.live.lora_names import is_key_or_value
from nxd_ckpt.reshard.resharding import derived, plan_parameter, respecified
from nxd_ckpt.tag.opened import OpenTag


@dataclass(frozen=True)
class ReshardContext:
    """The tag ``opened``, for the rank that ``live`` is seen from.

    ``partitions`` say how live parameters are cut where their attributes do not, ``recorded`` how they were saved.
    ``aliases`` are all names of each tied parameter, by any of them. ``every_stage`` looks through all saved pipeline
    stages, also where this rank's own one stayed the same. ``experts`` are the saved expert parameters, None if the tag
    does not mark them: live ones are marked only where expert parallelism cuts them. ``gathered``
    are the live adapters that a tag of NxD may hold whole in each file.
    """

    opened: OpenTag
    live: Topology
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    recorded: Mapping[str, ParameterSpec] = field(default_factory=dict)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    every_stage: bool = False
    experts: Collection[str] | None = None
    gathered: Mapping[str, ParameterSpec] = field(default_factory=dict)
    _plans: dict[Any, list[Read[CutIndex]]] = field(default_factory=dict, repr=False, compare=False)

    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        """The model's state dict at these saving coordinates, adapters as that rank held them.

        NxD's ``merge_sharded_lora`` writes each rank's rows, one rank after the other, into the files of all ranks; of
        keys and values of which ranks keep copies, the copies too.
        """
        tree, tp = self.opened.model_tree(at), self.saved.tp
        return {**tree, **{name: part for name, part in self._own_parts(tree, at.tp_rank, tp) if tp > 1}}

    def _own_parts(self, tree: Mapping[str, Any], tp_rank: int, tp: int) -> Iterator[tuple[str, Assembly]]:
        for name, spec in self.gathered.items():
            leaf, dim = tree.get(name), spec.partition.partition_dim
            has_copies = is_key_or_value(name)
            dim = 0 if dim is None and has_copies else dim
            if dim is None or not spec.partition.known or not isinstance(leaf, TensorStub | Assembly):
                continue
            whole = spec.partition.global_shape(spec.shape, self.live.ep)
            copies = leaf.shape[dim] // max(whole[dim], 1) if has_copies and len(leaf.shape) == len(whole) else 1
            gathered = tuple(size * copies if at == dim else size for at, size in enumerate(whole))
            is_one_rank = copies == 1 and spec.partition.partition_dim is None
            if leaf.shape == gathered and gathered[dim] % tp == 0 and not is_one_rank:
                part = tuple(size // tp if at == dim else size for at, size in enumerate(gathered))
                offset = tuple(tp_rank * size if at == dim else 0 for at, size in enumerate(part))
                yield name, Assembly.of(leaf).within(Box(offset, part))

    def seen_from(self, live: Topology) -> ReshardContext:
        """The same for another rank."""
        return replace(self, live=live, _plans={})

    @property
    def saved(self) -> Topology:
        return self.opened.topology

    @property
    def stages(self) -> Sequence[int]:
        """The saved pipeline stages where this rank's names may be: its own, where stages stayed the same."""
        own = self.saved.pp == self.live.pp and not self.every_stage
        return [self.live.pp_rank] if own else range(self.saved.pp)

    @property
    def holds_all(self) -> bool:
        """Whether this rank's stage holds every name of :attr:`stages`."""
        return self.live.pp == 1 or (self.saved.pp == self.live.pp and not self.every_stage)

    def near(self, pp_rank: int) -> Coordinates:
        """A saving rank of that stage that tells what any does: where sizes are the same, the one of this place."""
        saved, live = self.saved, self.live
        ep_rank = live.ep_rank if saved.ep == live.ep else 0
        return Coordinates(pp_rank, ep_rank, live.tp_rank if saved.tp == live.tp else 0)

    @property
    def is_sharded(self) -> bool:
        """Whether each data-parallel rank saved shards of the optimizer's state."""
        return self.opened.parts.optimizer in ("zero1", "zero1_dcp")

    @property
    def saved_cut(self) -> Cut:
        return Cut(self.saved.tp, self.saved.ep)

    @property
    def live_cut(self) -> Cut:
        return Cut(self.live.tp, self.live.ep)

    @property
    def place(self) -> CutIndex:
        return CutIndex(self.live.tp_rank, self.live.ep_rank)

    def names(self, name: str) -> tuple[str, ...]:
        """The name, then the others of the same parameter, live or when it was saved."""
        recorded = self.recorded.get(name)
        tied = [] if recorded is None or recorded.tie is None else self._saved_ties[recorded.tie]
        return tuple(dict.fromkeys((name, *self.aliases.get(name, ()), *tied)))

    @cached_property
    def _saved_ties(self) -> dict[str, list[str]]:
        ties: dict[str, list[str]] = {}
        for name, spec in self.recorded.items():
            if spec.tie is not None:
                ties.setdefault(spec.tie, []).append(name)
        return ties

    def is_expert(self, name: str) -> bool:
        """Whether the tag marks it as an expert's parameter."""
        return not set(self.names(name)).isdisjoint(self.experts or ())

    def live_spec(self, name: str, spec: ParameterSpec) -> ParameterSpec:
        """The live parameter's specification, with the partition that the caller gave for it."""
        if not self.partitions:
            return spec
        given = next((self.partitions[alias] for alias in self.names(name) if alias in self.partitions), None)
        return spec if given is None else replace(spec, partition=given, explicit=True)

    def saved_spec(self, name: str, live: ParameterSpec, shape: tuple[int, ...]) -> ParameterSpec:
        """The parameter as saving ranks held it, with ``shape``; cut as recorded, else as the live one is."""
        recorded, explicit = self._recorded(name), self._is_said(name, live)
        if recorded is not None and self._is_credible(name, replace(recorded, shape=shape), live):
            return replace(recorded, shape=shape, explicit=recorded.explicit or explicit)
        if self.is_expert(name):
            live = replace(live, partition=replace(live.partition, expert=True))
        if self.saved.tp == self.live.tp:
            return ParameterSpec(live.dtype, shape, live.partition, live.trainable, explicit=explicit)
        return replace(derived(name, shape, self.saved_cut, live, self.live_cut), explicit=explicit)

    def _is_said(self, name: str, live: ParameterSpec) -> bool:
        """True where the live side says how the parameter is cut: the caller, or attributes.

        Attributes of keys and values count only at the save, which looks at the attention's module: NxD's say as many
        parts as ranks where ranks share them.
        """
        names = self.names(name)
        if any(alias in self.partitions for alias in names):
            return True
        return live.explicit and not any(_KEY_OR_VALUE.search(alias) for alias in names)

    def as_recorded(self, name: str, dtype: str, shape: tuple[int, ...], *, expert: bool = False) -> ParameterSpec:
        """The parameter, of ``shape`` on each saving rank, as this rank holds it if nothing live says how.

        Raises TopologyMismatch where the sizes do not divide it, or how it was cut is not known.
        """
        recorded = self.recorded.get(name)
        if recorded is None:
            recorded = ParameterSpec(dtype, shape, Partition(expert=expert, known=False))
        return respecified(name, replace(recorded, shape=shape), self.saved_cut, self.live_cut)

    def recorded_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape that the parameter had on each saving rank, if that is recorded."""
        recorded = self._recorded(name)
        return None if recorded is None else recorded.shape

    def _recorded(self, name: str) -> ParameterSpec | None:
        return next((self.recorded[alias] for alias in self.names(name) if alias in self.recorded), None)

    def reads(
        self,
        name: str,
        saved: ParameterSpec,
        live: ParameterSpec,
        *,
        saved_shards: int = 1,
        shards: int = 1,
        shard: int = 0,
    ) -> list[Read[CutIndex]]:
        """What this rank copies from where, of a tensor shaped like the parameter and cut by ZeRO-1 as given."""
        terms = (saved.shape, saved.partition, live.shape, live.partition, saved_shards, shards, shard)
        if terms not in self._plans:  # a model has many parameters, of few forms
            self._plans[terms] = plan_parameter(
                name,
                saved,
                replace(self.saved_cut, shards=saved_shards),
                live,
                replace(self.live_cut, shards=shards),
                replace(self.place, shard=shard),
            )
        return self._plans[terms]

    def suspects(self, name: str, saved: ParameterSpec) -> list[tuple[CutIndex, bool, str]]:
        """Places to be compared with the first one: (place, whether it should be equal, what partitions= would say).

        Attributes get lost, and then a parameter counts as replicated. The commit has compared tags of ours over
        tensor-parallel ranks. A parameter with as many partitions as ranks that some of them hold alike may be a key or
        value of grouped-query attention, of which there are fewer. An explicit cut is believed: biases that are not
        trained, or one seed on all ranks, make ranks alike, too.
        """
        sizes, live, partition = self.saved, self.live, saved.partition
        found: list[tuple[CutIndex, bool, str]] = []
        if sizes.ep > 1 and (sizes.ep, sizes.tp) != (live.ep, live.tp) and not partition.expert:
            found.append((CutIndex(ep_rank=1), True, "expert=True"))
        if sizes.tp == 1 or sizes.tp == live.tp:
            return found
        guessed = self._is_guessed(name, partition)
        if partition.replicated_over_tp and guessed:
            found += [(CutIndex(tp_rank), True, "partition_dim") for tp_rank in sorted({1, sizes.tp - 1})]
        elif 1 < partition.num_partitions < sizes.tp and guessed:
            found.append((CutIndex(partition.num_partitions), True, "rank_ordering"))
        elif partition.num_partitions == sizes.tp and not (partition.expert or saved.explicit or prod(saved.shape) < 2):
            # On Trn1 ranks r and r + parts share one, on Trn2 neighbours.
            parts = [parts for parts in range(1, sizes.tp) if sizes.tp % parts == 0]
            found += [(CutIndex(tp_rank), False, "num_partitions") for tp_rank in parts]
        return found

    def _is_guessed(self, name: str, partition: Partition) -> bool:
        """True where nothing recorded this cut, or the save another one; the caller may say what is not known."""
        if self._recorded(name) is None:
            return True
        manifest = self.opened.manifest
        saved = [] if manifest is None else [manifest.parameters.get(alias) for alias in self.names(name)]
        return any(spec is not None and spec.partition.known and spec.partition != partition for spec in saved)

    def _is_credible(self, name: str, recorded: ParameterSpec, live: ParameterSpec) -> bool:
        """Whether what was recorded stands: against another whole, a cut that the caller gives counts more, and against
        no attributes at all those of the live parameter."""
        given = any(alias in self.partitions for alias in self.names(name))
        if not given and (_is_explicit(recorded.partition) or not _is_explicit(live.partition)):
            return True
        sides = ((recorded, self.saved.ep), (live, self.live.ep))
        wholes = [spec.partition.global_shape(spec.shape, ep) for spec, ep in sides]
        return recorded.partition.known and wholes[0] == wholes[1]


_KEY_OR_VALUE = re.compile(r"(^|[._])(q?kv|[kv]|key|value)([._]|_?proj|$)|query_key_value|weight_[kv]|bias_[kv]")
"""Usual names of what grouped-query attention shares between tensor-parallel ranks."""


def _is_explicit(partition: Partition) -> bool:
    """Whether attributes say how it is cut: without any it counts as replicated."""
    return partition.known and (partition.partition_dim is not None or partition.expert)


def assembled(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    reads: Sequence[Read[CutIndex]],
    stubs: Mapping[CutIndex, TensorStub | Assembly],
    expected: tuple[int, ...],
) -> TensorStub | Assembly:
    """The tensor of ``shape`` made of ``reads``; a whole saved one as it is.

    Holders' tensors have the shape ``expected``. Raises MalformedFile where one has another shape or dtype than the
    sizes and the other ranks' files say.
    """
    for stub in stubs.values():
        if (stub.dtype, stub.shape) != (dtype, expected):
            raise MalformedFile(
                f"{name}: {_files_of(stub)} holds {stub.dtype} {stub.shape}, expected {dtype} {expected} as the other "
                "ranks' files and sizes say; the tag mixes files of two saves, or of two conversions"
            )
    if len(reads) == 1 and reads[0].source == reads[0].target == Box.whole(shape):
        stub = stubs[reads[0].holder]
        if stub.shape == shape:
            return stub
    fragments = tuple(chain.from_iterable(_fragments(stubs[read.holder], read) for read in reads))
    # Of other sizes, the order of dimensions is what is left of the strides.
    stride = next((stride for stub in stubs.values() if (stride := stride_of(stub)) is not None), None)
    return Assembly(dtype, shape, fragments, stride and stride._replace(steps=dense(stride.steps, shape)))


def _fragments(held: TensorStub | Assembly, read: Read[CutIndex]) -> Iterator[Fragment]:
    """What is copied from one holder's tensor, which may itself be put together."""
    if isinstance(held, TensorStub):
        yield Fragment(held, read.source, read.target)
        return
    for fragment in held.within(read.source).fragments:
        yield fragment.moved(read.target.offset)


def _files_of(held: TensorStub | Assembly) -> str:
    return ", ".join(sorted({fragment.stub.file for fragment in Assembly.of(held).fragments}))
