"""Saved and live sizes of one load: ranks, cuts and parameter specifications of both sides.

The saved cut of a parameter comes from the manifest, or for tags without one from the live parameter's cut.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.reads import Cut, CutIndex, Read
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.formats.strides import dense, stride_of
from nxd_ckpt.formats.tensors import Assembly, TensorStub, digest_of
from nxd_ckpt.reshard.resharding import derived, plan_parameter, respecified
from nxd_ckpt.tag.opened import OpenTag


@dataclass(frozen=True)
class ReshardContext:
    """A tag, and the rank of another job that loads it.

    Attributes:
        opened: the tag.
        live: sizes of the loading job, and the rank in it.
        partitions: cuts of live parameters whose attributes do not describe them.
        recorded: cuts of the parameters as saved.
        aliases: all names of each tied parameter, by each of its names.
        every_stage: True to search all saved pipeline stages, also if this rank's own one stayed the same.
        experts: saved expert parameters; None if the tag does not mark them (live ones are marked only if expert
            parallelism cuts them).
        gathered: dimension and whole length of adapters of which ranks have parts, and that NxD may have gathered; see
            `model_tree`.
    """

    opened: OpenTag
    live: Topology
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    recorded: Mapping[str, ParameterSpec] = field(default_factory=dict)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    every_stage: bool = False
    experts: Collection[str] | None = None
    gathered: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    _plans: dict[Any, list[Read[CutIndex]]] = field(default_factory=dict, repr=False, compare=False)

    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        """Return the model's state dict at these saving coordinates, with that rank's parts of gathered adapters.

        NxD's ``merge_sharded_lora`` writes all ranks' parts, in order of ranks, into the file of every rank.

        Raises PartNotFound for an adapter that NxD gathered, but did not write as a whole.
        """
        tree = self.opened.model_tree(at)
        return {**tree, **dict(self._own_parts(tree, at))}

    def _own_parts(self, tree: Mapping[str, Any], at: Coordinates) -> Iterator[tuple[str, Assembly]]:
        for name, (dim, length) in self.gathered.items() if self.saved.tp > 1 else ():
            leaf = tree.get(name)
            if not isinstance(leaf, TensorStub | Assembly) or dim >= len(leaf.shape):
                continue
            if leaf.shape[dim] == length:
                part = length // self.saved.tp
                yield name, Assembly.of(leaf).within(Box.whole(leaf.shape).narrowed(dim, at.tp_rank * part, part))
            elif dim == 0:
                self._refuse_lost_rows(name, at)

    def _refuse_lost_rows(self, name: str, at: Coordinates) -> None:
        """Raise PartNotFound if ranks saved the same rows of a ``lora_B``, of which each holds others.

        Of rows that NxD gathers of attention with ``kv_size_multiplier``, it keeps one part in so many. Constant values
        prove nothing, and are right on all ranks.
        """
        ranks = (replace(at, tp_rank=tp_rank) for tp_rank in (0, self.saved.tp - 1))
        first, last = (self.opened.model_tree(rank).get(name) for rank in ranks)
        digests = digest_of(first), digest_of(last)
        if first is None or last is None or (None not in digests and digests[0] != digests[1]):
            return
        values = self.opened.read(first)
        if values.equal(self.opened.read(last)) and bool((values != values.flatten()[:1]).any()):
            raise PartNotFound(
                f"{self.opened.where}: all ranks saved the same rows of model/{name}, though each trains rows of its "
                "own. With kv_size_multiplier, NxD's merge_sharded_lora=True drops rows of the adapters that it "
                "gathers: the other ranks' are in no file. Leave the adapters of this layer out with ignore_keys=, or "
                "save them again, with merge_sharded_lora=False or with nxd_ckpt"
            )

    def seen_from(self, live: Topology) -> ReshardContext:
        """Return this context for another rank."""
        return replace(self, live=live, _plans={})

    @property
    def saved(self) -> Topology:
        return self.opened.topology

    @property
    def stages(self) -> Sequence[int]:
        """Saved pipeline stages that may have this rank's names: only its own, if stages stayed the same."""
        own = self.saved.pp == self.live.pp and not self.every_stage
        return [self.live.pp_rank] if own else range(self.saved.pp)

    @property
    def holds_all(self) -> bool:
        """True if this rank's stage holds every name of `stages`."""
        return self.live.pp == 1 or (self.saved.pp == self.live.pp and not self.every_stage)

    def near(self, pp_rank: int) -> Coordinates:
        """Return the reference rank of a stage: the rank at this rank's place, where sizes are the same."""
        saved = self.saved
        live = self.live
        ep_rank = live.ep_rank if saved.ep == live.ep else 0
        return Coordinates(pp_rank, ep_rank, live.tp_rank if saved.tp == live.tp else 0)

    @property
    def is_sharded(self) -> bool:
        """True if each data-parallel rank saved shards of the optimizer's state."""
        return self.opened.parts.optimizer in ("zero1", "zero1_dcp")

    @cached_property
    def _is_cut_alike(self) -> bool:
        return self.saved_cut == self.live_cut

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
        """Return the name, then the other names of the parameter, live or saved."""
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
        """Return whether the tag marks it as an expert's parameter."""
        return not set(self.names(name)).isdisjoint(self.experts or ())

    def live_spec(self, name: str, spec: ParameterSpec) -> ParameterSpec:
        """Return the live parameter's specification, with the caller's partition if there is one."""
        if not self.partitions:
            return spec
        cut = next((self.partitions[alias] for alias in self.names(name) if alias in self.partitions), None)
        return spec if cut is None else replace(spec, partition=cut, explicit=True)

    def is_as_saved(self, name: str, live: ParameterSpec | None) -> bool:
        """Return whether this rank holds the boxes of the parameter that the rank of its coordinates saved.

        If two known cuts are of different wholes, the attributes of one side are wrong, and the boxes are equal.
        """
        if not self._is_cut_alike:
            return False
        recorded = self.recorded.get(name)
        if live is None or recorded is None or recorded.partition == live.partition:
            return True
        sides = [side for side in (recorded, live) if side.partition.known]
        wholes = {side.partition.global_shape(side.shape, self.live.ep) for side in sides}
        cuts = {side.partition for side in sides if not side.partition.replicated_over_tp}
        return len(cuts) < 2 or len(wholes) > 1

    def saved_spec(self, name: str, live: ParameterSpec, shape: tuple[int, ...]) -> ParameterSpec:
        """Return the parameter as saving ranks held it, with ``shape``; cut as recorded, otherwise as the live one."""
        recorded = self._recorded(name)
        explicit = self._is_live_explicit(name, live)
        if recorded is not None and self._is_credible(name, replace(recorded, shape=shape), live):
            return replace(recorded, shape=shape, explicit=recorded.explicit or explicit)
        if self.is_expert(name):
            live = replace(live, partition=replace(live.partition, expert=True))
        if self.saved.tp == self.live.tp:
            return ParameterSpec(live.dtype, shape, live.partition, live.trainable, explicit=explicit)
        return replace(derived(name, shape, self.saved_cut, live, self.live_cut), explicit=explicit)

    def _is_live_explicit(self, name: str, live: ParameterSpec) -> bool:
        """Return whether the caller or the live parameter's attributes give its cut.

        Attributes of keys and values count only at the save, which looks at the attention's module: NxD's attributes
        count as many parts as ranks even if ranks share them.
        """
        names = self.names(name)
        if any(alias in self.partitions for alias in names):
            return True
        return live.explicit and not any(_KEY_OR_VALUE.search(alias) for alias in names)

    def as_recorded(self, name: str, dtype: str, shape: tuple[int, ...], *, expert: bool = False) -> ParameterSpec:
        """Return the parameter, of ``shape`` on each saving rank, as this rank holds it by what was recorded.

        Raises TopologyMismatch if the sizes do not divide it, or its saved cut is not known.
        """
        recorded = self.recorded.get(name)
        if recorded is None:
            recorded = ParameterSpec(dtype, shape, Partition(expert=expert, known=False))
        return respecified(name, replace(recorded, shape=shape), self.saved_cut, self.live_cut)

    def recorded_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the recorded shape of the parameter on each saving rank; None if there is none."""
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
        """Return this rank's reads for a tensor shaped like the parameter and cut by ZeRO-1 as given."""
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
        """Return ranks to compare with the first: (rank, True if it should be equal, the attribute for partitions=).

        Attributes get lost, and then a parameter counts as replicated. (The commit of a tag of ours compared
        tensor-parallel ranks.) If ranks hold equal parts of a parameter with as many partitions as ranks, it may be a
        key or value of grouped-query attention, with fewer partitions. An explicit cut is trusted: untrained biases, or
        one seed on all ranks, make ranks equal too.
        """
        sizes = self.saved
        live = self.live
        partition = saved.partition
        pairs: list[tuple[CutIndex, bool, str]] = []
        if sizes.ep > 1 and (sizes.ep, sizes.tp) != (live.ep, live.tp) and not partition.expert:
            pairs.append((CutIndex(ep_rank=1), True, "expert=True"))
        if sizes.tp == 1 or sizes.tp == live.tp:
            return pairs
        guessed = self._is_guessed(name, partition)
        if partition.replicated_over_tp and guessed:
            pairs += [(CutIndex(tp_rank), True, "partition_dim") for tp_rank in sorted({1, sizes.tp - 1})]
        elif 1 < partition.num_partitions < sizes.tp and guessed:
            pairs.append((CutIndex(partition.num_partitions), True, "rank_ordering"))
        elif partition.num_partitions == sizes.tp and not (partition.expert or saved.explicit or prod(saved.shape) < 2):
            # On Trn1 ranks r and r + parts share one, on Trn2 neighbours.
            parts = [parts for parts in range(1, sizes.tp) if sizes.tp % parts == 0]
            pairs += [(CutIndex(tp_rank), False, "num_partitions") for tp_rank in parts]
        return pairs

    def _is_guessed(self, name: str, partition: Partition) -> bool:
        """Return whether this cut is a guess: none was recorded, or the save recorded another one."""
        if self._recorded(name) is None:
            return True
        manifest = self.opened.manifest
        saved = [] if manifest is None else [manifest.parameters.get(alias) for alias in self.names(name)]
        return any(spec is not None and spec.partition.known and spec.partition != partition for spec in saved)

    def _is_credible(self, name: str, recorded: ParameterSpec, live: ParameterSpec) -> bool:
        """Return whether the recorded cut is to be used.

        If the whole shapes differ, the caller's cut wins over it; so do the live parameter's attributes, if the save
        recorded none.
        """
        is_given = any(alias in self.partitions for alias in self.names(name))
        if not is_given and (_is_explicit(recorded.partition) or not _is_explicit(live.partition)):
            return True
        sides = ((recorded, self.saved.ep), (live, self.live.ep))
        wholes = [spec.partition.global_shape(spec.shape, ep) for spec, ep in sides]
        return recorded.partition.known and wholes[0] == wholes[1]


_KEY_OR_VALUE = re.compile(r"(^|[._])(q?kv|[kv]|key|value)([._]|_?proj|$)|query_key_value|weight_[kv]|bias_[kv]")
"""Usual names of keys and values, which grouped-query attention shares between tensor-parallel ranks."""


def _is_explicit(partition: Partition) -> bool:
    """Return whether attributes describe the cut; a parameter without any counts as replicated."""
    return partition.known and (partition.partition_dim is not None or partition.expert)


def assembled(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    reads: Sequence[Read[CutIndex]],
    stubs: Mapping[CutIndex, TensorStub | Assembly],
    expected: tuple[int, ...],
) -> TensorStub | Assembly:
    """Assemble the tensor of ``shape`` from ``reads``; return a whole saved tensor unchanged.

    ``expected`` is the shape of the holders' tensors. Raises MalformedFile if one has another shape or dtype.
    """
    for stub in stubs.values():
        if (stub.dtype, stub.shape) != (dtype, expected):
            files = ", ".join(sorted({fragment.stub.file for fragment in Assembly.of(stub).fragments}))
            raise MalformedFile(
                f"{name}: {files} holds {stub.dtype} {stub.shape}, expected {dtype} {expected} by the other "
                "ranks' files and the sizes; the tag mixes files of two saves, or of two conversions"
            )
    if len(reads) == 1 and reads[0].source == reads[0].target == Box.whole(shape):
        stub = stubs[reads[0].holder]
        if stub.shape == shape:
            return stub
    parts = ((read, Assembly.of(stubs[read.holder]).within(read.source)) for read in reads)
    fragments = tuple(fragment.moved(read.target.offset) for read, part in parts for fragment in part.fragments)
    # With another shape, only the order of dimensions remains of the strides.
    stride = next((stride for stub in stubs.values() if (stride := stride_of(stub)) is not None), None)
    return Assembly(dtype, shape, fragments, stride and stride._replace(steps=dense(stride.steps, shape)))
