"""Grouped-query attention of NxD, whose key-value heads several tensor-parallel ranks share, on other sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, errors, load_checkpoint
from tests.interop.saving import save_as_every_rank

WIDTH, QUERIES, KEYS = 3, 8, 4


class GQAQKVColumnParallelLinear(torch.nn.Module):
    """The parameters, attributes and sizes of NxD's module, on one rank; ``copies`` is its ``kv_size_multiplier``."""

    def __init__(self, tp: int, rank: int, copies: int, fuse: bool, full: bool) -> None:
        super().__init__()
        self.kv_size_multiplier, self.fuse_qkv = copies, fuse
        self.q_output_size_per_partition, self.kv_output_size_per_partition = QUERIES // tp, KEYS * copies // tp
        whole = torch.arange(float((QUERIES + 2 * KEYS) * WIDTH)).reshape(-1, WIDTH) * full
        query, key, value = whole.split([QUERIES, KEYS, KEYS])
        parts = tp // copies
        held = [query.chunk(tp)[rank], key.chunk(parts)[rank % parts], value.chunk(parts)[rank % parts]]
        if fuse:
            self.weight_qkv = torch.nn.Parameter(torch.cat(held))
            return
        for name, part in zip("qkv", held, strict=True):
            parameter = torch.nn.Parameter(part.clone())
            vars(parameter).update(
                tensor_model_parallel=True, partition_dim=0, partition_stride=1, num_partitions=tp, rank_ordering=None
            )
            setattr(self, f"weight_{name}", parameter)


def attention(tp: int, rank: int, copies: int, fuse: bool, full: bool = True) -> torch.nn.Module:
    model = torch.nn.Module()
    model.qkv = GQAQKVColumnParallelLinear(tp, rank, copies, fuse, full)
    return model


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    """With moments that are the parameters' values, and 1 more."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moment = parameter.detach()
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moment + 1, "exp_avg_sq": moment + 2}
    return optimizer


def save(directory: Path, tp: int, copies: int, fuse: bool) -> None:
    def what(rank: int) -> dict[str, Any]:
        model = attention(tp, rank, copies, fuse)
        return {"model": model, "optimizer": trained(model)}

    save_as_every_rank(directory, "tag", [Topology(tp=tp, rank=rank) for rank in range(tp)], what, durable=False)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(("tp", "copies"), [(2, 2), (4, 4), (2, 1), (1, 1)])
def test_heads_of_one_part_load_on_other_sizes(tmp_path: Path, tp: int, copies: int, fuse: bool) -> None:
    """Where all ranks share all heads, or none: the module says it, at the save and at the load."""
    save(tmp_path, tp, copies, fuse)
    sizes = {(1, 1), (2, 2), (2, 1), (4, 4), (4, 1)}
    for live_tp, live_copies in sorted(size for size in sizes if size[0] != tp or size == (tp, copies)):
        for rank in range(live_tp):
            model = attention(live_tp, rank, live_copies, fuse, full=False)
            optimizer = torch.optim.AdamW(model.parameters())
            load_checkpoint(tmp_path, "tag", model, optimizer, topology=Topology(tp=live_tp, rank=rank))
            expected = attention(live_tp, rank, live_copies, fuse)
            for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(wanted, found), name
                assert torch.equal(wanted + 1, optimizer.state[found]["exp_avg"]), name


def test_heads_of_several_parts_load_on_the_same_sizes_only(tmp_path: Path) -> None:
    """Query heads are in another order for each number of parts: on other sizes q would meet a wrong k."""
    save(tmp_path, 4, 2, fuse=False)
    same = attention(4, 3, 2, fuse=False, full=False)
    load_checkpoint(tmp_path, "tag", same, topology=Topology(tp=4, rank=3))
    expected = attention(4, 3, 2, fuse=False)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), same.parameters(), strict=True))
    for tp, copies in ((8, 4), (8, 2), (2, 1), (1, 1)):
        model = attention(tp, 0, copies, fuse=False, full=False)
        with pytest.raises(errors.CheckpointError):
            load_checkpoint(tmp_path, "tag", model, topology=Topology(tp=tp))
        assert not any(parameter.any() for parameter in model.parameters())
