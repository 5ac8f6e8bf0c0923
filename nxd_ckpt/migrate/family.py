"""Comparison of a checkpoint in Hugging Face's names with the model that its config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.tensors import StorageSpan, TensorStub, contiguous_stride
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag, HuggingFaceTerms, TagTensors
from nxd_ckpt.hugging_face.imported_model import ImportedModel, ImportTarget
from nxd_ckpt.hugging_face.mapping import ModelMapping
from nxd_ckpt.hugging_face.mappings import shipped_mappings
from nxd_ckpt.tag.opened import OpenTag


def completed(mapping: ModelMapping, config: Mapping[str, Any]) -> ModelMapping:
    """Return a checkpoint's own ``mapping`` with ties, and names of sizes, of the family of config.json."""
    family = _family(mapping, config)
    if family is None:
        return mapping
    keys, tied = {**family.keys, **mapping.keys}, {**family.tied, **mapping.tied}
    return replace(mapping, keys=keys, tied=tied, ties=family.ties)


def refuse_other_model(opened: OpenTag, terms: HuggingFaceTerms) -> None:
    """Check a checkpoint whose own names are Hugging Face's by the shipped mapping for its config.json.

    Nothing but the number of layers and experts is checked of a model with tensors that this mapping lacks, such as a
    classifier.

    Raises the errors of `ImportedModel.state`.
    """
    family = _family(terms.mapping, terms.sizes.config)
    if family is None:
        return
    packed = () if terms.torchtitan is None else terms.torchtitan.packed
    own = replace(terms.mapping, packed=tuple(each for each in terms.mapping.packed if each not in packed))
    tag = HuggingFaceTag(opened, HuggingFaceTerms(own, terms.sizes, optimizer=False))
    sizes = family.sizes(terms.sizes.config, 1, "trn1")
    model = ImportedModel(_Forms(tag), ImportTarget(Topology(), family, sizes))
    if not model.selection.unknown:
        model.state(Topology())


def _family(mapping: ModelMapping, config: Mapping[str, Any]) -> ModelMapping | None:
    """Return the shipped mapping for config.json; None without, and if ``mapping`` is shipped itself."""
    shipped = shipped_mappings()
    if mapping.name in shipped:
        return None
    return next((each for each in shipped.values() if config.get("model_type") in each.model_types), None)


class _Forms(TagTensors):
    """The tag's tensors, of which only names, shapes and dtypes are true: their parts are not looked for."""

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub:
        leaf = super().tensor(name, tied)
        return TensorStub("", 0, leaf.dtype, leaf.shape, contiguous_stride(leaf.shape), StorageSpan(name, 0, 0, None))
