"""Collectives across four emulated ranks give what their definition says."""

from typing import Any

import pytest
import torch

from nxd_ckpt.emulation import CollectiveMismatch, NotEmulated
from tests.support.rank_pool import RankPool, WorkerError

pytestmark = pytest.mark.xla

WORLD = 4
PAIRS = [[0, 2], [3, 1]]  # neither contiguous nor ascending


def values(rank: int, rows: int = 4) -> torch.Tensor:
    """What ``rank`` brings: different everywhere, and summed exactly."""
    return torch.arange(rows * 2.0).reshape(rows, 2) + 100 * rank


def total(ranks: list[int], rows: int = 4) -> torch.Tensor:
    return torch.stack([values(rank, rows) for rank in ranks]).sum(0)


def group_of(rank: int) -> list[int]:
    return next(group for group in PAIRS if rank in group)


def runtime_facts(rank: int) -> dict[str, Any]:
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    return {
        "xr": (xr.global_ordinal(), xr.world_size(), xr.global_device_count()),
        "process": (xr.process_index(), xr.process_count()),
        "local": (xr.local_ordinal(), xr.local_process_count(), xr.local_device_count()),
        "xm": (xm.get_ordinal(), xm.xrt_world_size(), xm.is_master_ordinal()),
        "dist": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
    }


def test_who_and_how_many_is_answered_everywhere_alike(xla_ranks: RankPool) -> None:
    """Every way to ask torch-xla or c10d who and how many gives the emulated world's answer."""
    expected = [
        {
            "xr": (rank, WORLD, WORLD),
            "process": (rank, WORLD),
            "local": (rank, WORLD, WORLD),
            "xm": (rank, WORLD, rank == 0),
            "dist": (rank, WORLD, "xla"),
        }
        for rank in range(WORLD)
    ]
    assert expected == xla_ranks.run(runtime_facts)


def xm_collectives(rank: int) -> dict[str, torch.Tensor]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    mine = values(rank).to(torch_xla.device())
    in_place = [mine.clone(), mine.clone() * 2]
    xm.all_reduce(xm.REDUCE_SUM, in_place, scale=0.5, groups=PAIRS)
    scatter = {"scale": 0.5, "scatter_dim": 0, "shard_count": 2, "groups": PAIRS}
    root = mine.clone()
    xm.collective_broadcast([root], root_ordinal=2)
    return {
        "all_reduce": xm.all_reduce(xm.REDUCE_SUM, mine).cpu(),
        "all_reduce max": xm.all_reduce(xm.REDUCE_MAX, mine, groups=PAIRS).cpu(),
        "all_reduce list 0": in_place[0].cpu(),
        "all_reduce list 1": in_place[1].cpu(),
        "all_gather": xm.all_gather(mine, dim=1, groups=PAIRS).cpu(),
        "all_gather unpinned": xm.all_gather(mine, dim=1, groups=PAIRS, pin_layout=False).cpu(),
        "all_gather bucketized": xm.all_gather_bucketized([mine, mine], 1, PAIRS)[1].cpu(),
        "reduce_scatter": xm.reduce_scatter(xm.REDUCE_SUM, mine, **scatter).cpu(),
        "reduce_scatter bucketized": xm.reduce_scatter_bucketized(xm.REDUCE_SUM, [mine, mine], **scatter)[1].cpu(),
        "all_to_all": xm.all_to_all(mine, 0, 0, 2, PAIRS).cpu(),
        "collective_permute": xm.collective_permute(mine, [[0, 1], [1, 0]]).cpu(),
        "collective_broadcast": root.cpu(),
    }


def sums_of_own_groups(rank: int) -> list[torch.Tensor]:
    import torch.distributed as dist
    import torch_xla
    import torch_xla.core.xla_model as xm

    group: Any = dist.new_group(sorted(group_of(rank)))
    mine = values(rank).to(torch_xla.device())
    again = xm.all_reduce(xm.REDUCE_SUM, mine, groups=group._mesh).cpu()
    dist.all_reduce(mine, group=group)
    return [mine.cpu(), again]


def test_each_rank_makes_its_own_group_alone(xla_ranks: RankPool) -> None:
    """Groups are made on the backend "xla" and passed to xla_model, by neuronx-distributed's calls.

    c10d then gives those of other ranks the same name.
    """
    for rank, summed in enumerate(xla_ranks.run(sums_of_own_groups)):
        assert all(torch.equal(total(group_of(rank)), one) for one in summed)


def test_xla_model_collectives_work_across_processes(xla_ranks: RankPool) -> None:
    """Each function of xla_model: plain, in place, grouped, scaled and bucketized; order is the group's."""
    for rank, results in enumerate(xla_ranks.run(xm_collectives)):
        group = group_of(rank)
        index = group.index(rank)
        half = slice(2 * index, 2 * index + 2)
        gathered = torch.cat([values(peer) for peer in group], 1)
        expected = {
            "all_reduce": total([0, 1, 2, 3]),
            "all_reduce max": values(max(group)),
            "all_reduce list 0": total(group) * 0.5,
            "all_reduce list 1": total(group),
            "all_gather": gathered,
            "all_gather unpinned": gathered,
            "all_gather bucketized": gathered,
            "reduce_scatter": total(group)[half] * 0.5,
            "reduce_scatter bucketized": total(group)[half] * 0.5,
            "all_to_all": torch.cat([values(peer)[half] for peer in group]),
            "collective_permute": values(1 - rank) if rank < 2 else torch.zeros(4, 2),
            "collective_broadcast": values(2),
        }
        assert expected.keys() == results.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, results[name]), f"{name} on rank {rank}"


def c10d_collectives(rank: int) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    import torch_xla

    device = torch_xla.device()
    mine = values(rank).to(device)
    groups = [dist.new_group(sorted(group)) for group in PAIRS]
    group = groups[0 if rank in PAIRS[0] else 1]
    summed, rooted, reduced = mine.clone(), mine.clone(), mine.clone()
    dist.all_reduce(summed, group=group)
    dist.broadcast(rooted, src=3)
    dist.reduce(reduced, dst=1)
    parts = [torch.zeros_like(mine) for _ in range(WORLD)]
    dist.all_gather(parts, mine)
    gathered = torch.zeros(8, 2, device=device)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    shard = torch.zeros(1, 2, device=device)
    dist.reduce_scatter_tensor(shard, mine)
    exchanged = torch.zeros_like(mine)
    dist.all_to_all_single(exchanged, mine)
    scattered = torch.zeros_like(mine)
    dist.scatter(scattered, [mine + i for i in range(WORLD)] if rank == 0 else None, src=0)
    received = torch.zeros_like(mine)
    # Each receives before it sends, which blocking calls would not survive.
    exchange = [dist.P2POp(dist.irecv, received, rank ^ 1), dist.P2POp(dist.isend, mine, rank ^ 1)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
    dist.barrier()
    tensors = {
        "all_reduce": summed,
        "broadcast": rooted,
        "reduce": reduced,
        "all_gather": torch.stack(parts),
        "all_gather_into_tensor": gathered,
        "reduce_scatter_tensor": shard,
        "all_to_all_single": exchanged,
        "scatter": scattered,
        "irecv": received,
        "functional all_reduce": functional.all_reduce(mine, "sum", group),
        "functional all_gather": functional.all_gather_tensor(mine, 0, group),
        "functional reduce_scatter": functional.reduce_scatter_tensor(mine, "sum", 0, group),
        "functional broadcast": functional.broadcast(mine, 3, list(range(WORLD))),
    }
    return {"objects": objects} | {name: tensor.cpu() for name, tensor in tensors.items()}


def test_torch_distributed_collectives_work_on_xla_tensors(xla_ranks: RankPool) -> None:
    """torch.distributed on XLA tensors: all ranks, subgroups, objects, point to point, functional forms."""
    everyone = [0, 1, 2, 3]
    for rank, results in enumerate(xla_ranks.run(c10d_collectives)):
        group = sorted(group_of(rank))
        half = slice(2 * group.index(rank), 2 * group.index(rank) + 2)
        concatenated = torch.cat([values(peer) for peer in group])
        expected = {
            "all_reduce": total(group),
            "broadcast": values(3),
            "reduce": total(everyone) if rank == 1 else values(rank),
            "all_gather": torch.stack([values(peer) for peer in everyone]),
            "all_gather_into_tensor": concatenated,
            "reduce_scatter_tensor": total(everyone)[rank : rank + 1],
            "all_to_all_single": torch.stack([values(peer)[rank] for peer in everyone]),
            "scatter": values(0) + rank,
            "irecv": values(rank ^ 1),
            "functional all_reduce": total(group),
            "functional all_gather": concatenated,
            "functional reduce_scatter": total(group)[half],
            "functional broadcast": values(3),
        }
        assert [{"rank": peer, "text": "x" * 1000 * peer} for peer in everyone] == results.pop("objects")
        assert expected.keys() == results.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, results[name]), f"{name} on rank {rank}"


def rendezvous(rank: int) -> tuple[list[bytes], float]:
    import torch_xla.core.xla_model as xm

    payloads = xm.rendezvous("lengths differ", b"ab" * rank)
    return payloads, xm.mesh_reduce("loss", float(rank), sum)


def test_rendezvous_carries_payloads(xla_ranks: RankPool) -> None:
    """xm.rendezvous gives each rank every payload, empty ones too; xm.mesh_reduce reduces over all ranks."""
    assert [([b"", b"ab", b"abab", b"ababab"], 6.0)] * WORLD == xla_ranks.run(rendezvous)


def spawned(rank: int) -> list[tuple[int, str]]:
    import torch_xla
    import torch_xla.distributed.xla_multiprocessing as xmp

    calls: list[tuple[int, str]] = []
    torch_xla.launch(lambda index, name: calls.append((index, name)), args=("launch",))
    xmp.spawn(lambda index, name: calls.append((index, name)), args=("spawn",))
    return calls


def test_spawn_runs_in_place(xla_ranks: RankPool) -> None:
    """torch_xla.launch and xmp.spawn call the function once in each rank's own process."""
    assert [[(rank, "launch"), (rank, "spawn")] for rank in range(WORLD)] == xla_ranks.run(spawned)


def unrouted(rank: int, what: str) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    mine = values(rank).to(torch_xla.device())
    if what == "send":
        xm.send(mine, 1)
    elif what == "compiled":
        torch.compile(lambda tensor: xm.all_reduce(xm.REDUCE_SUM, tensor), backend="openxla")(mine)
    else:
        xr.use_spmd()


@pytest.mark.parametrize(
    ("what", "named"), [("send", "'send'"), ("spmd", "SPMD"), ("compiled", "_c10d_functional.all_reduce")]
)
def test_unrouted_raises(xla_ranks: RankPool, what: str, named: str) -> None:
    """What is not routed between processes raises with its name; it never returns the local value."""
    for outcome in xla_ranks.run(unrouted, what, return_errors=True):
        assert isinstance(outcome, WorkerError)
        assert isinstance(outcome.cause, NotEmulated)
        assert named in str(outcome.cause)


def every_collective_primitive(rank: int) -> list[str]:
    import re

    from torch_xla import _XLAC

    names = [name for name in dir(_XLAC) if re.search(r"reduce_?|gather|scatter|all_to|permute|_send$|_recv$", name)]
    return [name for name in names if not getattr(_XLAC, name).__module__.startswith("nxd_ckpt.")]


def test_no_primitive_is_left_native(xla_ranks: RankPool) -> None:
    """Of torch-xla's collective primitives, none is left that would run within one process.

    The tokens only order collectives inside a graph.
    """
    expected = [["_get_all_reduce_token", "_set_all_reduce_token"]] * WORLD
    assert expected == xla_ranks.run(every_collective_primitive)


def mismatched(rank: int) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm

    xm.all_reduce(xm.REDUCE_SUM, torch.ones(3 if rank == 2 else 4, device=torch_xla.device()))


def test_mismatched_calls_raise_on_every_rank(xla_ranks: RankPool) -> None:
    """Ranks that meet with different shapes, a hang on devices, all get an error that names both."""
    for outcome in xla_ranks.run(mismatched, return_errors=True):
        assert isinstance(outcome.cause, CollectiveMismatch)
        assert "rank 2: all_reduce(sum) of float32 [3]" in str(outcome.cause)
        assert "rank 3: all_reduce(sum) of float32 [4]" in str(outcome.cause)
