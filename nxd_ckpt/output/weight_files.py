"""The distribution of a Hugging Face model over safetensors files: names, order, index. Touches no file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from nxd_ckpt.formats.safetensors import SafetensorsImage, TensorForm, lay_out
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.tag.foreign.weight_files import SINGLE

_METADATA = {"format": "pt"}
"""Metadata without which transformers refuses a file."""


@dataclass(frozen=True)
class WeightFile:
    """One file and the tensors in it."""

    name: str
    forms: tuple[TensorForm, ...]

    @cached_property
    def image(self) -> SafetensorsImage:
        return lay_out(self.forms, _METADATA)

    def planned(self, leaf: Callable[[str], Assembly | torch.Tensor]) -> PlannedFile:
        """Return the file to be written; ``leaf(name)`` returns a tensor, or the assembly that stands for it."""
        forms = self.image.forms
        values = [(form, leaf(form.name)) for form in forms]
        leaves = [value.cast(form.dtype) if isinstance(value, Assembly) else value for form, value in values]
        named = (NamedTensor(form.name, number, form.dtype, form.shape, None) for number, form in enumerate(forms))
        return PlannedFile(self.name, self.image.holding(leaves), tuple(named))


def plan_weight_files(forms: Sequence[TensorForm], size_per_shard: int, single: str = SINGLE) -> list[WeightFile]:
    """Return the files, in the order of the tensors, each of at most ``size_per_shard`` bytes or one tensor.

    ``single`` is the name of a single file. Raises UnsupportedState for a dtype that such files cannot hold.
    """
    groups: list[list[TensorForm]] = [[]]
    nbytes = 0
    for form in forms:
        if groups[-1] and nbytes + form.nbytes > size_per_shard:
            groups.append([])
            nbytes = 0
        groups[-1].append(form)
        nbytes += form.nbytes
    if len(groups) == 1:
        return [WeightFile(single, tuple(groups[0]))]
    stem, suffix = single.split(".")
    return [
        WeightFile(f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def index_of(files: Sequence[WeightFile]) -> bytes:
    """Return the index file: the file of each tensor."""
    total = sum(form.nbytes for file in files for form in file.forms)
    places = {form.name: file.name for file in files for form in file.forms}
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"
