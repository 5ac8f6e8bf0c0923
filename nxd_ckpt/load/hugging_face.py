"""Loading a Hugging Face directory into a live model: every rank reads its own slices, and no rank the whole.

The phases are those of a tag: all ranks check the fit, from headers alone, before anything changes on any.
Such files have no digests. Only their lengths can be checked beforehand, against their headers. The proof of the
load compares live tensors with what was put together from them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256

import torch

from nxd_ckpt import effects
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.core.findings import Finding
from nxd_ckpt.core.mapping import Match
from nxd_ckpt.core.renaming import Renaming
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import (
    DtypeMismatch,
    InvalidArgument,
    KeyMismatch,
    PartNotFound,
    ShapeMismatch,
    UnsupportedState,
)
from nxd_ckpt.formats.tensors import Assembly, torch_dtype
from nxd_ckpt.hugging_face.mapped_directory import MappedDirectory
from nxd_ckpt.hugging_face.mapped_tag import is_rounded
from nxd_ckpt.hugging_face.model_heads import with_head_of
from nxd_ckpt.hugging_face.packed_tensors import UnpackedTensors
from nxd_ckpt.live import torch_xla
from nxd_ckpt.live.dtensor import plain_names, refuse_sizes
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer import open_optimizer
from nxd_ckpt.live.parameters import refuse_fake_mode
from nxd_ckpt.live.state import MASTER_WEIGHTS
from nxd_ckpt.load.collective_checks import Unmatched, refuse_unmatched
from nxd_ckpt.load.comparison import Comparison, Witness, is_proved, judge
from nxd_ckpt.load.filters import Filter
from nxd_ckpt.load.options import LoadRequest
from nxd_ckpt.load.overwriting import fill_model, nbytes_of, overwriting
from nxd_ckpt.load.replicas import SharedReads, delivery_of, measured_rate, open_shared_reads
from nxd_ckpt.load.shares import agree_on_shares
from nxd_ckpt.load.tied import refuse_unequal_ties, unequal_ties
from nxd_ckpt.load.trees import local_tree
from nxd_ckpt.reshard.plain_values import ABSENT
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import report, watched
from nxd_ckpt.tag.foreign.hugging_face_directory import HuggingFaceDirectory, open_weights
from nxd_ckpt.tag.foreign.quantization import Quantization, quantization_of
from nxd_ckpt.tag.mappings import find_mapping, is_known, own_names, text_config
from nxd_ckpt.tag.reading import Leaf, LeafReader

logger = logging.getLogger("nxd_ckpt")

_LOOSE = "strict=False loads the rest"


def load_hugging_face(storage: Storage, key: str, request: LoadRequest) -> None:
    """Load the model in the directory or file ``key`` of ``storage`` into the model. Collective.

    Optimizer and scheduler must be None, unless only weights are to be loaded.

    Raises:
        CheckpointError: the errors of `Checkpointer.load`, on every rank.
    """
    started, agreement = effects.monotonic(), request.agreement

    def prepare() -> _HuggingFaceLoad:
        refuse_fake_mode()
        _refuse_arguments(f"{storage.url}/{key}", request)
        return _HuggingFaceLoad(open_weights(storage, key), request)

    attempt = on_all(agreement, prepare)
    if request.reports_progress and attempt.strays is not None:
        logger.warning("%s", attempt.strays)
    if attempt.filtered:
        attempt.unmatched.complain(request)
    of_ranks = agreement.gather(attempt.loose)
    for text in dict.fromkeys(text for texts in of_ranks or () for text in texts):
        logger.warning("loading with strict=False: %s", text)
    used = _tensors_used_by_all(agreement, attempt.used)
    refuse_unmatched(request, attempt.nbytes > 0, attempt.unfilled)
    if not request.acts_for_one_stage:
        decided_by_rank0(agreement, lambda: attempt.refuse_unused(used))
    with attempt.reader() as reader:
        reads = attempt.join(request, reader)
        shown = request.reports_progress and request.options.progress
        on_all(agreement, lambda: attempt.apply(reader, reads, shown=shown))
    for reason, names in attempt.left_out.items() if request.reports_progress else ():
        logger.warning("%s: left out, %s: %s", attempt.where, reason, first_of(names))
    if request.reports_progress and logger.isEnabledFor(logging.INFO):
        report("loaded", attempt.where, attempt.nbytes, started)


def _tensors_used_by_all(agreement: Agreement, used: Sequence[str]) -> list[str]:
    """Return, on rank 0, the tensors that all ranks use. The ranks of a stage use the same: one of them reports."""
    digests = agreement.gather(sha256(repr(used).encode()).hexdigest())
    speakers = agreement.broadcast(None if digests is None else sorted({*map(digests.index, digests)}))
    lists = agreement.gather(list(used) if agreement.rank in speakers else [])
    return [name for names in lists or [] for name in names]


class _HuggingFaceLoad:
    """A load whose directory and live model fit. ``used`` are the Hugging Face tensors that its rules name.

    ``loose`` are problems of this rank that are only warnings without ``strict``.
    """

    def __init__(self, directory: HuggingFaceDirectory, request: LoadRequest) -> None:
        topology, options, optimizer = request.topology, request.options, request.optimizer
        self._directory, self._strict, self._request = directory, options.strict_names, request
        self.loose: list[str] = []
        config = text_config(self._directory.config)
        quantization = quantization_of(self._directory.config, self._directory.where)
        renaming = Renaming(options.key_mapping or {}, options.prefix)
        self._model = open_model(request.model, may_be_meta=True)
        if self._model.is_placed:
            refuse_sizes(topology)
        self._specs = self._model.parameters(topology.tp)
        spec = options.mapping
        if spec is None and not is_known(config):  # then only a model with the names of the files can be meant
            spec = own_names({name: each.partition.partition_dim for name, each in self._specs.items()})
        known = find_mapping(spec, config)
        self._mapping = with_head_of(known, config, plain_names(self._directory.names, self.where).values())
        self._sizes = self._mapping.sizes(config, options.kv_size_multiplier, options.hardware)
        self._tensors = UnpackedTensors(self._directory, self._mapping, self._sizes, renaming)
        self._optimizer = None
        if optimizer is not None:
            self._optimizer = open_optimizer(optimizer, model=self._model, topology=topology)
        names = self._model.names()
        self.filtered = Filter(replace(options, key_mapping=None, prefix=""))  # which name tensors of the files
        self.filtered.know_ties(self._model)
        self._mapped = MappedDirectory(self._tensors, self._mapping, self._sizes, topology)
        self._directory.dequantize(_as_live(quantization, {spec.dtype for spec in self._specs.values()}))
        if self.filtered:
            self.filtered.know_apart(self._different_ties())
        paths = [f"model/{name}" for name in names]
        self.filtered.choose(paths)
        self.unmatched = Unmatched(self.filtered, names, (), paths)
        left_out = list(filter(self.filtered.ignores_model, names))
        matches = self._matches(left_out)
        self.used = [name for match in matches for name in match.rule.names(match.numbers, self._sizes)]
        loaded = [match for match in matches if match.name not in {*left_out}]
        self._leaves = self._assemblies(loaded, topology)
        live = [name for name in names if name not in {*left_out}]
        self.unfilled = None if self._leaves or not live else self._describe_mismatch(live)
        self._refuse_what_stays_meta()

    @property
    def where(self) -> str:
        return self._directory.where

    @property
    def strays(self) -> str | None:
        """Warning about files that look like the model's weights, and are not read; None without any."""
        return self._directory.strays

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """Tensors of the directory that no such model has, by the reason."""
        return self._tensors.left_out

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that this rank loads."""
        return sum(map(nbytes_of, self._leaves.values()))

    def _describe_mismatch(self, live: list[str]) -> str:
        return (
            f"{self.where} holds {first_of(sorted(self._directory.names))}, the model has {first_of(live)}, and "
            f"mapping {self._mapping.name!r} matches none of them"
        )

    def refuse_unused(self, used: Iterable[str]) -> None:
        """Raise KeyMismatch, or warn, for tensors of the directory that no rank uses."""
        in_files = self._mapping.in_files
        unused = sorted({*in_files(self._tensors.names)}.difference(in_files(used)))
        unused = [name for name in unused if not any(pattern.match(name) for pattern in self._mapping.ignored)]
        if unused:
            problem = f"{self.where} holds {first_of(unused)}, which no rank's model has"
            if self._strict:
                raise KeyMismatch(f"{problem}; {_LOOSE}")
            logger.warning("loading with strict=False: %s", problem)

    def join(self, request: LoadRequest, reader: LeafReader) -> SharedReads | None:
        """Join the replicas, data-parallel or on a mesh, if they are to share the reading. Collective."""
        leaves = [(f"model/{name}", leaf) for name, leaf in self._leaves.items()]
        places = self._model.placed(self._leaves)
        placed = [(name, self._leaves[name], places[name,]) for name in self._leaves if (name,) in places]
        terms = type(self._model).__name__
        shares = agree_on_shares(request.agreement, request.topology, leaves, placed, terms)
        rate = partial(measured_rate, reader, leaves, shares)
        return open_shared_reads(request.agreement, shares, request.options.share_reads, rate, request.timeout)

    def apply(self, reader: LeafReader, reads: SharedReads | None, *, shown: bool) -> None:
        """Change the live model. Replicas that share ``reads`` leave their groups afterwards."""
        with reads or nullcontext(), overwriting(self.where):
            names = {id(leaf): name for name, leaf in self._leaves.items()}

            def fill(leaf: Leaf, out: torch.Tensor) -> None:
                reader.read_into(leaf, out, f"model/{names[id(leaf)]}", compare=False)

            before, witness = reader.done.nbytes, Witness()
            with watched("load", self.nbytes, lambda: reader.done.nbytes - before, shown):
                self._model.materialize(self._leaves)
                delivery = delivery_of(reader, fill, reads, witness.saw)
                fill_model(self._model, list(self._leaves), self._leaves, delivery)
                delivery.finish()
            self._model.after_load()
            if self._optimizer is not None:
                self._optimizer.follow(self.filtered.keeps(self._leaves))
            torch_xla.sync()  # as after the load of a tag
            findings = self._findings(reader, witness)
        judge(findings, self.where, self._request.options.prove)

    def _findings(self, reader: LeafReader, witness: Witness) -> list[Finding]:
        """Return the differences between the live model, ZeRO-1's shards of it, and what was loaded."""
        request, options = self._request, self._request.options
        if not is_proved(options):
            return []
        comparison = Comparison(reader, witness.digest, everything=options.prove is True)
        with comparison.capturing("model"):
            live = open_model(request.model)
            for name, leaf in self._leaves.items():
                by_user = self._model.passes_user_code(name)
                comparison.compare("weights", f"model/{name}", leaf, live.live.get(name, ABSENT), by_user)
            if request.optimizer is not None:
                optimizer = open_optimizer(request.optimizer, model=live, topology=request.topology)
                keeps = self.filtered.keeps(self._leaves)
                for slot in optimizer.shards(optimizer.capture().tree).values():
                    if not keeps(slot.global_name(MASTER_WEIGHTS)):
                        comparison.compare_shard(slot, optimizer.passes_user_code)
        return comparison.finish()

    def _matches(self, left_out: Collection[str]) -> list[Match]:
        """Return the rules of the live names; names that are left out need none."""
        live = self._rule_names(self._model.names())
        if self._strict:
            ignored = [name for name, at in live.items() if at in left_out]
            matches = self._mapping.matches(name for name, at in live.items() if at not in left_out)
            matches += self._mapping.split(ignored)[0]
        else:
            matches, unknown = self._mapping.split(live)
            if unknown:
                self.loose.append(f"left as they are, without a rule: {first_of(unknown)}")
        return [replace(match, name=live[match.name]) for match in matches]

    def _rule_names(self, names: Iterable[str]) -> dict[str, str]:
        """Return the live ``names`` by those in rules, which do not cover wrapped layers and wrapped models."""
        base_names = self._model.base_names()
        plain = {name: each for each, name in plain_names(names, "the live model").items()}
        with_rules = {match.name for match in self._mapping.split(name for name in plain if name != plain[name])[0]}
        by_rule = {base_names.get(name, name if name in with_rules else plain[name]): name for name in plain}
        prefix, has_rule = self._mapping.base_prefix, self._mapping.split
        if any(name.startswith(prefix) for name in by_rule):
            return by_rule
        # The base model alone: its own names lack the prefix.
        return {prefix + name if has_rule([prefix + name])[0] else name: live for name, live in by_rule.items()}

    def _assemblies(self, matches: Iterable[Match], topology: Topology) -> dict[str, Assembly]:
        """Return the assembly of each live tensor; of tied ones, for the first that the directory has."""
        specs = self._specs
        assemblies: dict[str, Assembly] = {}
        absent: dict[str, KeyMismatch] = {}
        for match in matches:
            name = match.name
            self._model.check_writable(name)
            if self._model.expanded([name]):
                raise UnsupportedState(
                    f"model/{name} is expanded (several elements share memory); load into a contiguous() copy"
                )
            if name not in specs:
                raise InvalidArgument(f"model/{name} is not a tensor, expected one with the shape that this rank holds")
            try:
                leaf = self._mapped.assembly(match, specs[name].dtype, specs[name].shape)
            except KeyMismatch as error:
                absent[name] = error
                continue
            _refuse_narrowing(name, leaf)
            assemblies[name] = leaf
        for name, problem in absent.items():
            if assemblies.keys().isdisjoint(self._model.aliases(name)):
                self._complain(str(problem))
        for match in matches:
            if match.name in assemblies:
                self._refuse_zeroed_rows(match, specs[match.name].shape, topology)
        refuse_unequal_ties(self.where, assemblies, self._model.aliases, self.reader)
        assemblies = {name: leaf for name, leaf in assemblies.items() if self._is_first(name, assemblies)}
        return local_tree(assemblies, self._model.placed(assemblies))

    def _different_ties(self) -> set[str]:
        """Return tied live names under which the directory has different tensors: a filter may choose one of them."""
        names = self._rule_names(self._model.names()).items()
        live = {rule: name for rule, name in names if name in self._specs and len(self._model.aliases(name)) > 1}
        assemblies: dict[str, Assembly] = {}
        for match in self._mapping.split(live)[0]:
            name = live[match.name]
            with suppress(KeyMismatch):  # absent: the load reports it
                assemblies[name] = self._mapped.assembly(match, self._specs[name].dtype, self._specs[name].shape)
        return {name for pair in unequal_ties(assemblies, self._model.aliases, self.reader) for name in pair}

    def reader(self) -> LeafReader:
        return LeafReader(self._directory.files, {})

    def _is_first(self, name: str, assemblies: Collection[str]) -> bool:
        """Return whether it is the first of its tied names that the directory has."""
        return name == next(alias for alias in self._model.aliases(name) if alias in assemblies)

    def _refuse_zeroed_rows(self, match: Match, shape: tuple[int, ...], topology: Topology) -> None:
        """Raise ShapeMismatch if live rows beyond those of the files would become zero and that may lose values.

        ``strict`` does not matter. Ranks that do not divide the rows must pad them. Further rows are padding only if
        they are zero.
        """
        dim, rows, tp = match.rule.dim, match.rule.members[0].rows, topology.tp
        if dim is None or rows is None:
            return
        length, count = shape[dim] * tp, self._sizes.get(rows)
        if length <= count:
            return
        if length != count + -count % tp:
            problem = (
                f"{self.where}: config.json says {self._sizes.key(rows)} {count}, the live {match.name} has {length} "
                f"rows, and rows {count} to {length - 1} would become zero: "
            )
            if tp == 1 or not is_rounded(length, count, tp):
                raise ShapeMismatch(
                    f"{problem}no rounding to {tp} tensor-parallel ranks explains them. Build the model with {count} "
                    "rows, load it, and add rows then"
                )
            start = min(max(count - topology.tp_rank * shape[dim], 0), shape[dim])
            if self._model.has_values(match.name, dim, start):
                raise ShapeMismatch(
                    f"{problem}they are not zero now, so they may be trained. If they are padding, set them to zero "
                    f"before the load; else build the model with {count + -count % tp} rows, and add rows after it"
                )
        logger.info("%s: rows %d to %d of %s are padding, and zero", self.where, count, length - 1, match.name)

    def _refuse_what_stays_meta(self) -> None:
        filled = self._model.ids(self._leaves)
        meta = self._model.on_meta().items()
        left = sorted(name for place, name in meta if place not in filled and not self.filtered.ignores_model(name))
        if left:
            self._complain(
                f"{first_of(left)} of the live model are on the meta device and in no file: give them values, as the "
                "model computes them, before loading"
            )

    def _complain(self, problem: str) -> None:
        if self._strict:
            raise KeyMismatch(f"{problem}; {_LOOSE}")
        self.loose.append(problem)


def _refuse_arguments(where: str, request: LoadRequest) -> None:
    model, options = request.model, request.options
    for name, value in (("optimizer", request.optimizer), ("scheduler", request.scheduler)):
        if value is not None and not options.loads_weights_only:
            raise PartNotFound(
                f"{where} has Hugging Face's form, with a model and no {name}; load it with {name}=None, before the "
                "optimizer is built or its master weights are taken"
            )
    if model is None or model == {}:
        raise InvalidArgument(
            f"{where} has Hugging Face's form, and is loaded into a live model: its names and shapes determine each "
            f"rank's part; pass model=, found {model!r}"
        )
    if options.pre_download:
        raise InvalidArgument(
            f"{where} is a Hugging Face directory, of which each rank reads its slices only: load it without "
            "pre_download=True"
        )


def _as_live(quantization: Quantization | None, dtypes: Collection[str]) -> Quantization | None:
    """Return ``quantization`` with a dtype from which a cast to any of the live ``dtypes`` rounds once."""
    if quantization is None:
        return None
    floating = {dtype for dtype in dtypes if torch_dtype(dtype).is_floating_point}
    return replace(quantization, dtype="bfloat16" if floating == {"bfloat16"} else "float32")


def _refuse_narrowing(name: str, leaf: Assembly) -> None:
    """Raise DtypeMismatch if a number of the files might not fit into the live dtype."""
    for saved in sorted({fragment.stub.dtype for fragment in leaf.fragments} - {leaf.dtype}):
        if _exponents(saved) is None or (_exponents(leaf.dtype) or 0) < (_exponents(saved) or 0):
            raise DtypeMismatch(
                f"model/{name}: saved as {saved}, the live one is {leaf.dtype}, which has a smaller range; build the "
                f"model in {saved}"
            )


def _exponents(dtype: str) -> int | None:
    """Return the largest exponent of a floating-point dtype; None for others."""
    kind = torch_dtype(dtype)
    return math.frexp(torch.finfo(kind).max)[1] if kind.is_floating_point else None
