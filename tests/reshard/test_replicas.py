"""Replicas that load together: each verifies a share, or with ``share_reads`` reads one; all raise one's error."""

import errno
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nxd_ckpt import Checkpointer, Partition, Topology, close_checkpointers, save_checkpoint
from nxd_ckpt.formats.memory import byte_view
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.reshard.ranks import fresh, save_job
from tests.reshard.whole import Layout, Weight, expected
from tests.support.damage import flip
from tests.support.rank_pool import RankPool, WorkerDied
from tests.tag.equality import difference

RANKS = 4
LARGEST = 256 * 2**10
WEIGHTS = [
    *[Weight(f"wide{number}", (256, 256)) for number in range(3)],
    Weight("narrow", (256, 128), torch.bfloat16),
    Weight("experts", (4, 128, 128)),
    Weight("seen", (), torch.int64, "buffer"),
    Weight("mask", (7, 3), torch.bool, "buffer"),
    Weight("none", (0, 5), kind="frozen"),
]
"""A model of 1 MiB, its largest tensors of 256 KiB, and twice that in the moments of its optimizer."""

SHARED: dict[str, Any] = {"share_reads": True}


def layout(dp: int = 1, tp: int = 1, ep: int = 1, *, zero1: bool = False) -> Layout:
    """A job of these sizes, by default with a plain optimizer."""
    topology = Topology(dp=dp, tp=tp, ep=ep)
    rows = Partition(0, num_partitions=topology.tp) if topology.tp > 1 else Partition()
    cuts = {weight.name: rows if weight.name.startswith("wide") else Partition() for weight in WEIGHTS}
    columns = 1 if topology.tp > 1 else None
    cuts["experts"] = Partition(columns, num_partitions=topology.tp, expert=topology.ep > 1)
    trained = tuple(weight.name for weight in WEIGHTS if weight.kind == "parameter")
    return Layout(topology, cuts, (trained,), zero1=zero1)


@dataclass(frozen=True)
class Loading:
    """What the ranks of a job do. ``options``, and the name that the model ``lacks``, are by rank or for all.

    Without complete models the optimizer is left out. The storage of rank ``fails`` raises, or with ``dies`` kills it,
    once the rank has read ``after`` of the largest tensors.
    """

    directory: Path
    layout: Layout
    options: Sequence[dict[str, Any]] = ({},)
    lacks: Sequence[str | None] = (None,)
    fails: int | None = None
    after: int = 1
    dies: bool = False
    timeout: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """How a load ended on one rank: the error's class (None for none) and text, and the bytes that were read.

    ``wrong`` is the first thing that is not as it should be: as saved, or after an error as before.
    """

    kind: str | None
    told: str
    wrong: str | None
    nbytes: int


class Meter(HookedStorage):
    """Counts bytes, but for files that are read whole when they are opened; fails as :class:`Loading` says."""

    def __init__(self, what: Loading, rank: int) -> None:
        super().__init__(LocalStorage(str(what.directory)), self._count)
        self.nbytes, self._dies = 0, what.dies
        self._left = what.after if rank == what.fails else math.inf

    def _count(self, operation: Operation) -> None:
        self.nbytes += operation.nbytes
        if operation.nbytes >= LARGEST:
            self._left -= 1
        if self._left < 0 and self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left < 0:
            raise OSError(errno.EIO, "the disk is gone")


def load(rank: int, what: Loading) -> Outcome:
    """Load as this rank of the job over other values, one parameter of which does not lie in memory row by row."""
    at, lacking = what.layout.topology.at(rank), what.lacks[rank % len(what.lacks)]
    weights = [weight for weight in WEIGHTS if weight.name != lacking]
    live, storage = fresh(weights, what.layout, at), Meter(what, rank)
    parameter = live.stage.get_parameter("wide1")
    parameter.data = parameter.data.t().contiguous().t()
    before = picture(live.held())
    optimizer = live.optimizer if what.lacks == (None,) else None
    try:
        checkpointer = Checkpointer(what.directory, topology=at, storage=storage, timeout=what.timeout)
        options = what.options[rank % len(what.options)]
        # No file here is as large as a real job's: small ones are read once, whole, by each rank.
        with mock.patch("nxd_ckpt.tag.opened._SMALL", 0):
            checkpointer.load("step_1", live.model, optimizer, **options)
    except Exception as error:
        return Outcome(type(error).__name__, str(error), difference(before, picture(live.held())), storage.nbytes)
    wanted = picture(expected(weights, what.layout, at))
    parts = list(wanted) if optimizer is not None else ["model"]
    held = picture(live.held())
    wrong = difference([wanted[part] for part in parts], [held[part] for part in parts])
    return Outcome(None, "", wrong, storage.nbytes)


def picture(tree: Any) -> Any:
    """The tree with dtype, shape and bytes in place of tensors."""
    if isinstance(tree, dict):
        return {key: picture(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [picture(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape), bytes(byte_view(tree.detach().contiguous()))
    return tree


SAVED = {
    "plain": layout(),
    "xser": layout(),
    "tp2": layout(tp=2),
    "tp4": layout(tp=4),
    "ep2": layout(dp=2, ep=2),
    "zero1": layout(dp=4, zero1=True),
}


def save(directory: Path, name: str) -> Path:
    save_job(directory, WEIGHTS, SAVED[name], use_xser=name == "xser")
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every kind, by name."""
    return {name: save(tmp_path_factory.mktemp(name), name) for name in SAVED}


def nbytes_of(tree: Any) -> int:
    return sum(tensor.nbytes for _, tensor in iter_tensors(tree))


@pytest.mark.parametrize(
    ("name", "job", "replicas"),
    [
        ("plain", layout(dp=4), 4),
        ("xser", layout(dp=4), 4),
        ("zero1", layout(dp=4, zero1=True), 4),
        ("tp2", layout(dp=4), 4),
        ("tp2", layout(dp=2, tp=2), 2),
        ("ep2", layout(dp=4, ep=2), 2),
        ("tp4", layout(tp=4), 1),
    ],
    ids=["plain", "xser", "zero1", "other tp", "tp", "ep", "no replicas"],
)
@pytest.mark.one_in(2)
def test_what_replicas_read_together(
    gloo_ranks: RankPool, saved: dict[str, Path], name: str, job: Layout, replicas: int
) -> None:
    """They verify each byte once, and read it once if they share that as well; a ZeRO-1 shard is for its rank alone.

    ReplicaShares differ by a tensor at most. Every rank gets every bit, whichever way.
    """
    trees = [expected(WEIGHTS, job, at) for at in job.ranks]
    alone = sum(nbytes_of(tree["optimizer"]) for tree in trees) if job.zero1 else 0
    common = sum(map(nbytes_of, trees)) - alone

    def read(verify: bool, share_reads: bool | None) -> list[int]:
        outcomes = gloo_ranks.run(load, Loading(saved[name], job, [{"verify": verify, "share_reads": share_reads}]))
        assert [(None, None)] * RANKS == [(outcome.kind, outcome.wrong) for outcome in outcomes]
        return [outcome.nbytes for outcome in outcomes]

    # Without a digest pass the files of xser's tensors are opened, too, to see that they are of this save.
    opening = {
        verify: sum(read(verify, False)) - common // replicas * (verify + replicas) - alone * (1 + verify)
        for verify in (False, True)
    }
    assert opening[True] <= opening[False]
    for verify, share_reads, times in (
        (False, None, replicas),
        (False, True, 1),
        (True, None, 1 + replicas),
        (True, True, 2),
    ):
        found = read(verify, share_reads)
        assert common // replicas * times + alone * (1 + verify) == sum(found) - opening[verify]
        assert max(found) - min(found) <= 2 * LARGEST


def load_onto_device(rank: int, directory: Path) -> str | None:
    """Where a model on this rank's XLA device differs from the saved one."""
    import torch_xla

    at = Topology(dp=RANKS, rank=rank)
    wanted = expected(WEIGHTS, layout(dp=RANKS), at)["model"]
    model = {name: torch.zeros_like(value).to(torch_xla.device()) for name, value in wanted.items()}
    Checkpointer(directory, topology=at).load("step_1", model, share_reads=True)
    return difference(picture(wanted), picture({name: value.cpu() for name, value in model.items()}))


@pytest.mark.xla
def test_what_is_read_together_reaches_devices(xla_ranks: RankPool, saved: dict[str, Path]) -> None:
    """It is broadcast on the host, and then transferred."""
    assert [None] * RANKS == xla_ranks.run(load_onto_device, saved["plain"])


@pytest.mark.parametrize("share_reads", [True, False])
def test_replicas_with_different_models_do_not_share(
    gloo_ranks: RankPool, saved: dict[str, Path], share_reads: bool
) -> None:
    """Each verifies and reads what it has itself."""
    options = {"strict": False, "share_reads": share_reads}
    what = Loading(saved["plain"], layout(dp=4), [options], [None, None, "narrow", None])
    outcomes = gloo_ranks.run(load, what)
    assert [(None, None)] * RANKS == [(outcome.kind, outcome.wrong) for outcome in outcomes]
    model = expected(WEIGHTS, what.layout, what.layout.topology)["model"]
    for lacking, outcome in zip(what.lacks, outcomes, strict=True):
        own = nbytes_of({name: leaf for name, leaf in model.items() if name != lacking})
        assert 2 * own <= outcome.nbytes


@pytest.mark.parametrize("share_reads", [True, None])
def test_damage_that_one_replica_finds(gloo_ranks: RankPool, tmp_path: Path, share_reads: bool | None) -> None:
    """All of them raise what it raised, and nothing changed on any."""
    directory = save(tmp_path, "xser")
    damaged = directory / "step_1" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors" / "tensor_2.pt"
    flip(damaged)
    outcomes = gloo_ranks.run(load, Loading(directory, layout(dp=4), [{"share_reads": share_reads}]))
    assert [("DigestMismatch", None)] * RANKS == [(outcome.kind, outcome.wrong) for outcome in outcomes]
    (finder,) = [rank for rank, outcome in enumerate(outcomes) if not outcome.told.startswith("on rank")]
    told = outcomes[finder].told
    assert "model/wide2" in told
    assert [f"on rank {finder}: {told}"] * (RANKS - 1) == [one.told for one in outcomes if one.told != told]


@pytest.mark.parametrize("fails", range(RANKS))
def test_a_reader_that_fails_in_the_middle(gloo_ranks: RankPool, saved: dict[str, Path], fails: int) -> None:
    """All ranks raise its error, though their timeout is far; and the same processes load the next time."""
    what = Loading(saved["plain"], layout(dp=4), [SHARED | {"verify": False}], fails=fails)
    outcomes = gloo_ranks.run(load, what)
    own = ("StorageError", "OSError: [Errno 5] the disk is gone")
    partly = "The live state is partly overwritten: load another tag before training on"
    others = ("StorageError", f"on rank {fails}: {own[1]}. {partly}")
    assert [own if rank == fails else others for rank in range(RANKS)] == [(one.kind, one.told) for one in outcomes]
    assert [None] * RANKS == [one.kind for one in gloo_ranks.run(load, Loading(saved["plain"], layout(dp=4)))]


class Picky(torch.nn.Module):
    """Has state beside its tensors, and may refuse what is loaded."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses = refuses

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        if self.refuses:
            raise MemoryError("no room for it")


def picky_model(refuses: bool) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(9, 9), Picky(refuses), torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))


def load_picky(rank: int, directory: Path, refuses: int) -> str:
    """The error of a load; the next one, which no rank refuses, must not fail."""
    checkpointer = Checkpointer(directory, topology=Topology(dp=RANKS, rank=rank))
    with pytest.raises(Exception, match="no room") as caught:
        checkpointer.load("step_1", picky_model(rank == refuses), **SHARED)
    checkpointer.load("step_1", picky_model(False), **SHARED)
    return type(caught.value).__name__


@pytest.mark.parametrize("refuses", range(RANKS))
def test_a_replica_that_fails_at_something_else(gloo_ranks: RankPool, tmp_path: Path, refuses: int) -> None:
    """The others do not wait for what it would have read, raise its error, and are in step the next time."""
    save_checkpoint(tmp_path, "step_1", picky_model(False), durable=False)
    close_checkpointers()
    found = gloo_ranks.run(load_picky, tmp_path, refuses)
    assert ["HostExhausted"] * RANKS == found


def test_a_replica_that_does_not_verify(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """The others verify all by themselves: what is damaged is found before anything changes, whoever would have."""
    directory = save(tmp_path, "xser")
    for number in range(4):
        damaged = directory / "step_1/model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors" / f"tensor_{number}.pt"
        flip(damaged)
        options = [{"verify": rank != number} | SHARED for rank in range(RANKS)]
        outcomes = gloo_ranks.run(load, Loading(directory, layout(dp=4), options))
        assert [("DigestMismatch", None)] * RANKS == [(outcome.kind, outcome.wrong) for outcome in outcomes]
        flip(damaged)


def test_a_replica_that_dies_in_the_middle(gloo_ranks: RankPool, saved: dict[str, Path]) -> None:
    """The others raise when they have waited for it for their timeout."""
    what = Loading(saved["plain"], layout(dp=4), [SHARED | {"verify": False}], fails=2, dies=True, timeout=4.0)
    outcomes = gloo_ranks.run(load, what, return_errors=True)
    assert WorkerDied is type(outcomes.pop(2))
    assert ["PeerTimeout"] * (RANKS - 1) == [outcome.kind for outcome in outcomes]
