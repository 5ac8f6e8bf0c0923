"""A model in Hugging Face's form as a tag of this job: under the names of the live model, each rank's slices of it.

Names are known from the list of tensors; headers are read for those that are loaded. Those that we wrote have digests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.name_patterns import Renaming
from nxd_ckpt.core.parameter_names import plain_names
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import DtypeMismatch, InvalidArgument, KeyMismatch, ShapeMismatch, UnsupportedState
from nxd_ckpt.formats.memory import torch_dtype
from nxd_ckpt.formats.tensors import Assembly, DeferredAssembly, Fragment, itemsize
from nxd_ckpt.hugging_face.mapped_tag import is_rounded
from nxd_ckpt.hugging_face.mapping import Match
from nxd_ckpt.hugging_face.mappings import find_mapping, is_known, own_names, text_config, with_head_of
from nxd_ckpt.hugging_face.packed_tensors import UnpackedTensors
from nxd_ckpt.layouts.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.layouts.quantization import Quantization, quantization_of, refuse_quantized_dtype
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.loading.collective_checks import ComparedNames
from nxd_ckpt.loading.options import LoadRequest
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import Leaf


class MappedWeights(OpenTag):
    """The tag ``opened``, a ``directory`` in Hugging Face's form, as the live ``model`` of this rank has it.

    Raises:
        InvalidArgument: there is no live model, whose names and shapes determine each rank's part.
        KeyMismatch: ``prefix`` or ``key_mapping``, which name tensors of the files, name nothing.
    """

    def __init__(
        self, opened: OpenTag, directory: HuggingFaceDirectory, model: ModelAdapter | None, request: LoadRequest
    ) -> None:
        super().__init__(opened.storage, opened.tag, opened._layout, None)
        if model is None or not model.names():
            raise InvalidArgument(
                f"{self.where} has Hugging Face's form, and is loaded into a live model: its names and shapes "
                f"determine each rank's part; pass one as model=, found {request.model!r}. An empty dict is filled "
                "with whole tensors, without mapping=, and without tensor and pipeline parallelism"
            )
        self.topology = request.topology
        options = request.options
        sizes = self.topology.sizes
        if request.optimizer is not None and self.parts.optimizer is not None and (sizes["tp"], sizes["pp"]) != (1, 1):
            raise UnsupportedState(
                f"{self.where}: the optimizer beside a model in Hugging Face's form is loaded without tensor and "
                "pipeline parallelism. Make a tag of it, which loads on any sizes: convert(..., to='tag', names='own')"
            )
        self._model, self._specs = model, model.parameters(self.topology.tp)
        self._strict = options.strict_names
        config = text_config(directory.config)
        spec = options.mapping
        if spec is None and not is_known(config):  # then only a model with the names of the files can be meant
            spec = own_names({name: each.partition.partition_dim for name, each in self._specs.items()})
        mapping = find_mapping(spec, config)
        quantization = quantization_of(directory.config, directory.where)
        directory.live_dtypes = {spec.dtype for spec in self._specs.values()}
        directory.dequantize(_as_live(quantization, directory.live_dtypes))
        self._mapping = with_head_of(mapping, config, plain_names(directory.names, self.where).values())
        self._sizes = self._mapping.sizes(config, options.kv_size_multiplier, options.hardware)
        renaming = Renaming(options.key_mapping or {}, options.prefix)
        self._tensors = UnpackedTensors(directory, self._mapping, self._sizes, renaming)
        self._rules = self._rule_names(model.names())
        matches, self._without_rule = self._mapping.split(self._rules)
        self._matches = {self._rules[match.name]: match for match in matches}
        for reason, names in self._tensors.left_out.items() if request.reports_progress else ():
            logger.warning("%s: left out, %s: %s", self.where, reason, first_of(names))

    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        return self._tree

    def experts(self) -> None:
        return None

    def is_digested(self, leaf: Leaf) -> bool:
        """Return whether its blocks have digests, or records of which it is all: a part would need the rest read."""
        return any(
            (stub.file, stub.storage.offset) in self.entries
            or (stub.storage.crc32 is not None and source.numel * itemsize(stub.dtype) == stub.storage.nbytes)
            for stub, source in ((fragment.stub, fragment.source) for fragment in Assembly.of(leaf).fragments)
        )

    @cached_property
    def _tree(self) -> dict[str, Any]:
        """This rank's part of each live tensor that the files have. Reads nothing yet."""
        return {
            name: DeferredAssembly(self._specs[name].dtype, self._specs[name].shape, self._finder(match, name))
            for name, match in self._matches.items()
            if name in self._specs and not self._lacking(match)
        }

    def _finder(self, match: Match, name: str) -> Callable[[Box], tuple[Fragment, ...]]:
        return lambda box: self._assembly(match, name).within(box).fragments

    def _assembly(self, match: Match, name: str) -> Assembly:
        spec = self._specs[name]
        return self._tensors.assembly(replace(match, name=name), self.topology, spec.dtype, spec.shape)

    def _lacking(self, match: Match) -> list[str]:
        """Return the tensors of a rule that the files lack."""
        ties = self._mapping.ties_of(self._sizes)
        has = self._tensors.has
        names = match.rule.names(match.numbers, self._sizes)
        return [name for name in names if not (has(name) or has(ties.get(name, name)))]

    def compared_names(self, chosen: Callable[[Collection[str]], Collection[str]]) -> ComparedNames:
        """Return the names that ranks judge together: live ones, and those of tensors in files that no rule takes here.

        Raises KeyMismatch under ``strict`` if a ``chosen`` live name has no rule, or the files lack its tensor.
        """
        in_files = self._mapping.in_files
        absent = chosen(self._model.missing(self._tree))
        missing = [name for name in absent if name in self._matches or self._rule_of[name] in self._without_rule]
        for name in missing if self._strict else ():
            self._mapping.matches([self._rule_of[name]])
            self._refuse_absent(name)
        used = {*in_files(n for m in self._matches.values() for n in m.rule.names(m.numbers, self._sizes))}
        unused = sorted({*in_files(self._tensors.names)} - used)
        unused = [name for name in unused if not any(pattern.match(name) for pattern in self._mapping.ignored)]
        live = chosen(self._model.names())
        return ComparedNames([*live, *sorted(used)], missing, unused, not self._tree.keys().isdisjoint(live))

    @cached_property
    def _rule_of(self) -> dict[str, str]:
        return {live: rule for rule, live in self._rules.items()}

    def _refuse_absent(self, name: str) -> None:
        for lacking in self._lacking(self._matches[name]):
            self._tensors.tensor(lacking, self._mapping.ties_of(self._sizes))  # which raises the error
        raise InvalidArgument(f"model/{name} is not a tensor, expected one with the shape that this rank holds")

    def leaves(self, names: Collection[str], ignores: Callable[[str], bool]) -> dict[str, Assembly]:
        """Return what is to be loaded under these live names. Those that ``ignores`` selects may stay as they are.

        Raises:
            DtypeMismatch, ShapeMismatch: live tensors have a smaller range, or rows that might lose their values.
            KeyMismatch: under ``strict``, a live tensor would stay on the meta device.
        """
        leaves = {name: self._assembly(self._matches[name], name) for name in names}
        for name, leaf in leaves.items():
            _refuse_narrowing(name, leaf, self.where)
            self._refuse_zeroed_rows(name, self._matches[name])
        filled = self._model.ids(names)
        meta = self._model.on_meta()
        left = sorted(name for place, name in meta.items() if place not in filled and not ignores(name))
        if left:
            problem = (
                f"{first_of(left)} of the live model are on the meta device and in no file: give them values, as the "
                "model computes them, before loading"
            )
            if self._strict:
                raise KeyMismatch(f"{problem}; strict=False loads the rest")
            logger.warning("loading with strict=False: %s", problem)
        return leaves

    def without_ties(self, names: Collection[str]) -> list[str]:
        """Return the live names, of tied ones only the first, as the files hold them once."""
        firsts = {name: next(alias for alias in self._model.aliases(name) if alias in names) for name in names}
        return [name for name, first in firsts.items() if name == first]

    def _rule_names(self, names: Iterable[str]) -> dict[str, str]:
        """Return the live ``names`` by those in rules, which do not cover wrapped layers and wrapped models."""
        base_names = self._model.base_names()
        plain = {name: each for each, name in plain_names(names, "the live model").items()}
        with_rules = {match.name for match in self._mapping.split(name for name in plain if name != plain[name])[0]}
        by_rule = {base_names.get(name, name if name in with_rules else plain[name]): name for name in plain}
        prefix = self._mapping.base_prefix
        has_rule = self._mapping.split
        if any(name.startswith(prefix) for name in by_rule):
            return by_rule
        # The base model alone: its own names lack the prefix.
        return {prefix + name if has_rule([prefix + name])[0] else name: live for name, live in by_rule.items()}

    def _refuse_zeroed_rows(self, name: str, match: Match) -> None:
        """Raise ShapeMismatch if live rows beyond those of the files would become zero and that may lose values.

        Ranks that do not divide the rows must pad them. Further rows are padding only if they are zero.
        """
        dim = match.rule.dim
        rows = match.rule.members[0].rows
        tp = self.topology.tp
        shape = self._specs[name].shape
        if dim is None or rows is None:
            return
        length = shape[dim] * tp
        count = self._sizes.get(rows)
        if length <= count:
            return
        if length != count + -count % tp:
            problem = (
                f"{self.where}: config.json says {self._sizes.key(rows)} {count}, the live {name} has {length} "
                f"rows, and rows {count} to {length - 1} would become zero: "
            )
            if tp == 1 or not is_rounded(length, count, tp):
                raise ShapeMismatch(
                    f"{problem}no rounding to {tp} tensor-parallel ranks explains them. Build the model with {count} "
                    "rows, load it, and add rows then"
                )
            start = min(max(count - self.topology.tp_rank * shape[dim], 0), shape[dim])
            if self._model.has_values(name, dim, start):
                raise ShapeMismatch(
                    f"{problem}they are not zero now, so they may be trained. If they are padding, set them to zero "
                    f"before the load; else build the model with {count + -count % tp} rows, and add rows after it"
                )
        logger.info("%s: rows %d to %d of %s are padding, and zero", self.where, count, length - 1, name)


def _as_live(quantization: Quantization | None, dtypes: Collection[str]) -> Quantization | None:
    """Return ``quantization`` with a dtype from which a cast to any of the live ``dtypes`` rounds once."""
    if quantization is None:
        return None
    floating = {dtype for dtype in dtypes if torch_dtype(dtype).is_floating_point}
    return replace(quantization, dtype="bfloat16" if floating == {"bfloat16"} else "float32")


def _refuse_narrowing(name: str, leaf: Assembly, where: str) -> None:
    """Raise DtypeMismatch if a number of the files might not fit into the live dtype.

    Raises UnsupportedState if it is a quantized one, which has a scale.
    """
    for saved in sorted({fragment.stub.dtype for fragment in leaf.fragments} - {leaf.dtype}):
        refuse_quantized_dtype(name, saved, where)
        if _exponents(saved) is None or (_exponents(leaf.dtype) or 0) < (_exponents(saved) or 0):
            raise DtypeMismatch(
                f"model/{name}: saved as {saved}, the live one is {leaf.dtype}, which has a smaller range; build the "
                f"model in {saved}"
            )


def _exponents(dtype: str) -> int | None:
    """Return the largest exponent of a floating-point dtype; None for others."""
    kind = torch_dtype(dtype)
    return math.frexp(torch.finfo(kind).max)[1] if kind.is_floating_point else None
