"""The place in the data over changes of dp: every sample is read once in each epoch, or the load is refused."""

from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from nxd_ckpt import (
    Checkpointer,
    DataStreams,
    ElasticSampler,
    Topology,
    capture_data_position,
    convert,
    examine_checkpoint,
    load_checkpoint,
    open_checkpoint,
    restore_data_position,
)
from nxd_ckpt.core.data_position import check_position, merge_positions, position
from nxd_ckpt.core.names import rank_content_file
from nxd_ckpt.errors import IncompatibleState, InvalidArgument, MalformedFile
from tests.interop.saving import save_as_every_rank

SAMPLES, BATCH = 96, 2
CHANGES = [(4, 5), (3, 4), (8, 7), (8, 7)]
"""dp, and the steps until the next change: 288 samples in all, each of 96 three times; epochs end with a step."""

Make = Callable[[int, int], Any]


class Numbers(Dataset[int]):
    """Each sample is its own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Counting:
    """An iterable with a state, that is nobody's loader: numbers from ``begin`` on, each ``step``-th."""

    def __init__(self, begin: int, step: int, end: int) -> None:
        self.next, self.step, self.end = begin, step, end

    def __iter__(self) -> Iterator[list[int]]:
        while self.next < self.end:
            self.next += self.step
            yield [self.next - self.step]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def elastic(workers: int = 0, every: int = 1) -> Make:
    """torchdata's loader, over one order of samples."""

    def make(dp: int, dp_rank: int) -> Any:
        sampler = ElasticSampler(SAMPLES, dp=dp, dp_rank=dp_rank, seed=3)
        return StatefulDataLoader(Numbers(), BATCH, sampler=sampler, num_workers=workers, snapshot_every_n_steps=every)

    return make


def streams(count: int = 24, end: int = 10**6) -> Make:
    """As many streams, each of any object with a state."""
    return lambda dp, dp_rank: DataStreams(lambda n: Counting(n, count, end), count, dp=dp, dp_rank=dp_rank)


def _save(directory: Path, tag: str, loaders: list[Any], step: int = 0) -> None:
    sizes = Topology(dp=len(loaders))
    content = [{"data": capture_data_position(one), "own": rank} for rank, one in enumerate(loaders)]
    ranks = [sizes.at(rank) for rank in range(sizes.dp)]
    state = {"scheduler": {"last_epoch": step}}
    save_as_every_rank(directory, tag, ranks, lambda rank: {**state, "rank_content": content[rank]}, durable=False)


def _loaded(directory: Path, topology: Topology, **options: Any) -> dict[Any, Any]:
    content: dict[Any, Any] = {}
    load_checkpoint(directory, rank_content=content, topology=topology, **options)
    return content


def _run(directory: Path, make: Make, changes: list[tuple[int, int]] = CHANGES) -> list[int]:
    """The samples that all ranks read, in a run that is ended, and resumed on another dp, time and again."""
    read: list[int] = []
    for number, (dp, steps) in enumerate(changes):
        loaders = [make(dp, rank) for rank in range(dp)]
        if number:
            for rank, loader in enumerate(loaders):
                restore_data_position(loader, _loaded(directory, Topology(dp=dp, rank=rank))["data"])
        batches = [iter(loader) for loader in loaders]
        for _ in range(steps):
            read += [int(sample) for one in batches for sample in next(one)]
        _save(directory, f"step_{number}", loaders, sum(steps for _, steps in changes[: number + 1]))
    return read


def _doctor_is_silent(directory: Path) -> None:
    """A run that changed dp, or whose streams take turns, is none whose data position is off."""
    tags = [open_checkpoint(directory, f"step_{number}") for number in range(len(CHANGES))]
    assert [()] * 3 == [examine_checkpoint(after, before=before).findings for before, after in pairwise(tags)]


def test_no_sample_is_lost_or_repeated(tmp_path: Path) -> None:
    """4 -> 3 -> 8 -> 8 ranks of a StatefulDataLoader: each sample is read once in each of three epochs, the first of
    which ends on 8 ranks."""
    read = _run(tmp_path, elastic())
    epochs = [read[begin : begin + SAMPLES] for begin in range(0, len(read), SAMPLES)]
    assert [list(range(SAMPLES))] * 3 == list(map(sorted, epochs))
    assert epochs[0] != epochs[1]
    _doctor_is_silent(tmp_path)


def test_what_workers_read_ahead_is_not_lost(tmp_path: Path) -> None:
    """Nor repeated, where a worker reads ahead, and tells its state after every fourth batch only: 2 -> 3 ranks."""
    read = _run(tmp_path, elastic(workers=1, every=4), [(2, 9), (3, 10)])
    assert list(range(SAMPLES)) == sorted(read)


def test_streams_of_anything_go_to_the_rank_that_reads_them_next(tmp_path: Path) -> None:
    """4 -> 3 -> 8 -> 8 ranks of objects whose state nobody but they understand: no number is lost or repeated."""
    read = _run(tmp_path, streams())
    assert len(read) == len(set(read)) == sum(dp * steps for dp, steps in CHANGES)
    for stream in range(24):
        own = sorted(number for number in read if number % 24 == stream)
        assert list(range(stream, stream + 24 * len(own), 24)) == own
    _doctor_is_silent(tmp_path)


def test_streams_that_ended_stay_ended(tmp_path: Path) -> None:
    """Uneven ones too: all is read once, over two changes of dp."""
    read: list[int] = []
    make = streams(count=5, end=23)
    for dp in (2, 5, 1):
        loaders = [make(dp, rank) for rank in range(dp)]
        for rank, loader in enumerate(loaders):
            if dp != 2:
                restore_data_position(loader, _loaded(tmp_path, Topology(dp=dp, rank=rank))["data"])
        taken = [iter(loader) for loader in loaders]
        read += [number for one in taken for batch in islice(one, None if dp == 1 else 4) for number in batch]
        _save(tmp_path, f"on_{dp}", loaders)
    assert list(range(23)) == sorted(read)


def test_on_the_same_ranks_any_loader_goes_on(tmp_path: Path) -> None:
    """Also one whose state cannot be re-split; on other sizes that is refused, by name, or left out on demand."""
    loaders = [Counting(rank, 2, 100) for rank in range(2)]
    for loader in loaders:
        next(iter(loader))
    _save(tmp_path, "t", loaders)

    live = Counting(0, 2, 100)
    restore_data_position(live, _loaded(tmp_path, Topology(dp=2, rank=1))["data"])
    assert [3] == next(iter(live))

    with pytest.raises(IncompatibleState, match=r"rank_content\['data'\].* belongs to the rank that saved it"):
        _loaded(tmp_path, Topology(dp=3))
    assert {} == _loaded(tmp_path, Topology(dp=3), ignore_keys=["rank_content/data"])
    with pytest.raises(IncompatibleState, match="cannot continue from this data position"):
        restore_data_position(streams()(1, 0), open_checkpoint(tmp_path).rank_content(0)["data"])


def test_positions_of_some_stages_alone_are_found(tmp_path: Path) -> None:
    """Whichever ranks hold them, and under whichever keys, beside other content of their own."""
    at = Topology(dp=2, pp=2)
    place = {"kind": "samples", "consumed": 7}
    content = [
        {"note": 1} | ({"data": position(at.dp, dp_rank, None, place)} if stage else {})
        for stage in range(2)
        for dp_rank in range(2)
    ]
    save_as_every_rank(
        tmp_path,
        "step_1",
        [at.at(rank) for rank in range(4)],
        lambda rank: {"model": {f"stage{rank // 2}": torch.ones(2)}, "rank_content": content[rank]},
    )
    loaded: dict[str, Any] = {}
    load_checkpoint(tmp_path, "step_1", {}, topology=Topology(), rank_content=loaded, strict_model_weights=False)
    assert {"data": position(None, None, None, place)} == loaded


def test_ranks_at_different_places_are_refused(tmp_path: Path) -> None:
    """A rank that was a batch ahead at the save: its samples would be lost, or read twice."""
    make = elastic()
    loaders = [make(2, rank) for rank in range(2)]
    batches = [iter(loader) for loader in loaders]
    for one in (*batches, batches[1]):
        next(one)
    _save(tmp_path, "t", loaders)
    with pytest.raises(IncompatibleState, match=r"rank 0 is at consumed=4, .* rank 1 at consumed=8"):
        _loaded(tmp_path, Topology(dp=3))


def test_other_data_are_refused(tmp_path: Path) -> None:
    """Another length or seed is another order; too few streams leave a rank without; what has no state has no place."""
    saved = capture_data_position(ElasticSampler(10, dp=2))
    with pytest.raises(IncompatibleState, match="another order"):
        restore_data_position(ElasticSampler(11, dp=3), saved)
    with pytest.raises(InvalidArgument, match="5 streams are too few for dp=6"):
        streams(count=5)(6, 0)
    with pytest.raises(InvalidArgument, match="no state_dict"):
        capture_data_position([1, 2])
    with pytest.raises(InvalidArgument, match="capture_data_position"):
        restore_data_position(ElasticSampler(10), {})


def test_a_second_iterator_is_refused() -> None:
    """Of a sampler: what the first one had taken ahead would be lost."""
    sampler = ElasticSampler(10)
    next(iter(sampler))
    with pytest.raises(InvalidArgument, match="iterated once"):
        next(iter(sampler))


def test_what_was_put_together_needs_a_loader_that_can_take_its_share(tmp_path: Path) -> None:
    """One whose samples nothing deals out would begin again at the first."""
    _save(tmp_path, "t", [elastic()(2, rank) for rank in range(2)])
    saved = _loaded(tmp_path, Topology(dp=3))["data"]
    for loader in (StatefulDataLoader(Numbers(), BATCH), Counting(0, 1, 9)):
        with pytest.raises(IncompatibleState, match="cannot continue from this data position, which is of samples"):
            restore_data_position(loader, saved)


STREAM = {"turns": 0, "ended": False, "state": None}


@pytest.mark.parametrize(
    "saved",
    [
        {"data_position": 1},
        position(1, 0, None, {}),
        position(1, 0, None, {"kind": "other"}),
        position(1, 0, None, {"kind": "samples", "consumed": "1"}),
        position(1, 0, None, {"kind": "streams", "count": 1}),
        position(1, 0, None, {"kind": "streams", "count": 1, "states": {1: STREAM}}),
        position(1, 0, None, {"kind": "streams", "count": 1, "states": {0: {}}}),
        position(2, [], None, None),  # type: ignore[arg-type]
        position("x", 0, None, None),  # type: ignore[arg-type]
        position(40_000_000, 0, None, None),
        position(2, 2, None, None),
        position(None, 0, None, None),
    ],
)
def test_what_is_only_marked_as_a_position_is_refused(tmp_path: Path, saved: Any) -> None:
    """By a load on other sizes, and by a loader."""
    with pytest.raises(MalformedFile, match=r"data position|data-parallel rank"):
        check_position(saved, "here")
    with pytest.raises(MalformedFile):
        restore_data_position(ElasticSampler(10), saved)
    save = {"rank_content": {"data": saved}}
    save_as_every_rank(tmp_path, "t", [Topology()], lambda rank: save, durable=False)
    with pytest.raises(MalformedFile, match=r"rank_content\['data'\] of rank 0"):
        _loaded(tmp_path, Topology(dp=3))


def test_many_missing_streams_are_not_listed() -> None:
    """A count that no rank's streams come near to."""
    saved = position(1, 0, None, {"kind": "streams", "count": 10**12, "states": {0: STREAM}})
    check_position(saved, "here")
    with pytest.raises(IncompatibleState, match=rf"no rank saved stream 1 and {10**12 - 2} more of {10**12}"):
        merge_positions({0: saved}, "here")


def test_a_resharded_tag_has_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On each of its ranks, put together: loaders go on from it on its sizes and others. What is one rank's own is
    left out, and what of it is a data position is named."""
    make = elastic()
    loaders, alone = [make(4, rank) for rank in range(4)], Counting(0, 1, 100)
    read = [int(sample) for loader in loaders for sample in next(iter(loader))]
    content = [{"data": capture_data_position(one), "alone": capture_data_position(alone), "own": 1} for one in loaders]
    ranks = [Topology(dp=4, rank=rank) for rank in range(4)]
    state = {"model": {"w": torch.ones(3)}}
    save_as_every_rank(tmp_path / "run", "t", ranks, lambda rank: {**state, "rank_content": content[rank]})

    convert(tmp_path / "run" / "t", tmp_path / "other" / "t", to="tag", dp=3)

    assert "not taken over" in caplog.text
    assert "rank_content['alone']" in caplog.text
    tag = open_checkpoint(tmp_path / "other")
    assert [["data"]] * 3 == [list(tag.rank_content(rank)) for rank in range(3)]
    for dp in (3, 2):
        later = list(read)
        for rank in range(dp):
            loader = make(dp, rank)
            restore_data_position(loader, _loaded(tmp_path / "other", Topology(dp=dp, rank=rank))["data"])
            later += [int(sample) for sample in next(iter(loader))]
        assert len(later) == len(set(later)) == (4 + dp) * BATCH
    convert(tmp_path / "other" / "t", tmp_path / "again" / "t", to="tag", dp=1)
    assert tag.rank_content(0) == open_checkpoint(tmp_path / "again").rank_content(0)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no pickle")], ids=["lost", "damaged"])
def test_a_resharded_tag_goes_without_those_that_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], Any]
) -> None:
    """Of a rank's file that is damaged or lost nothing is taken over, nor of the other ranks: the log says why. The
    model is what it was."""
    ranks = [Topology(dp=2, rank=rank) for rank in range(2)]
    content = [{"data": capture_data_position(ElasticSampler(10, dp=2, dp_rank=rank))} for rank in range(2)]
    state = {"model": {"w": torch.ones(3)}}
    save_as_every_rank(tmp_path / "run", "t", ranks, lambda rank: {**state, "rank_content": content[rank]})
    damage(tmp_path / "run" / "t" / rank_content_file(1))

    convert(tmp_path / "run" / "t", tmp_path / "other" / "t", to="tag", dp=3)

    assert "not taken over: the data positions of all ranks" in caplog.text
    assert rank_content_file(1) in caplog.text
    tag = open_checkpoint(tmp_path / "other")
    assert (False, [1.0] * 3) == (tag.parts.rank_content, tag.model_state()["w"].tolist())


def test_a_resharded_tag_goes_without_those_beside_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Objects that only ``trust_pickle`` reads are no rank's of another job, and do not keep the model from being cut:
    the log says that positions beside them are lost, and how they can be had."""
    ranks = [Topology(dp=2, rank=rank) for rank in range(2)]
    content = [{"data": capture_data_position(ElasticSampler(10, dp=2, dp_rank=rank)), "own": print} for rank in (0, 1)]
    state = {"model": {"w": torch.ones(3)}}

    def what(rank: int) -> dict[str, Any]:
        return {**state, "rank_content": content[rank]}

    save_as_every_rank(tmp_path / "run", "t", ranks, what, trust_pickle=True)

    convert(tmp_path / "run" / "t", tmp_path / "other" / "t", to="tag", dp=3)

    assert "not taken over: the data positions of all ranks" in caplog.text
    assert "trust_pickle=True" in caplog.text
    tag = open_checkpoint(tmp_path / "other")
    assert (False, [1.0] * 3) == (tag.parts.rank_content, tag.model_state()["w"].tolist())


def test_a_position_that_an_iterator_would_not_see_is_refused() -> None:
    """One that was made before; a new loader, and one whose iterator has ended, take it."""
    saved = StatefulDataLoader(list(range(8)), batch_size=2)
    batches = iter(saved)
    next(batches)
    position = capture_data_position(saved)
    expected = next(batches).tolist()
    begun = StatefulDataLoader(list(range(8)), batch_size=2)
    running = iter(begun)
    next(running)
    with pytest.raises(InvalidArgument, match=r"is being iterated.*before iter"):
        restore_data_position(begun, position)
    for _ in running:
        pass
    for loader in (begun, StatefulDataLoader(list(range(8)), batch_size=2)):
        restore_data_position(loader, position)
        assert expected == next(iter(loader)).tolist()


class Own(IterableDataset[int]):
    """A dataset that shares its samples out among ranks by itself."""

    def __iter__(self) -> Iterator[int]:
        yield from range(SAMPLES)

    def state_dict(self) -> dict[str, Any]:
        return {"at": 4}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


OBJECTS: dict[str, tuple[Make, bool]] = {
    "a loader of a dataset without an index": (lambda dp, rank: StatefulDataLoader(Own(), batch_size=BATCH), True),
    "a loader of one with an index": (lambda dp, rank: StatefulDataLoader(Numbers(), batch_size=BATCH), True),
    "a dataset": (lambda dp, rank: Own(), True),
    "an ElasticSampler": (lambda dp, rank: ElasticSampler(SAMPLES, dp=dp, dp_rank=rank), False),
    "a loader over one": (
        lambda dp, rank: StatefulDataLoader(
            Numbers(), batch_size=BATCH, sampler=ElasticSampler(SAMPLES, dp=dp, dp_rank=rank)
        ),
        False,
    ),
}
"""Objects of state=, whose states are equal on all ranks, and whether a load on another dp warns of them."""


@pytest.mark.parametrize(("make", "is_share"), OBJECTS.values(), ids=OBJECTS)
def test_loaders_that_are_passed_by_name_are_warned_of_on_another_dp(
    tmp_path: Path, make: Make, is_share: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank is at the same number of samples, mostly of its own share: they were loaded like any other object."""
    live = make(1, 0)
    next(iter(live))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {}, state={"loader": live})
        checkpointer.load(1, state={"loader": make(1, 0)})
    assert "" == caplog.text
    with Checkpointer(tmp_path, topology=Topology(dp=2, rank=0)) as other:
        other.load(1, state={"loader": make(2, 0)})
    assert is_share == ("state['loader'] is the position of a" in caplog.text)
