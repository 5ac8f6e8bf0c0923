"""torch.distributed.checkpoint.save writes tags: complete or invisible, read by torch and by us, whatever fails."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nxd_ckpt import Best, convert, errors, has_checkpoint, open_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.torch_dcp.storage_reader import StorageReader
from nxd_ckpt.torch_dcp.storage_writer import StorageWriter
from tests.bad_input.live import Net
from tests.protocol.job import Died, Job, Raised
from tests.support.rank_pool import RankPool
from tests.torch_dcp import ranks, writing


def tags(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def parameters(directory: Path, tag: str) -> Any:
    manifest = open_checkpoint(directory, tag).manifest
    assert manifest is not None
    return manifest.parameters


def plain_state(number: int = 0) -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).reshape(2, 3) + number}, "step": number}


def test_what_was_saved_with_any_placement_loads_with_any_other(tmp_path: Path, pair: RankPool) -> None:
    """Even and uneven shards, empty ones, scalars, tensors without elements, replicas."""
    assert [[], []] == pair.run(writing.any_placement, tmp_path)
    assert not verify_checkpoint(tmp_path, "step_0").problems


def test_ranks_with_other_names_are_put_together(tmp_path: Path, pair: RankPool) -> None:
    """Pipeline stages: model, optimizer, options and data loaders of each rank, by name, in one tag."""
    pair.run(writing.stages, tmp_path)
    state: dict[str, Any] = {
        "model": {f"layers.{rank}.weight": torch.zeros(2, 2) for rank in range(2)},
        "optim": {f"state.layers.{rank}.weight.exp_avg": torch.zeros(2, 2) for rank in range(2)}
        | {f"param_groups.layers.{rank}.weight.lr": -1.0 for rank in range(2)},
        "loader": {"rank_0": b"", "rank_1": b"", "world_size": 0},
    }
    load(state, storage_reader=StorageReader(tmp_path / "stages"))
    assert {"rank_0": b"at 0", "rank_1": b"at 1", "world_size": 2} == state["loader"]
    assert [0.1, 0.2] == [state["optim"][f"param_groups.layers.{rank}.weight.lr"] for rank in range(2)]
    assert [10.0, 11.0] == [float(state["optim"][f"state.layers.{rank}.weight.exp_avg"][0, 0]) for rank in range(2)]
    assert {"layers.0.weight", "layers.1.weight"} == set(parameters(tmp_path, "stages"))


def test_a_rank_may_have_several_chunks_of_a_tensor(tmp_path: Path, pair: RankPool) -> None:
    """As ShardedTensor has: torch and we put them together."""
    expected = writing.whole("even")
    assert [expected.tolist()] * 2 == pair.run(writing.chunks, tmp_path)
    assert torch.equal(expected, open_checkpoint(tmp_path).read("model/w"))
    assert () == verify_checkpoint(tmp_path).problems


def test_each_rank_may_save_alone(tmp_path: Path, pair: RankPool) -> None:
    """``no_dist=True`` on every rank of a job, each to a directory of its own; and without a process group at all."""
    pair.run(writing.alone, tmp_path)
    for rank in range(2):
        state = {"model": {"w": torch.zeros(3)}}
        load(state, storage_reader=StorageReader(tmp_path / str(rank) / "one"))
        assert [float(rank)] * 3 == state["model"]["w"].tolist()
    save(plain_state(), storage_writer=StorageWriter(tmp_path / "here", "one"))
    assert has_checkpoint(tmp_path / "here")


def test_cached_plans_are_saved_to_the_right_tags(tmp_path: Path, pair: RankPool) -> None:
    """With ``enable_plan_caching`` no plan is sent from the second save on, not even for another directory."""
    base = writing.whole("uneven")
    expected = [[(base * (number + 1)).tolist(), number] for number in range(3)]
    assert [expected] * 2 == pair.run(writing.cached_plans, tmp_path)


@pytest.mark.parametrize("how", ["reading", "writing"])
def test_a_failure_on_one_rank_reaches_all_and_nothing_is_visible(how: str, tmp_path: Path, pair: RankPool) -> None:
    """Whether the planner or the storage fails on rank 1: both ranks raise its error, and the next save works."""
    cause = {"reading": "the device is gone", "writing": "No space left on device"}[how]
    assert [True, True] == [cause in words for words in pair.run(writing.failed, tmp_path, how)]
    assert ["good"] == tags(tmp_path)
    assert [] == list((tmp_path / ".nxd_ckpt" / "staging").glob("*"))
    assert not verify_checkpoint(tmp_path, "good").problems


@pytest.mark.parametrize("at", [pytest.param("create", marks=pytest.mark.soak), "sync_dir", "rename"])
def test_a_killed_rank_leaves_nothing_visible(at: str, tmp_path: Path) -> None:
    """SIGKILL to a rank in the middle of its files, or to rank 0 just before the tag appears; the next job saves."""
    victim = 0 if at == "rename" else 1
    outcomes = Job(2, writing.killed, tmp_path, at, group=True).outcomes(timeout=120)
    assert isinstance(outcomes[victim], Died)
    assert isinstance(outcomes[1 - victim], Raised)
    assert [] == tags(tmp_path)
    assert not has_checkpoint(tmp_path)
    save(plain_state(), storage_writer=StorageWriter(tmp_path, "step_1"))
    assert not verify_checkpoint(tmp_path, "step_1").problems
    assert [] == list((tmp_path / ".nxd_ckpt" / "staging").glob("*"))


def test_values_that_differ_between_ranks_are_the_first_rank_s_and_named_once(tmp_path: Path, pair: RankPool) -> None:
    """A plan has one rank's of a name, and that may be any: here it was rank 1's of some, and nobody was told."""
    (read, messages), (_, elsewhere) = pair.run(writing.differing_values, tmp_path)
    assert {"loader": {"seen": 100}, "random": b"of 0", "only_0": 0, "only_1": 1, "step": 5} == read
    [message] = messages
    assert "ranks 0 and 1 have different values of loader.seen, random. Of each" in message
    assert [] == elsewhere


def test_tensors_that_differ_between_ranks_are_named_once(tmp_path: Path, pair: RankPool) -> None:
    """A buffer of the model, and a random state beside it: torch saves one rank's."""
    messages, elsewhere = pair.run(writing.differing_tensors, tmp_path)
    [message] = messages
    assert "ranks 0 and 1 have different values of generator, model.seen. Of each name one rank's is saved" in message
    assert [] == elsewhere


def test_rules_say_which_tags_are_kept(tmp_path: Path) -> None:
    """``num_kept_ckpts``, ``retain`` and ``metrics``, as of any save; what is no rule, or no number, is refused."""
    writer = StorageWriter(num_kept_ckpts=2, retain=[Best("loss")])
    for number, loss in enumerate((3.0, 1.0, 2.0, 4.0)):
        writer.metrics = {"loss": loss}
        save(plain_state(number), checkpoint_id=tmp_path / f"step_{number}", storage_writer=writer)
        assert str(tmp_path / f"step_{number}") == writer.checkpoint_id
    assert ["step_1", "step_2", "step_3"] == tags(tmp_path)
    with pytest.raises(errors.InvalidArgument, match="an empty list would keep none"):
        StorageWriter(tmp_path, "step", retain=[])
    with pytest.raises(errors.InvalidArgument, match=r"metrics must be numbers by name, .*, found \{'loss': 'low'\}"):
        StorageWriter(tmp_path, "step", metrics={"loss": "low"})  # type: ignore[dict-item]
    writer.metrics = {"loss": "low"}  # type: ignore[dict-item]
    with pytest.raises(CheckpointException, match="metrics must be numbers by name"):
        save(plain_state(4), checkpoint_id=tmp_path / "step_4", storage_writer=writer)


def test_an_existing_tag_is_replaced_or_refused(tmp_path: Path) -> None:
    """As ``overwrite`` says; what is refused stays as it was."""
    for number in range(2):
        save(plain_state(number), storage_writer=StorageWriter(tmp_path, "step"))
    with pytest.raises(CheckpointException, match="exists: it is left as it is"):
        save(plain_state(7), storage_writer=StorageWriter(tmp_path, "step", overwrite=False))
    state = plain_state(-1)
    load(state, storage_reader=StorageReader(tmp_path / "step"))
    assert 1 == state["step"]


class Unsafe:
    """More than data."""


def test_what_a_load_would_refuse_is_refused_at_once(tmp_path: Path) -> None:
    """Objects of any class, without ``trust_pickle``; bytes that torch.save did not write; lone large tensors."""
    with pytest.raises(CheckpointException, match="not plain data"):
        save({"x": Unsafe()}, storage_writer=StorageWriter(tmp_path, "step"))
    save(
        {"x": Unsafe(), "model": {"w": torch.ones(1)}},
        storage_writer=StorageWriter(tmp_path, "step", trust_pickle=True),
    )
    assert ["step"] == tags(tmp_path)
    with pytest.raises(CheckpointException, match="neither model_key nor optim_key"):
        save({"ema": {"w": torch.empty(2**25)}}, storage_writer=StorageWriter(tmp_path, "large"))
    with pytest.raises(errors.InvalidArgument, match="use_collectives=False"):
        save(plain_state(), use_collectives=False, storage_writer=StorageWriter(tmp_path, "large"))
    with pytest.raises(CheckpointException, match="a directory and a tag"):
        save(plain_state(), storage_writer=StorageWriter(tmp_path))
    assert ["step"] == tags(tmp_path)


def test_planners_may_change_what_is_saved(tmp_path: Path) -> None:
    """torch's example: names before the model's, and another dtype, made when it is written."""

    class Half(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item: Any) -> Any:
            found = super().resolve_data(write_item)
            return found.to(torch.float16) if isinstance(found, torch.Tensor) else found

    save(plain_state(), planner=Half(), storage_writer=StorageWriter(tmp_path, "half"))
    assert "float16" == parameters(tmp_path, "half")["w"].dtype


def test_tools_take_the_tag_as_any_other(tmp_path: Path, pair: RankPool) -> None:
    """It is inspected, cut for other sizes, and made a directory of DCP, all bit for bit."""
    first, _ = pair.run(writing.saved_fsdp2, tmp_path)
    tag = tmp_path / "by_save"
    assert 0 == main(["inspect", str(tag)])
    assert [0, 1, 2] == open_checkpoint(tag).user_content()["train_state"]["seen"].tolist()
    convert(tag, tmp_path / "out" / "cut", to="tag", dp=2, tp=1)
    convert(tag, tmp_path / "dcp", to="dcp")
    for reader in (StorageReader(tmp_path / "out" / "cut"), FileSystemReader(tmp_path / "dcp")):
        model = Net()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=9.0)
        ranks.training(model, optimizer)
        ranks.resume(reader, model, optimizer)
        assert first == ranks.picture(model, optimizer)
