"""Parameters without NxD's attributes, which ``.to(device)`` drops: their layers say how they are cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_ckpt import Topology, convert, load_checkpoint
from nxd_ckpt.errors import TopologyMismatch
from tests.interop.saving import save_as_every_rank


class ColumnParallelLinear(nn.Module):
    """What NxD's has on one rank, as far as it tells a cut."""

    def __init__(self, tp: int, *, stride: int = 1, gather: bool = False, padding: int = 0) -> None:
        super().__init__()
        self.stride, self.output_size_per_partition, self.weight_partition_dim = stride, 8 // tp, 0
        self.weight = nn.Parameter(torch.zeros(8 // tp + padding, 3))
        self.bias = nn.Parameter(torch.zeros(8 if gather else 8 // tp + padding))


class RowParallelLinear(nn.Module):
    """Its bias is added after the sum, so each rank has it."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(3, 8 // tp)), nn.Parameter(torch.zeros(3))


class ExpertFusedRowParallelLinear(RowParallelLinear):
    """A subclass with another dimension, as NxD's for experts."""

    def __init__(self, tp: int) -> None:
        super().__init__(tp)
        self.weight_partition_dim = 1
        self.weight, self.bias = nn.Parameter(torch.zeros(2, 8 // tp, 3)), None  # type: ignore[assignment]


class OutputChannelParallelConv2d(nn.Module):
    """``stride`` is that of the convolution; the bias is cut, whether the output is gathered or not."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.stride, self.gather_output = 2, True
        self.weight, self.bias = nn.Parameter(torch.zeros(8 // tp, 3, 2, 2)), nn.Parameter(torch.zeros(8 // tp))


class ParallelEmbedding(nn.Module):
    """Cut along the embedding, not the vocabulary."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.weight_partition_dim = 1
        self.weight = nn.Parameter(torch.zeros(5, 8 // tp))


class GQAQKVColumnParallelLinear(nn.Module):
    """Three weights, of which ``copies`` ranks share each key and value head."""

    def __init__(self, tp: int, copies: int = 1) -> None:
        super().__init__()
        self.kv_size_multiplier = copies
        for name, rows in (("q", 8), ("k", 4 * copies), ("v", 4 * copies)):
            self.register_parameter(f"weight_{name}", nn.Parameter(torch.zeros(rows // tp, 3)))


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "column": ColumnParallelLinear,
    "fused": lambda tp: ColumnParallelLinear(tp, stride=2),
    "gathered": lambda tp: ColumnParallelLinear(tp, gather=True),
    "padded": lambda tp: ColumnParallelLinear(tp, padding=2 // tp),
    "row": RowParallelLinear,
    "experts": ExpertFusedRowParallelLinear,
    "conv": OutputChannelParallelConv2d,
    "embedding": ParallelEmbedding,
    "attention": GQAQKVColumnParallelLinear,
    "shared heads": lambda tp: GQAQKVColumnParallelLinear(tp, tp),
}


def whole(name: str) -> dict[str, torch.Tensor]:
    """The parameters of a job with one rank."""
    held = dict(LAYERS[name](1).named_parameters())
    return {key: torch.arange(float(one.numel())).view(one.shape) for key, one in held.items()}


def part(name: str, value: torch.Tensor, like: torch.Tensor, at: Topology) -> torch.Tensor:
    """What a rank holds of it, by what NxD's layers compute."""
    dims = [dim for dim in range(value.dim()) if value.shape[dim] != like.shape[dim]]
    blocks = value.chunk(2 if name == "fused" else 1, *dims)
    return torch.cat([block.chunk(at.tp, *dims)[at.tp_rank] for block in blocks], *dims) if dims else value


def live(name: str, at: Topology, *, is_zero: bool) -> nn.Module:
    layer = LAYERS[name](at.tp)
    for key, parameter in layer.named_parameters():
        parameter.data = part(name, whole(name)[key], parameter, at).clone() * (not is_zero)
    return layer


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_zero", [False, True])
def test_a_tag_is_cut_as_its_layers_cut(tmp_path: Path, name: str, is_zero: bool) -> None:
    """Also of what is zero on all ranks: by a conversion, without a model, and by a load on other sizes."""
    topologies = [Topology(tp=2).at(rank) for rank in range(2)]
    models = [live(name, at, is_zero=is_zero) for at in topologies]
    save_as_every_rank(tmp_path, "t", topologies, lambda rank: {"model": models[rank]}, durable=False)
    convert(tmp_path / "t", tmp_path / "one", to="tag", tp=1)
    held: dict[str, Any] = {}
    load_checkpoint(tmp_path, "one", held)
    expected = {key: value * (not is_zero) for key, value in whole(name).items()}
    assert {key: value.tolist() for key, value in expected.items()} == {key: held[key].tolist() for key in held}
    for rank in range(4):
        at = Topology(tp=4).at(rank)
        if name != "padded":  # there to another size for each number of ranks
            model = LAYERS[name](4)
            load_checkpoint(tmp_path, "t", model, topology=at)
            wanted = dict(live(name, at, is_zero=is_zero).named_parameters())
            assert all(torch.equal(wanted[key], one) for key, one in model.named_parameters())


def test_fused_rows_that_were_padded_are_cut_in_no_known_way(tmp_path: Path) -> None:
    """The padding is at the end, not in each of the tensors that lie side by side."""
    topologies = [Topology(tp=2).at(rank) for rank in range(2)]
    model = ColumnParallelLinear(2, stride=2, padding=2)
    save_as_every_rank(tmp_path, "t", topologies, lambda rank: {"model": model}, durable=False)
    with pytest.raises(TopologyMismatch, match=r"the cut of weight, bias over 2 tensor-parallel ranks is not known"):
        convert(tmp_path / "t", tmp_path / "one", to="tag", tp=1)
    load_checkpoint(tmp_path, "t", model, topology=topologies[1])
