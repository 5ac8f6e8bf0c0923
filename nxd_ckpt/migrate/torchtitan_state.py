"""A tag as the state that TorchTitan's trainer saves with torch DCP: its names, its order of rows, its counters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.torchtitan_names import TorchTitanNames, rows_in_pairs
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag
from nxd_ckpt.reshard.dcp_state import DcpState
from nxd_ckpt.reshard.whole_tag import WholeTag

NAMES = DcpNames(model="", optim="optimizer", flat_optimizer=True, content="")


def counters(step: int, tokens: int) -> dict[str, Any]:
    """Return the other entries of its state dict, after ``step`` steps on ``tokens`` tokens."""
    return {"train_state": {"step": step, "ntokens_seen": tokens}, "lr_scheduler": {"last_epoch": step}}


class TorchTitanState(DcpState):
    """The state of the tag ``opened`` with TorchTitan's names; heads have ``head_dim`` rows."""

    def __init__(self, opened: HuggingFaceTag, names: TorchTitanNames, head_dim: int) -> None:
        super().__init__(opened, WholeTag(opened), NAMES)
        self._titan, self._head_dim = names, head_dim

    def leaf(self, name: str) -> Assembly | torch.Tensor:
        """Return the assembly of a tensor.

        If its rows lie in pairs, it has the four dimensions (head, row, half, column), which order them.
        """
        leaf, source = super().leaf(name), self.tensors[name].source
        if isinstance(leaf, Assembly) and isinstance(source, str) and self._titan.has_pairs(source):
            return _in_pairs(leaf, self._head_dim)
        return leaf


def _in_pairs(matrix: Assembly, head_dim: int) -> Assembly:
    rows, columns = matrix.shape
    fragments: list[Fragment] = []
    for fragment in matrix.fragments:
        (first, column), (count, width) = fragment.target.offset, fragment.target.size
        stub = _between_ones(fragment.stub)
        for run in rows_in_pairs(first, count, column, width, head_dim):
            row = fragment.source.offset[0] + run.first - first
            source = Box((0, row, 0, fragment.source.offset[1]), (1, run.length, 1, width))
            fragments.append(Fragment(stub, source, run.box))
    return Assembly(matrix.dtype, (rows // head_dim, head_dim // 2, 2, columns), tuple(fragments))


def _between_ones(stub: TensorStub) -> TensorStub:
    """Return the matrix with two more dimensions, of one element each: (1, rows, 1, columns)."""
    (rows, columns), (row, column) = stub.shape, stub.stride
    return replace(stub, shape=(1, rows, 1, columns), stride=(rows * row, row, row, column))
