"""A tag as the tensor-parallel ranks of NxD inference hold its model: names, heads and cuts of that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import KeyMismatch
from nxd_ckpt.formats.safetensors import TensorForm
from nxd_ckpt.formats.tensors import Assembly, dtype_name
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag
from nxd_ckpt.hugging_face.imported_model import ImportedModel, ImportTarget
from nxd_ckpt.tag.foreign.presharded import file_name
from nxd_ckpt.tag.mappings import INFERENCE, inference_sizes, shipped_mappings

Presharded = Mapping[str, Mapping[str, Assembly | torch.Tensor]]
"""What each file holds, by name."""

_LAYER = re.compile(r"(layers\.\d+)\..*")
_RANK = "rank_util.rank"


def presharded(tag: HuggingFaceTag, config: Mapping[str, Any], tp: int) -> Presharded:
    """The files of ``tp`` ranks; ``config`` is the model's config.json. Raises as ImportedModel.state."""
    mapping = shipped_mappings()[INFERENCE]
    target = ImportTarget(Topology(tp=tp), mapping, inference_sizes(mapping, config, tp))
    model, found = ImportedModel(_Tensors(tag), target), {}
    for rank in range(tp):
        state = model.state(Topology(tp=tp, tp_rank=rank)).model
        held: dict[str, Any] = {} if state is None else dict(state.tree)
        number = torch.tensor([rank], dtype=torch.int32)
        found[file_name(rank)] = {**held, **dict.fromkeys(_rank_names(held), number)}
    return found


def forms_of(held: Mapping[str, Assembly | torch.Tensor]) -> tuple[TensorForm, ...]:
    """How one file's tensors are laid out."""
    return tuple(
        TensorForm(name, one.dtype if isinstance(one, Assembly) else dtype_name(one.dtype), tuple(one.shape))
        for name, one in held.items()
    )


def _rank_names(names: Iterable[str]) -> list[str]:
    """Under which names the model asks for the rank's number: its own, and those of its attention layers."""
    layers = dict.fromkeys(match[1] for match in map(_LAYER.fullmatch, names) if match is not None)
    return [*(f"{layer}.self_attn.{_RANK}" for layer in layers), _RANK]


class _Tensors:
    """The tag's tensors, as a Hugging Face directory has them."""

    def __init__(self, tag: HuggingFaceTag) -> None:
        self.where, self._held = tag.where, tag.model_tree(Coordinates())

    @property
    def names(self) -> list[str]:
        return sorted(self._held)

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> Assembly:
        held = name if name in self._held else (tied or {}).get(name, name)
        if held not in self._held:
            raise KeyMismatch(f"{self.where} has no tensor {name}; is it a model of this config.json?")
        return Assembly.of(self._held[held])
