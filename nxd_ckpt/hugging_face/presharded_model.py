"""A tag's model as the tensor-parallel ranks of NxD inference hold it: names, heads and cuts."""

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
"""The tensors of each file, by the file's name."""

_LAYER = re.compile(r"(layers\.\d+)\..*")
_RANK = "rank_util.rank"


def presharded(tag: HuggingFaceTag, config: Mapping[str, Any], tp: int) -> Presharded:
    """Return the files of ``tp`` ranks; ``config`` is the model's config.json.

    Raises the errors of `ImportedModel.state`.
    """
    mapping = shipped_mappings()[INFERENCE]
    target = ImportTarget(Topology(tp=tp), mapping, inference_sizes(mapping, config, tp))
    model, files = ImportedModel(_Tensors(tag), target), {}
    for rank in range(tp):
        state = model.state(Topology(tp=tp, tp_rank=rank)).model
        tensors: dict[str, Any] = {} if state is None else dict(state.tree)
        number = torch.tensor([rank], dtype=torch.int32)
        files[file_name(rank)] = {**tensors, **dict.fromkeys(_rank_names(tensors), number)}
    return files


def forms_of(tensors: Mapping[str, Assembly | torch.Tensor]) -> tuple[TensorForm, ...]:
    """Return name, dtype and shape of one file's tensors."""
    return tuple(
        TensorForm(name, leaf.dtype if isinstance(leaf, Assembly) else dtype_name(leaf.dtype), tuple(leaf.shape))
        for name, leaf in tensors.items()
    )


def _rank_names(names: Iterable[str]) -> list[str]:
    """Return the names under which the model reads the rank's number: its own, and those of its attention layers."""
    layers = dict.fromkeys(match[1] for match in map(_LAYER.fullmatch, names) if match is not None)
    return [*(f"{layer}.self_attn.{_RANK}" for layer in layers), _RANK]


class _Tensors:
    """The tag's tensors, with the interface of a Hugging Face directory."""

    def __init__(self, tag: HuggingFaceTag) -> None:
        self.where, self._tree = tag.where, tag.model_tree(Coordinates())

    @property
    def names(self) -> list[str]:
        return sorted(self._tree)

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> Assembly:
        saved = name if name in self._tree else (tied or {}).get(name, name)
        if saved not in self._tree:
            raise KeyMismatch(f"{self.where} has no tensor {name}; pass the config.json of its own model")
        return Assembly.of(self._tree[saved])
