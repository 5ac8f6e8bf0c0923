"""Replication as a claim that every save checks: what several ranks hold, and one of them writes for all.

Each rank votes a digest of everything that it holds in common with others (core.votes.Claim). If a digest is not that
of the rank that writes, rank 0 appeals: who wrote tells its digests one by one, the others compare, and save what
differs for themselves, in a file of their own. From then on all ranks know these names, and save them so at once.

Who writes knows its digests: they are in its index. The others stage what they hold, as if they wrote it: small tensors
and, in the first two saves of a structure, all; later samples of large ones. So an appeal finds it in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core import names
from nxd_ckpt.core.name_patterns import OPTIMIZER
from nxd_ckpt.core.votes import REPLICAS_ALIKE, SAMPLES, VALUES, WHOLE, Claim
from nxd_ckpt.errors import RanksDisagree
from nxd_ckpt.formats.crc32 import block_crcs, crc32, digest_of_value
from nxd_ckpt.formats.memory import allocated, byte_view, torch_dtype
from nxd_ckpt.formats.strides import Stride, stride_in_content, with_note
from nxd_ckpt.formats.tensors import Path, TensorReference, children_of, form_of, iter_tensors, map_tensors, nbytes_of
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.live.dtensor import PLAIN
from nxd_ckpt.live.state_names import Container, groups_of, is_below, is_in, values_in
from nxd_ckpt.saving.planned_file import NamedTensor, PlannedFile, Wave
from nxd_ckpt.tag.per_rank import Gone, OwnState, OwnValue

LARGE = 2**20
"""Bytes from which on samples of a tensor are compared."""

_SAMPLE = 2**12
"""Bytes of each of the three samples of a large tensor."""


class Replica(NamedTuple):
    """A tensor that several ranks hold.

    It is the tensor ``number`` of the tree of a ``part``; the rank ``writes`` writes it for all that hold the same of
    ``what``. ``place`` is the number of a planned file and of a storage, if this rank writes it. ``mesh`` describes the
    placement of a DTensor. ``form``, ``nbytes`` and ``stride`` are known here, because the writer's thread must not ask
    a tensor on a device, which training changes meanwhile.
    """

    part: str
    number: int
    name: str
    form: tuple[str, tuple[int, ...]]
    nbytes: int
    writes: int
    what: str
    place: tuple[int, int] | None = None
    mesh: str | None = None
    stride: Stride | None = None

    @staticmethod
    def of(
        part: str, number: int, name: str, leaf: Any, writes: int, what: str, place: tuple[int, int] | None = None,
        mesh: str | None = None,
    ) -> Replica:
        """Return that of a live tensor, or its stand-in."""
        form = form_of(leaf)
        return Replica(part, number, name, form, nbytes_of(*form), writes, what, place, mesh, stride_in_content(leaf))

    def claim(self, how: str) -> str:
        return Claim(self.writes, self.what, how).key

    def is_kept(self, names: Collection[str]) -> bool:
        """Return whether a rank has it for itself, if it has what has these ``names``. DTensors are no part of others.
        """
        return is_below(self.name, names) if self.mesh is None else self.name in names


@dataclass(frozen=True)
class Values:
    """Everything in the tree of a ``part`` that is no tensor. ``tree`` must not change any more.

    ``known`` are names of what ranks save for themselves. ``copies`` describe the ``tensors`` of the part, by their
    numbers. ``pickled`` are all values, None if they are not known, and ``form`` is that of the tree around them.
    ``on_mesh``: the files of a mesh have its tensors of which no other rank has a copy.
    """

    part: str
    writes: int
    tree: Any = field(repr=False)
    parameters: Sequence[str] | None
    known: set[str]
    tensors: Sequence[torch.Tensor] = field(default=(), repr=False)
    copies: Sequence[Replica] = field(default=(), repr=False)
    pickled: bytes | None = None
    form: Any = None
    on_mesh: bool = False

    @property
    def claim(self) -> str:
        return Claim(self.writes, f"{self.part}{VALUES}", WHOLE).key

    @cached_property
    def by_name(self) -> dict[str, tuple[Path, Any]]:
        return {name: (path, value) for name, path, value in values_in(self.part, self.tree, self.parameters)}

    @cached_property
    def digests(self) -> dict[str, int]:
        """Digest of each value, by name, except the ``known``."""
        values = ((name, value) for name, (_, value) in self.by_name.items() if not is_below(name, self.known))
        return {name: digest_of_value(self._about(value)) for name, value in values}

    @cached_property
    def _groups(self) -> Any:
        """An optimizer's parameters, and which of them are in one group."""
        return sorted(groups_of(self.tree, self.parameters).items()) if self.part == "optimizer" else None

    def is_plain(self, container: Container) -> bool:
        """Return whether the container has only tensors that other ranks may have in another form, or not."""
        return all(id(tensor) in self._forms for _, tensor in iter_tensors(container.tree, torch.Tensor))

    def kept(self, tree: Any, own_value: Callable[[Any], Any]) -> Any:
        """Return the tree with the ``own_value`` of each tensor, and a reference for a DTensor, by its number."""
        shards = dict.fromkeys(id(one) for one in self.tensors if id(one) not in self._forms)
        references = {shard: TensorReference(number) for number, shard in enumerate(shards)}
        return map_tensors(tree, lambda one: references[id(one)] if id(one) in references else own_value(one))

    def _about(self, value: Any) -> Any:
        """Return plain data; of a container the forms of its tensors, and its keys if these have no names."""
        if not isinstance(value, Container):
            return value
        if value.tree is self.tree and self.part in ("model", "optimizer"):
            return self._groups or bool(self.tensors)
        if self.part == "optimizer":
            return [(path, self._forms.get(id(leaf))) for path, leaf in iter_tensors(value.tree, torch.Tensor)]
        return type(value.tree).__name__, [(key, self._forms.get(id(leaf))) for key, leaf in children_of(value.tree)]

    @cached_property
    def _forms(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        """The forms of the tensors, by their ids, except those of DTensors: ranks of a mesh may have other shapes."""
        plain = (copy for copy in self.copies if copy.part == self.part and copy.mesh is None)
        return {id(self.tensors[copy.number]): copy.form for copy in plain}

    @cached_property
    def digest(self) -> int:
        """Digest of all of them."""
        if self.pickled is not None and not self.known:
            return crc32(repr((self.form, crc32(self.pickled), self._groups)).encode())
        return crc32(repr(sorted(self.digests.items())).encode())


class Own(OwnState):
    """State that this rank saves for itself."""

    def keep_values(
        self, values: Values, names: Iterable[str], own_value: Callable[[Any], Any] = lambda tensor: tensor
    ) -> None:
        """Keep the values of these names, also that some are not there; of containers the ``own_value`` of tensors.

        A container with tensors that all ranks have stays: those that differ are kept one by one. All of an optimizer
        is kept with references to its DTensors, which are in the files of the mesh.

        Raises RanksDisagree if one of the ranks has no model, or ranks put shards of ZeRO-1 in other param groups.
        """
        kept = set[str]()
        for name in names:  # that of a container comes before those in it
            if is_below(name, kept):
                continue
            if name == "model":
                here, there = ("tensors", "none") if values.tensors else ("no tensors", "some")
                raise RanksDisagree(
                    f"the model has {here} on this rank, and {there} on rank {values.writes}; {REPLICAS_ALIKE}"
                )
            if name not in values.by_name:
                kept.add(name)
                self.values[name] = OwnValue(Gone.ABSENT)
                continue
            path, value = values.by_name[name]
            if isinstance(value, Container) and not values.is_plain(value):
                if name != OPTIMIZER:
                    continue
                if not values.on_mesh:
                    raise RanksDisagree(
                        f"the ZeRO-1 optimizer has other parameters, or other param groups, than on rank "
                        f"{values.writes}: build it alike on all ranks"
                    )
            kept.add(name)
            own = values.kept(value.tree, own_value) if isinstance(value, Container) else value
            self.values[name] = OwnValue(own, path)
            if name == OPTIMIZER:
                self.parameters.extend(values.parameters or ())

    def file(self, rank: int, number: int) -> PlannedFile:
        """Return the file to write; ``number`` is that of names.rank_state_file."""
        image = image_of(self.content(), stride_of=stride_in_content, records=True)
        storage_of = {id(tensor): number for number, tensor in enumerate(image.tensors)}
        tensors = [
            NamedTensor(f"{names.RANK_STATE_DIR}/{name}", storage_of[id(own.value)], *form_of(own.value), None)
            for name, own in self.values.items()
            if isinstance(own.value, torch.Tensor)
        ]
        return PlannedFile(names.rank_state_file(rank, number), image, tuple(tensors))


@dataclass
class Replicas:
    """Copies of one content, held by a rank and others, in one save.

    Attributes:
        rank: this rank.
        compared: those of the copies that this rank does not write, and compares.
        copies: tensors of which another rank has a copy, also those that this rank writes.
        tensors: of each part, by number.
        values: the other values of each part.
        known: names of what ranks save for themselves. A job has one set of them, which grows.
        whole: compare all of each tensor.
        of_rank: path and value of what only this rank has, by name.
        stays: the state is not changed before the save ends.
    """

    rank: int
    copies: Sequence[Replica]
    compared: Sequence[Replica]
    tensors: Mapping[str, Sequence[torch.Tensor]]
    values: Sequence[Values]
    known: set[str]
    whole: bool
    of_rank: Mapping[str, tuple[Path, Any]] = field(default_factory=dict)
    stays: bool = False
    _staged: dict[int, memoryview] = field(default_factory=dict)
    """Staged bytes of whole tensors, by the ids of these."""
    _blocks: dict[int, list[int]] = field(default_factory=dict)
    _samples: dict[tuple[int, int], list[bytearray]] = field(default_factory=dict)

    @cached_property
    def own(self) -> Own:
        """The content that was known before this save to be this rank's own."""
        own = Own({name: OwnValue(value, path) for name, (path, value) in self.of_rank.items()})
        for values in self.values if self.known else ():
            if values.writes != self.rank:
                others = self.known.difference(self._names, self.of_rank)
                names = [name for name in others if is_in(values.part, name)]
                own.keep_values(values, sorted(names))
        apart = {*own.values}
        for copy in self.copies if self.known else ():
            if copy.name in self.known and copy.writes != self.rank and not copy.is_kept(apart):
                own.values[copy.name] = self._own_value(copy, self._tensor(copy))
        return own

    def _tensor(self, copy: Replica) -> torch.Tensor:
        return self.tensors[copy.part][copy.number]

    def _own_value(self, copy: Replica, tensor: torch.Tensor | None) -> OwnValue:
        """Return the ``tensor``, that of a copy, to be kept; None if it is gone."""
        if tensor is None:
            return OwnValue(Gone.LOST)
        return OwnValue(tensor, self._paths[copy.part][copy.number], copy.mesh)

    @cached_property
    def _names(self) -> set[str]:
        return {copy.name for copy in self.copies}

    @property
    def per_rank(self) -> set[str]:
        """Names of what ranks save for themselves, those of which this rank has something."""
        values = [values.by_name for values in self.values] if self.known else []
        return {*self.of_rank, *(name for name in self.known if any(name in here for here in (self._names, *values)))}

    @property
    def to_stage(self) -> list[torch.Tensor]:
        """Tensors to stage: those that are ``compared``, whole or samples of them."""
        return [part for parts in self._parts for part in parts]

    @cached_property
    def _parts(self) -> list[list[torch.Tensor]]:
        """The parts of each of these that are staged."""
        # Each save's caller waits for it.
        tensors = [self.tensors[copy.part][copy.number] for copy in self.compared]
        if self.whole:
            return [[tensor] for tensor in tensors]
        return [compared_parts(tensor, copy.nbytes) for tensor, copy in zip(tensors, self.compared, strict=True)]

    @property
    def _how(self) -> str:
        return WHOLE if self.whole else SAMPLES

    def look(self, wave: Wave, views: Sequence[memoryview], files: Sequence[PlannedFile]) -> None:
        """Take from a staged wave of ``files`` what is compared: one without a name is not written."""
        sampled = self._sampled
        looked_at = {file for file, _ in sampled}
        # A rank that writes for all keeps nothing for itself.
        may_keep = bool(self.compared) or any(values.writes != self.rank for values in self.values)
        for span, view in zip(wave, views, strict=True):
            image = files[span.file].image
            for storage, first, last, at in span.tensors(image) if may_keep or span.file in looked_at else ():
                if may_keep and not span.is_part:
                    self._staged[id(image.tensors[storage])] = view[at : at + last - first]
                if not files[span.file].key:
                    self._blocks.setdefault(storage, []).extend(block_crcs(view[at : at + last - first]))
                elif (span.file, storage) in sampled:
                    spans = _sample_spans(image.storages[storage].nbytes)
                    samples = self._samples.setdefault((span.file, storage), [bytearray() for _ in spans])
                    for sample, (start, stop) in zip(samples, spans, strict=True):
                        sample += view[at + max(start, first) - first : at + max(min(stop, last), first) - first]

    def forget_staged(self) -> None:
        """Forget staged tensors, whose memory is about to be used again."""
        self._staged.clear()

    @cached_property
    def _sampled(self) -> set[tuple[int, int]]:
        """Places of large tensors that this rank writes for others, which take samples of them."""
        large = [copy for copy in self.copies if copy.place and copy.nbytes > LARGE]
        return {copy.place for copy in large if copy.place and _samples_of(self._tensor(copy))}

    def digests(self, blocks: Callable[[tuple[int, int]], Sequence[int]]) -> dict[str, dict[str, int]]:
        """Return digests by claim and name. ``blocks`` gives those of a storage that this rank wrote.

        Of a part of which this rank has nothing to compare there is a claim too: the others may have more.
        """
        digests: dict[str, dict[str, int]] = {key: {} for values in self.values for key in self._claims(values)}
        for copy in self.copies:
            if copy.writes != self.rank or (copy.place is None and copy.nbytes) or copy.is_kept(self.known):
                continue
            whole = _joint(copy, blocks(copy.place) if copy.place else ())
            digests.setdefault(copy.claim(WHOLE), {})[copy.name] = whole
            samples = self._samples.get(copy.place) if copy.place else None
            if copy.nbytes <= LARGE:
                digests.setdefault(copy.claim(SAMPLES), {})[copy.name] = whole
            elif samples is not None:
                digests.setdefault(copy.claim(SAMPLES), {})[copy.name] = _joint(copy, list(map(crc32, samples)))
        storages = count()
        for copy, parts in zip(self.compared, self._parts, strict=True):
            crcs = [crc for _ in parts for crc in self._blocks.get(next(storages), ())]
            if parts:
                digests.setdefault(copy.claim(self._how), {})[copy.name] = _joint(copy, crcs)
        return digests

    def _claims(self, values: Values) -> Iterator[str]:
        """Yield the claims of the part's tensors: of those that one rank writes."""
        for each in (WHOLE, SAMPLES) if values.writes == self.rank else (self._how,):
            yield Claim(values.writes, values.part, each).key

    def digests_of_live(self) -> dict[str, dict[str, int]]:
        """Return digests of all of it by claim and name, which reads all tensors now."""
        digests: dict[str, dict[str, int]] = {values.claim: values.digests for values in self.values}
        for copy in self.copies:
            tensor = self._tensor(copy).detach().cpu().contiguous()
            crcs = [crc32(byte_view(tensor))] if tensor.numel() else []
            digests.setdefault(copy.claim(WHOLE), {})[copy.name] = _joint(copy, crcs)
        return digests

    def summary(self, blocks: Callable[[tuple[int, int]], Sequence[int]]) -> dict[str, int]:
        """Return the digest of each claim, for the vote."""
        claims = {key: crc32(repr(sorted(own.items())).encode()) for key, own in self.digests(blocks).items()}
        return claims | {values.claim: values.digest for values in self.values}

    def published(
        self, keys: Iterable[str], blocks: Callable[[tuple[int, int]], Sequence[int]]
    ) -> dict[str, dict[str, int]]:
        """Return the digests, by name, of those claims of ``keys`` for which this rank writes."""
        mine = [key for key in keys if Claim.of(key).writes == self.rank]
        every = self._digests_of_all(blocks) if mine else {}
        return {key: every.get(key, {}) for key in mine}

    def _digests_of_all(self, blocks: Callable[[tuple[int, int]], Sequence[int]]) -> dict[str, dict[str, int]]:
        return self.digests(blocks) | {values.claim: values.digests for values in self.values}

    def disputed(self, keys: Iterable[str]) -> dict[int, list[str]]:
        """Return the claims of ``keys`` in which this rank holds copies of another's, by the rank that writes."""
        own = {copy.claim(self._how) for copy in self.compared}
        of_others = [values for values in self.values if values.writes != self.rank]
        own |= {key for values in of_others for key in (values.claim, *self._claims(values))}
        by_writer: dict[int, list[str]] = {}
        for key in keys:
            if key in own:
                by_writer.setdefault(Claim.of(key).writes, []).append(key)
        return by_writer

    def differing(self, theirs: Mapping[str, Mapping[str, int]]) -> Own:
        """Return what differs from ``theirs``: digests by claim and name."""
        own = Own()
        mine = self._digests_of_all(lambda place: [])
        differing = {key: differing_names(mine.get(key, {}), others) for key, others in theirs.items()}
        copy_of = {id(self._tensor(copy)): copy for copy in self.copies}

        def own_value(tensor: torch.Tensor) -> torch.Tensor | None:
            copy = copy_of[id(tensor)]
            value = self._as_saved(copy)
            if value is None:
                own.values[copy.name] = OwnValue(Gone.LOST)
            return value

        for values in self.values:
            names = differing.pop(values.claim, ())
            own.keep_values(values, [name for name in names if name not in self._names], own_value)  # no tensors here
        apart = {*own.values}
        compared = {(copy.claim(self._how), copy.name): copy for copy in self.compared}
        for key, name in ((key, name) for key, names in differing.items() for name in names):
            copy = compared.get((key, name))
            if copy is not None and not copy.is_kept(apart):
                own.values[name] = self._own_value(copy, self._as_saved(copy))
            elif not (name in self._names or name in self.of_rank or is_below(name, apart)):
                own.values[name] = OwnValue(Gone.ABSENT)
        return own

    @cached_property
    def _paths(self) -> dict[str, list[Path]]:
        """The paths of the tensors of each part."""
        return {each.part: [path for path, _ in iter_tensors(each.tree, torch.Tensor)] for each in self.values}

    def _as_saved(self, copy: Replica) -> torch.Tensor | None:
        """Return the tensor as it was at the save; None if nothing has it any more."""
        tensor = self._tensor(copy)
        staged = self._staged.get(id(tensor)) if copy.nbytes else memoryview(b"")  # no wave has empty ones
        if staged is None:
            return tensor if self.stays else None
        value = _tensor_at(staged, *copy.form)
        return value if copy.stride is None else with_note(value, copy.stride)


def differing_names(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names under which two ranks have different things."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _joint(copy: Replica, crcs: Sequence[int]) -> int:
    """Return one digest of a tensor's form, and of those of its blocks or samples."""
    return crc32(repr((copy.form, *crcs)).encode())


def _tensor_at(view: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch_dtype(dtype)).view(shape) if len(view) else allocated(shape, dtype)


def _sample_spans(nbytes: int) -> list[tuple[int, int]]:
    """Return the bytes (from, up to) of the samples of a large tensor."""
    middle = nbytes // 2 // 16 * 16
    return [(0, _SAMPLE), (middle, middle + _SAMPLE), (nbytes - _SAMPLE, nbytes)]


def compared_parts(tensor: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Return the parts of a tensor of so many bytes that ranks compare: all of it, or samples of a large one."""
    return [tensor] if nbytes <= LARGE else _samples_of(tensor)


def _samples_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the beginning, middle and end of a large tensor; nothing of one on a device, or of no simple layout."""
    if type(tensor) not in PLAIN or not tensor.is_cpu or not tensor.is_contiguous():
        return []
    flat = tensor.detach().view(-1)
    size = tensor.element_size()
    return [flat[start // size : stop // size] for start, stop in _sample_spans(tensor.nbytes)]
