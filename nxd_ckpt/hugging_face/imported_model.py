"""A Hugging Face directory as a job of given sizes holds it: the state that each of its ranks would save."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec, Parts
from nxd_ckpt.core.name_patterns import Numbers, Pattern, PatternIndex, Renaming
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import DtypeMismatch, InvalidArgument, KeyMismatch, TopologyMismatch
from nxd_ckpt.formats.state import ModelState, SaveState, StateTensor
from nxd_ckpt.formats.tensors import cast_dtype
from nxd_ckpt.hugging_face.hf_slice import partition_of, whole_shape
from nxd_ckpt.hugging_face.mapping import MappingRule, Match, ModelMapping
from nxd_ckpt.hugging_face.packed_tensors import HuggingFaceTensors, UnpackedTensors
from nxd_ckpt.hugging_face.sizes import Sizes
from nxd_ckpt.layouts.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.layouts.payload import Payload, PayloadFile
from nxd_ckpt.layouts.quantization import Quantization
from nxd_ckpt.reshard.target import interleaved, redistribute_layers


@dataclass(frozen=True)
class Selection:
    """The NxD tensors that a Hugging Face model becomes, and obstacles.

    Attributes:
        matches: the NxD tensors, in the model's order.
        unknown: names that no rule maps.
        missing: Hugging Face tensors, by their names in files, that the model lacks, although ``matches`` or every such
            model needs them.
    """

    matches: tuple[Match, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


def selection(mapping: ModelMapping, names: Iterable[str], sizes: Sizes, variants: Collection[str] = ()) -> Selection:
    """Select the NxD tensors for a model with the Hugging Face tensors ``names``, and the options ``variants``.

    Tied tensors that files leave out count as present.

    Raises:
        InvalidArgument: the mapping has no such variant.
        KeyMismatch: by config.json, the model or its layer does not have one of the tensors, or has others.
    """
    rules = _chosen_rules(mapping, variants)
    present = set(names)
    unknown = _unknown(mapping, rules, present)
    mapping.refuse_misplaced(sorted(present), sizes)
    if not unknown:
        mapping.refuse_options(present, sizes, "the input")
    present |= {name for name, other in mapping.ties_of(sizes).items() if other in present}
    matches = tuple(_matches(rules, present, sizes))
    needed = [name for match in matches for name in match.rule.names(match.numbers, sizes)]
    missing = [name for name in dict.fromkeys([*mapping.required(sizes), *needed]) if name not in present]
    return Selection(matches, unknown, tuple(mapping.in_files(missing)))


def complete(mapping: ModelMapping, selection_: Selection) -> tuple[Match, ...]:
    """Return the selected NxD tensors. Raises KeyMismatch if names are unknown, or tensors are missing."""
    if selection_.unknown:
        close = ", ".join(closest(mapping, selection_.unknown[0])) or "none"
        raise KeyMismatch(
            f"mapping {mapping.name!r} has no rule for {first_of(selection_.unknown)}; the closest to the first: "
            f"{close}. Choose another mapping, or add rules to a mapping file of your own"
        )
    if selection_.missing:
        raise KeyMismatch(
            f"tensors are missing: {first_of(selection_.missing)}, which every model of mapping {mapping.name!r} has "
            "with this config.json; the directory is incomplete, or this is another model's config.json"
        )
    return selection_.matches


def _chosen_rules(mapping: ModelMapping, variants: Collection[str]) -> list[MappingRule]:
    """Return one rule for each Hugging Face tensor: the one asked for, otherwise the first without a variant."""
    unknown = set(variants) - {rule.variant for rule in mapping.rules}
    if unknown:
        raise InvalidArgument(f"mapping {mapping.name!r} has no rules for {', '.join(sorted(unknown))}; leave it out")
    taken: set[str] = set()
    chosen: set[MappingRule] = set()
    for rule in sorted(mapping.rules, key=lambda rule: rule.variant is None):
        members = {member.name.text for member in rule.members}
        if rule.variant in (None, *variants) and not members & taken:
            chosen.add(rule)
            taken |= members
    return [rule for rule in mapping.rules if rule in chosen]


def closest(mapping: ModelMapping, name: str) -> list[str]:
    """Return the Hugging Face patterns of rules that are most similar to ``name``, at most two."""
    texts = [member.name.text for rule in mapping.rules for member in rule.members]
    return difflib.get_close_matches(re.sub(r"\b\d+\b", "{layer}", name), dict.fromkeys(texts), n=2)


def _unknown(mapping: ModelMapping, rules: Iterable[MappingRule], names: Collection[str]) -> tuple[str, ...]:
    index = PatternIndex([*(member.name for rule in rules for member in rule.members), *mapping.ignored])
    return tuple(sorted(name for name in names if not any(index.matches(name))))


def _matches(rules: Collection[MappingRule], names: Collection[str], sizes: Sizes) -> Iterator[Match]:
    """Yield matches layer by layer, for adjacent rules with the same placeholders."""
    index = PatternIndex(member.name for rule in rules for member in rule.members)
    matched: dict[Pattern, list[Numbers]] = {}
    for name in names:
        for pattern, values in index.matches(name):
            matched.setdefault(pattern, []).append(values)
    for _, group in groupby(rules, key=lambda rule: rule.nxd.placeholders):
        numbered = [(numbers, place, rule) for place, rule in enumerate(group) for numbers in _numbers(rule, matched)]
        for numbers, _, rule in sorted(numbered, key=lambda entry: entry[:2]):
            yield Match(rule.nxd.fill(dict(numbers)), rule, dict(numbers))


def _numbers(rule: MappingRule, matched: Mapping[Pattern, Sequence[Numbers]]) -> set[tuple[tuple[str, int], ...]]:
    """Return the numbers for which the model has at least one tensor of the rule."""
    matches = (numbers for member in rule.members for numbers in matched.get(member.name, ()))
    return {tuple((key, numbers[key]) for key in rule.nxd.placeholders) for numbers in matches}


@dataclass(frozen=True)
class ImportTarget:
    """The form that a Hugging Face directory is to take.

    Attributes:
        topology: sizes of the job.
        mapping: mapping of the model.
        sizes: sizes of the model.
        variants: the options that choose among the mapping's rules.
        dtype: dtype that floating-point numbers are cast to; None keeps theirs.
        use_xser: True to write xser files.
        virtual_pp: chunks of the model that each pipeline rank holds.
        stages: the names of each pipeline stage; by default layers are spread evenly.
        model_key: key of the model's state dict in a pickled file.
        renaming: names in the files, where they are not those of the mapping's rules.
        quantization: how its weights are quantized; None if they are not, or to MXFP4.
    """

    topology: Topology
    mapping: ModelMapping
    sizes: Sizes
    variants: tuple[str, ...] = ()
    dtype: str | None = None
    use_xser: bool = False
    virtual_pp: int = 1
    stages: Sequence[Sequence[str]] | None = None
    model_key: str = "model"
    renaming: Renaming = field(default_factory=Renaming)
    quantization: Quantization | None = None


class ImportedFiles(PayloadFile):
    """Layout (`TagLayout`) of ``directory`` as the tag of a job on one rank, by ``target``, whose sizes do not count.

    Raises the errors of `ImportedModel.state`.
    """

    def __init__(self, directory: HuggingFaceDirectory, target: ImportTarget) -> None:
        super().__init__(directory.files, "", Payload({}))
        self.model: ImportedModel = ImportedModel(directory, target)

    def parts(self) -> Parts:
        return Parts(model=True)

    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        state = self.model.state(Topology()).model
        return {} if state is None else dict(state.tree)


class ImportedModel:
    """The model of ``directory`` on any rank of ``target``. Reads headers only, each once."""

    def __init__(self, directory: HuggingFaceTensors, target: ImportTarget) -> None:
        self._directory = UnpackedTensors(directory, target.mapping, target.sizes, target.renaming)
        self._target = target
        self._specs: dict[tuple[str, int, int], ParameterSpec] = {}

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """Tensors of the directory that the tag will not have, by the reason."""
        return self._directory.left_out

    @cached_property
    def selection(self) -> Selection:
        """The NxD tensors that the directory becomes, and obstacles."""
        target = self._target
        with self._named():
            return selection(target.mapping, self._directory.names, target.sizes, target.variants)

    @cached_property
    def matches(self) -> dict[str, Match]:
        """The NxD tensors by name, in the model's order. Raises the errors of `selection` and `complete`."""
        chosen = self.selection
        with self._named():
            return {match.name: match for match in complete(self._target.mapping, chosen)}

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Put the directory before the message of a KeyMismatch."""
        try:
            yield
        except KeyMismatch as error:
            raise KeyMismatch(f"{self._directory.where}: {error}") from None

    @cached_property
    def stages(self) -> Sequence[Sequence[str]]:
        """Names of each pipeline stage."""
        stages_ = self._target.stages
        pp = self._target.topology.pp
        if stages_ is None:
            return self.staged(list(self.matches))
        if len(stages_) != pp:
            raise TopologyMismatch(f"stages= lists {len(stages_)} pipeline stages, but pp is {pp}")
        listed = {name for names in stages_ for name in names}
        if listed != set(self.matches):
            wrong = ", ".join(sorted(listed ^ set(self.matches))[:5])
            raise KeyMismatch(f"{self._directory.where}: stages= must list every NxD tensor, and no other: {wrong}")
        return stages_

    def staged(self, names: Sequence[str]) -> list[list[str]]:
        """Return these names by pipeline stage, with layers spread evenly."""
        pp = self._target.topology.pp
        return interleaved(redistribute_layers([names], pp * self._target.virtual_pp), pp)

    def state(self, topology: Topology) -> SaveState:
        """Return the state that the rank of ``topology`` would save; leaves are assemblies of the directory's tensors.

        Raises:
            TopologyMismatch: the sizes do not divide a tensor.
            ShapeMismatch, InvalidArgument: the tensors do not fit a model with this config.json.
            KeyMismatch, PartNotFound, MalformedFile: the directory lacks a tensor, or is damaged.
        """
        mine = [self.matches[name] for name in self.stages[topology.pp_rank]]
        specs = {match.name: self.spec(match, topology) for match in mine}
        tree: dict[str, Any] = {
            match.name: self._directory.assembly(match, topology, specs[match.name].dtype, specs[match.name].shape)
            for match in mine
        }
        tensors = {
            (name,): StateTensor(f"model/{name}", spec, expert=spec.partition.expert) for name, spec in specs.items()
        }
        return SaveState(
            model=ModelState(tree, lambda: dict(tensors), specify=lambda: dict(specs)), use_xser=self._target.use_xser
        )

    def spec(self, match: Match, topology: Topology) -> ParameterSpec:
        """Return the tensor's specification on each rank."""
        key = match.name, topology.tp, topology.ep
        if key not in self._specs:
            self._specs[key] = self._spec(match, topology)
        return self._specs[key]

    def _spec(self, match: Match, topology: Topology) -> ParameterSpec:
        rule = match.rule
        sizes = self._target.sizes
        tied = self._target.mapping.ties_of(sizes)
        names = rule.names(match.numbers, sizes)
        stubs = [self._directory.tensor(name, tied) for name in names]
        shape = list(whole_shape(match, [stub.shape for stub in stubs], sizes, multiple=topology.tp))
        partition = partition_of(match, tuple(shape), sizes, topology.tp)
        forms = [(name, stub.shape) for name, stub in zip(names, stubs, strict=True)]
        self._target.mapping.refuse_shapes(rule, forms, sizes, self._directory.where)
        if rule.dim is not None:
            shape[rule.dim] //= topology.tp
        if rule.stacked is not None:
            if shape[0] % topology.ep:
                raise TopologyMismatch(
                    f"{match.name}: {shape[0]} experts cannot be divided equally among {topology.ep} expert-parallel "
                    "ranks; choose another size"
                )
            shape[0] //= topology.ep
        return ParameterSpec(self._dtype(match, {stub.dtype for stub in stubs}), tuple(shape), partition)

    def _dtype(self, match: Match, dtypes: set[str]) -> str:
        dtypes = {cast_dtype(dtype, self._target.dtype) for dtype in dtypes}
        if len(dtypes) > 1:
            raise DtypeMismatch(
                f"{match.name} is made of tensors of {' and '.join(sorted(dtypes))}; pass dtype= to cast them"
            )
        return dtypes.pop()
