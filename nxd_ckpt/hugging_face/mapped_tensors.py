"""The two sides of an export: a tensor of the tag, and the Hugging Face tensors that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.hugging_face.hf_slice import HfSlice
from nxd_ckpt.hugging_face.mapping import Match


@dataclass(frozen=True)
class NxdTensor:
    """A whole tensor of the tag: its rule, the pipeline stage that holds it, and its cut over the stage's ranks.

    ``local_shape`` is the shape on each rank, ``shape`` the whole one.
    """

    match: Match
    pp_rank: int
    dtype: str
    local_shape: tuple[int, ...]
    shape: tuple[int, ...]
    partition: Partition

    @property
    def name(self) -> str:
        return self.match.name

    @property
    def spec(self) -> ParameterSpec:
        """The whole tensor on a single rank."""
        return ParameterSpec(self.dtype, self.shape, Partition(expert=self.partition.expert), explicit=True)


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor, and the tensor of the tag that holds it.

    With ``entry`` it is the optimizer's state of that name for the tensor, which is cut like the tensor.
    """

    hf_slice: HfSlice
    dtype: str
    source: NxdTensor
    entry: str | None = None

    @property
    def weight(self) -> str:
        """Name of the Hugging Face tensor that it is, or is the state of."""
        return self.hf_slice.name

    @property
    def name(self) -> str:
        return self.weight if self.entry is None else f"{self.weight}/{self.entry}"

    @property
    def source_name(self) -> str:
        return self.source.name if self.entry is None else f"{self.source.name}/{self.entry}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.hf_slice.shape

    @property
    def layout(self) -> Assembly:
        """The tensor without its elements."""
        return Assembly(self.dtype, self.shape, ())
