"""What a rank reads of a checkpoint of another size: its own blocks, each verified, and little else."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Partition, Topology, errors
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.reshard.ranks import fresh, load_rank, save_job
from tests.reshard.whole import Layout, Weight, expected
from tests.support.damage import flip
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal
from tests.tag.equality import difference

MIB = 2**20
BLOCK = 4 * MIB
SHAPE = (4096, 2048)
"""32 MiB of float32, 8 KiB a row: two tensor-parallel ranks save four blocks each."""
WEIGHTS = [Weight("wide", SHAPE)]
MODEL_OF_RANK_0 = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"


def layout(dim: int | None, **sizes: Any) -> Layout:
    topology = Topology(**sizes)
    partition = Partition() if dim is None else Partition(dim, num_partitions=topology.tp)
    return Layout(topology, {"wide": partition}, (("wide",),))


class Metered(HookedStorage):
    """Counts the bytes that are read of each file of a tag."""

    def __init__(self, directory: Path) -> None:
        super().__init__(LocalStorage(str(directory)), self._count)
        self.nbytes: Counter[str] = Counter()

    def _count(self, operation: Operation) -> None:
        whole = operation.name == "read"
        self.nbytes[operation.key.partition("/")[2]] += (
            self.inner.size(operation.key) if whole else operation.nbytes
        )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``wide`` cut in rows over tp=2, its ZeRO-1 state over dp=2 besides: a shard has two blocks."""
    directory = tmp_path_factory.mktemp("kept")
    save_job(directory, WEIGHTS, layout(0, dp=2, tp=2))
    return directory


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which the last block of rank 0's rows (8 to 16 MiB of the whole) has a flipped bit."""
    directory = tmp_path_factory.mktemp("damaged")
    save_job(directory, WEIGHTS, layout(0, tp=2))
    flip(directory / "step_1" / MODEL_OF_RANK_0, 14 * MIB)
    return directory


def test_damage_in_a_block_that_is_needed(damaged: Path) -> None:
    """The second of four ranks needs it: the tensor is named, and nothing changed."""
    live_layout = layout(0, tp=4)
    live = fresh(WEIGHTS, live_layout, live_layout.topology.at(1))
    before = live.held()
    with pytest.raises(errors.DigestMismatch, match="wide"):
        load_rank(damaged, live)
    assert None is difference(before, live.held())


@pytest.mark.parametrize("verify", [True, False])
def test_damage_in_a_block_that_is_not_needed(damaged: Path, verify: bool) -> None:
    """The other ranks load, of the damaged file and of the other one: they neither need nor read it."""
    live_layout = layout(0, tp=4)
    for rank in (0, 2):
        at = live_layout.topology.at(rank)
        live = fresh(WEIGHTS, live_layout, at)
        load_rank(damaged, live, verify=verify)
        assert None is difference(expected(WEIGHTS, live_layout, at), live.held())


def refused(rank: int, directory: Path) -> tuple[str, str | None]:
    """The class of the error that a load raises on this rank, and what it changed here (None: nothing)."""
    of_four = layout(0, tp=4)
    live = fresh(WEIGHTS, of_four, of_four.topology.at(rank))
    before = live.held()
    said = refusal(lambda: load_rank(directory, live, timeout=600.0))
    return said.partition(":")[0], difference(before, live.held())


@pytest.mark.xla
def test_damage_that_one_rank_needs_stops_all(xla_ranks: RankPool, damaged: Path) -> None:
    """Only the second of four ranks reads the damaged block; all four raise, and nothing changed on any."""
    outcomes = xla_ranks.run(refused, damaged)
    assert [("DigestMismatch", None)] * 4 == outcomes


@pytest.mark.parametrize(
    ("sizes", "dim", "wanted", "verified"),
    [
        ({"tp": 4}, 0, (8, 0), (8, 0)),
        ({"tp": 3}, None, (16, 16), (16, 16)),
        ({"dp": 2, "tp": 2}, 1, (16, 16), (16, 16)),
    ],
    ids=["rows", "whole", "columns"],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_rank_reads_its_part_of_the_model(
    kept: Path, sizes: dict[str, int], dim: int | None, wanted: tuple[int, ...], verified: tuple[int, ...], verify: bool
) -> None:
    """Of each of the two model files what it wants, and to verify that, the blocks that hold it; both in MiB here.

    The 4 KiB between its columns of two rows are read too.
    """
    live_layout = layout(dim, **sizes)
    live, storage = fresh(WEIGHTS, live_layout, live_layout.topology), Metered(kept)
    Checkpointer(kept, topology=live.at, storage=storage).load(None, live.model, verify=verify)
    for tp_rank in range(2):
        read = storage.nbytes[f"model/dp_rank_00_tp_rank_{tp_rank:02}_pp_rank_00.pt"]
        least = (wanted[tp_rank] + (verified[tp_rank] if verify else 0)) * MIB
        assert least - MIB // 8 <= read <= least + MIB  # behind the last column of a piece nothing is read
    assert torch.equal(expected(WEIGHTS, live_layout, live.at)["model"]["wide"], live.held()["model"]["wide"])


def test_staggered_rows_are_read_from_two_shards(kept: Path) -> None:
    """The second of three shards has rows of all of two ranks' shards: it reads the blocks that its rows touch."""
    live_layout = layout(0, dp=3)
    at = live_layout.topology.at(1)
    live, storage = fresh(WEIGHTS, live_layout, at), Metered(kept)
    Checkpointer(kept, topology=at, storage=storage).load(None, None, live.optimizer, param_names=[["wide"]])
    read = {key: count for key, count in storage.nbytes.items() if key.startswith("optim/")}
    # Rows 1366 to 2732 of 4096; each saved shard has 1024 rows, 512 a block: blocks 2 to 5 of 8.
    for key in ("optim/dp_rank_01_tp_rank_00_pp_rank_00.pt", "optim/dp_rank_00_tp_rank_01_pp_rank_00.pt"):
        assert read.pop(key) <= 2 * 3 * 2 * BLOCK + MIB
    assert sum(read.values()) <= MIB
    assert None is difference(expected(WEIGHTS, live_layout, at)["optimizer"], live.held()["optimizer"])
