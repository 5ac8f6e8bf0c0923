"""Sharing among replicas: who verifies what, on what terms, and a broadcast that fails for all if it fails for one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt import Topology
from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.mesh import Layout, Mesh, Placed, Shard
from nxd_ckpt.errors import CheckpointError, DigestMismatch, ReplicaLost
from nxd_ckpt.formats.tensors import Assembly, Fragment, StorageSpan, TensorStub
from nxd_ckpt.loading.shared_reads import WORTH_IT, Broadcast, open_shared_reads
from nxd_ckpt.loading.shares import ReplicaShares, agree_on_shares
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.reading import Leaf
from nxd_ckpt.testing.storage import MemoryStorage
from tests.support.ranks import on_ranks

Leaves = list[tuple[str, Leaf]]


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own name may not resolve."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def leaves_of(sizes: Sequence[int]) -> Leaves:
    """A uint8 tensor of each size, one after the other in a file."""
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        (f"model/{offset}/{size}", TensorStub("x.pt", offset, "uint8", (size,), (1,), StorageSpan("", offset, size, 1)))
        for offset, size in zip(offsets, sizes, strict=True)
    ]


def shares_of(topology: Topology, leaves: Leaves) -> list[ReplicaShares]:
    """Those of every rank."""
    return [ReplicaShares(topology.at(rank), leaves) for rank in range(topology.world_size)]


@given(dp=st.integers(1, 9), sizes=st.lists(st.integers(1, 2**33), max_size=40))
def test_every_leaf_has_one_owner_and_shares_are_alike(dp: int, sizes: list[int]) -> None:
    """All replicas name the same owner, who alone verifies the leaf; no share is larger than another by more than a
    leaf, and where one leaf is larger than a fair share, nothing is added to it."""
    leaves = leaves_of(sizes)
    shares = shares_of(Topology(dp=dp), leaves)
    if dp == 1:
        assert all(shares[0].owner(leaf) is None and shares[0].is_verified_here(leaf) for _, leaf in leaves)
        return
    held = [0] * dp
    for _, leaf in leaves:
        (owner,) = {each.owner(leaf) for each in shares}
        assert [owner] == [place for place, each in enumerate(shares) if each.is_verified_here(leaf)]
        assert owner is not None
        held[owner] += leaf.numel
    assert sum(sizes) == shares[0].nbytes
    assert max(held) - min(held) <= max(sizes, default=0)
    if sizes and max(sizes) >= sum(sizes) - max(sizes):
        assert max(held) == max(sizes)


def test_replicas_are_the_data_parallel_ranks_that_hold_the_same() -> None:
    """Of the same stage and tensor-parallel rank, with experts of the same expert-parallel rank."""
    leaves = leaves_of([1])
    found = [[*group.ranks] for shares in shares_of(Topology(dp=2, tp=2, pp=2), leaves) for group in shares.groups]
    assert [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]] == found
    found = [[*group.ranks] for shares in shares_of(Topology(dp=4, ep=2), leaves) for group in shares.groups]
    assert [[0, 2], [1, 3], [0, 2], [1, 3]] == found


def test_what_is_verified_as_one_is_shared_as_one() -> None:
    """Tied weights, and others that are views of one record: it is read as a whole to verify any of them."""
    [(_, whole), (_, other)] = leaves_of([100, 60])
    assert isinstance(whole, TensorStub)
    views: list[tuple[str, Leaf]] = [(f"view{at}", replace(whole, offset=at, shape=(10,))) for at in range(0, 100, 10)]
    shares = ReplicaShares(Topology(dp=2), [*views, ("tied", replace(whole)), ("whole", whole), ("other", other)])
    assert {0} == {shares.owner(leaf) for _, leaf in [*views, ("whole", whole)]}
    assert 1 == shares.owner(other)
    assert 160 == shares.nbytes


def test_what_one_rank_alone_wants_is_its_own() -> None:
    """Also where it is equal to what all want, as a shard can be to the weight that it is the master of."""
    ((_, stub),) = leaves_of([8])
    assert isinstance(stub, TensorStub)
    model, shard = (Assembly("uint8", (8,), (Fragment(stub, Box.whole((8,)), Box.whole((8,))),)) for _ in range(2))
    for shares in shares_of(Topology(dp=2), [("model/w", model)]):
        assert 0 == shares.owner(model)
        assert None is shares.owner(shard)
        assert shares.is_verified_here(shard)


def relied_on(jobs: Sequence[tuple[Topology, Leaves]], terms: Sequence[Any] = (None,)) -> list[bool]:
    """Whether each of the ranks shares what it loads."""

    def agree(agreement: Agreement) -> bool:
        topology, leaves = jobs[agreement.rank]
        shares = agree_on_shares(agreement, topology, leaves, terms=terms[agreement.rank % len(terms)])
        return all(shares.owner(leaf) is not None for _, leaf in leaves)

    return on_ranks(len(jobs), agree)


def test_all_rely_on_each_other_or_none() -> None:
    """Only if every group wants one list, in one order, on equal terms, and none of its members is elsewhere."""
    topology, leaves = Topology(dp=2, tp=2), leaves_of([3, 5])
    same = [(topology.at(rank), leaves) for rank in range(4)]
    assert [True] * 4 == relied_on(same) == relied_on(same, [["verify"]])
    assert [False] * 4 == relied_on(same, [True, True, False, True])
    for odd in (leaves[:1], leaves[::-1], leaves_of([5, 3])):
        assert [False] * 4 == relied_on([*same[:3], (topology.at(3), odd)])
    assert [False] * 4 == relied_on([*same[:3], (Topology(dp=4, rank=3), leaves)])


HSDP = Mesh(("replicate", "shard"), (2, 2), (0, 1, 2, 3))
ROWS = (None, Shard(0))


def placed_leaves(rank: int, rows: Sequence[int], placements: Any = ROWS) -> list[tuple[str, Leaf, Placed]]:
    """A matrix of each number of rows, cut for two shards on two replicas: part of one file, but for empty parts."""
    coordinate = HSDP.coordinate_of(rank)
    assert coordinate is not None
    found: list[tuple[str, Leaf, Placed]] = []
    for number, ((_, stub), of) in enumerate(zip(leaves_of([4 * each for each in rows]), rows, strict=True)):
        assert isinstance(stub, TensorStub)
        placed = Placed(Layout(HSDP, placements), (of, 4), coordinate)
        matrix = replace(stub, shape=(of, 4), stride=(4, 1))
        parts = tuple(Fragment(matrix, piece.box, piece.local) for piece in placed.pieces)
        found.append((f"w{number}", Assembly("uint8", placed.local_shape, parts), placed))
    return found


def owners_of(jobs: Sequence[list[tuple[str, Leaf, Placed]]]) -> list[list[tuple[Any, int] | None]]:
    """The group and the owner of each leaf, on each of the ranks."""

    def agree(agreement: Agreement) -> list[tuple[Any, int] | None]:
        placed = jobs[agreement.rank]
        named = [(name, leaf) for name, leaf, _ in placed]
        shares = agree_on_shares(agreement, Topology(dp=4, rank=agreement.rank), named, placed)
        found: list[tuple[Any, int] | None] = []
        for _, leaf in named:
            group, owner = shares.group(leaf), shares.owner(leaf)
            found.append(None if group is None or owner is None else (group.ranks, owner))
        return found

    return on_ranks(len(jobs), agree)


def test_ranks_with_equal_parts_of_a_mesh_share_them() -> None:
    """Two replicas of two shards, of which each reads half; of what a rank holds nothing of, it reads nothing."""
    found = owners_of([placed_leaves(rank, [6, 6, 1]) for rank in range(4)])
    first, second = [((0, 2), 0), ((0, 2), 1), ((0, 2), 0)], [((1, 3), 0), ((1, 3), 1), None]
    assert [first, second, first, second] == found


def test_ranks_of_a_mesh_that_load_other_tensors_do_not_share() -> None:
    """Nor in another order, in which they would wait for each other; nor cut in another way."""
    jobs = [placed_leaves(rank, [6, 4]) for rank in range(4)]
    none = [[None] * 2] * 4
    assert none == owners_of([*jobs[:3], jobs[3][::-1]])
    assert none == owners_of([*jobs[:3], placed_leaves(3, [6, 5])])
    assert none == owners_of([*jobs[:3], placed_leaves(3, [6, 4], (Shard(0), None))])


TENSORS = [
    torch.rand(3, 5),
    torch.rand(4, 2, 2).bfloat16(),
    torch.tensor(-7),
    torch.tensor([True, False, True]),
    torch.empty(0, 4),
    torch.rand(3).to(torch.complex64),
    torch.rand(9).to(torch.float8_e4m3fn),
]


def replicas(n: int, call: Callable[[Agreement, Broadcast], Any], timeout: float = 30.0) -> list[Any]:
    """``call`` on each of ``n`` replicas that have joined."""

    def run(agreement: Agreement) -> Any:
        with Broadcast(agreement, list(range(n)), agreement.rank, timeout) as group:
            return call(agreement, group)

    return on_ranks(n, run, timeout)


def test_what_one_reads_all_get() -> None:
    """Every bit, of every dtype and shape, from every member; the others do not read."""

    def fill(agreement: Agreement, group: Broadcast) -> list[bytes]:
        out = [torch.zeros_like(tensor) for tensor in TENSORS for _ in range(3)]
        for turn, tensor in enumerate(out):
            owner = turn % 3
            reads = [TENSORS[turn // 3]] if owner == agreement.rank else []
            group.fill(tensor, owner, partial(read_one, tensor, reads))
            assert [] == reads
        return [bits(tensor) for tensor in out]

    assert [[bits(tensor) for tensor in TENSORS for _ in range(3)]] * 3 == replicas(3, fill)


def read_one(out: torch.Tensor, reads: list[torch.Tensor]) -> None:
    out.copy_(reads.pop())


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("fails", range(4))
def test_what_the_reader_raises_all_raise(fails: int) -> None:
    """Itself its own exception, the others the same class with the rank in front; and they are still joined."""
    own = DigestMismatch("x.pt: Größe \N{SNOWMAN} changed")

    def fill(agreement: Agreement, group: Broadcast) -> tuple[Exception, float]:
        def read() -> None:
            raise own

        with pytest.raises(DigestMismatch) as caught:
            group.fill(torch.zeros(3), fails, read)
        out = torch.zeros(())
        group.fill(out, 0, partial(read_one, out, [torch.tensor(5.0)]))
        return caught.value, out.item()

    outcomes = replicas(4, fill)
    assert [5.0] * 4 == [value for _, value in outcomes]
    assert own is outcomes.pop(fails)[0]
    assert [f"on rank {fails}: {own}"] * 3 == [str(error) for error, _ in outcomes]


@pytest.mark.parametrize("leaves", range(4))
def test_a_member_that_leaves_is_not_waited_for(leaves: int) -> None:
    """Not by those either that would have got what was read through it: their timeout is much longer than this test's.

    What they raise is no PeerTimeout, after which a rank joins anew: this one goes on, and would not.
    """
    owner = (leaves + 1) % 4

    def fill(agreement: Agreement, group: Broadcast) -> Any:
        if agreement.rank == leaves:
            group.close()
            return agreement.gather("left")
        out = torch.zeros(100)
        try:
            for _ in range(3):  # a member that nobody waits for is missed at the next turn at the latest
                for turn in (owner, leaves):
                    group.fill(out, turn, lambda: None)
        except CheckpointError as error:
            agreement.gather("failed")
            return type(error), "lost the replicas [0, 1, 2, 3]" in str(error)
        return "nothing raised"

    outcomes = replicas(4, fill, timeout=1000.0)
    outcomes.pop(leaves)
    assert [(ReplicaLost, True)] * 3 == outcomes


def opened(wanted: Sequence[bool | None], storage: Storage | None = None, nbytes: int = WORTH_IT) -> list[Any]:
    """Whether there is a group, on each rank, or what was raised there."""
    shares = shares_of(Topology(dp=len(wanted)), leaves_of([nbytes]))

    def is_opened(agreement: Agreement) -> bool:
        rank = agreement.rank
        reads = open_shared_reads(agreement, shares[rank], wanted[rank], storage or MemoryStorage(), 600.0)
        if reads is None:
            return False
        reads.close()
        return True

    return on_ranks(len(wanted), is_opened)


@pytest.mark.parametrize(
    ("wanted", "shared"),
    [
        ([True, True, True], True),
        ([False, False, False], False),
        ([True, None, None], True),
        ([None, None, True], True),
        ([True, True, False], False),
        ([False, True, None], False),
        ([True], False),
    ],
)
def test_ranks_that_want_different_things(wanted: list[bool | None], shared: bool) -> None:
    """All get the same: False goes before True, True before None; a replica alone has nobody to share with."""
    assert [shared] * len(wanted) == opened(wanted)


@pytest.mark.parametrize(("nbytes", "shared"), [(WORTH_IT, True), (WORTH_IT - 1, False)])
def test_who_does_not_say_shares_what_comes_from_a_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nbytes: int, shared: bool
) -> None:
    """If it is much; on a file system each reads for itself."""
    monkeypatch.setattr("nxd_ckpt.loading.shared_reads._JOINING", 300.0)  # a busy machine is not in a hurry
    assert [shared] * 3 == opened([None] * 3, nbytes=nbytes)
    assert [False] * 3 == opened([None] * 3, LocalStorage(tmp_path), nbytes)


def test_replicas_that_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read for themselves if they were not told to share, with a warning; else all raise, with what to do."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    assert [False] * 2 == opened([None] * 2)
    for error in opened([True] * 2):
        assert CheckpointError is type(error)
        assert "GLOO_SOCKET_IFNAME" in str(error)
        assert "share_reads=False" in str(error)
