"""What one rank refuses, all refuse: on two real processes, with nothing changed on either."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nxd_ckpt import Partition, Topology, close_checkpointers, errors, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import CheckpointError
from tests.bad_input.live import Job, files_below, jobs
from tests.bad_input.refused import Settings
from tests.support.damage import flip
from tests.support.logged import logged
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal

Answer = tuple[str, bool]
"""What a call was refused with on one rank, "" where it was accepted; and whether it left all live objects as before.
"""


@pytest.fixture
def kept(pair: RankPool, tmp_path: Path) -> Path:
    """A directory with a tag of both ranks, below one that holds nothing else."""
    assert [("", True)] * 2 == pair.run(saving, str(tmp_path / "ckpt"), [{"tag": "one"}] * 2)
    return tmp_path / "ckpt"


def saving(rank: int, directory: str, arguments: list[dict[str, Any]]) -> Answer:
    """Save a ZeRO-1 job, each rank with its own further arguments."""
    return answer(save_checkpoint, jobs(2, zero1=True, seed=1)[rank], directory, arguments[rank])


def loading(rank: int, directory: str, arguments: list[dict[str, Any]]) -> Answer:
    """Load into a ZeRO-1 job with other values."""
    return answer(load_checkpoint, jobs(2, zero1=True, seed=5)[rank], directory, arguments[rank])


def answer(call: Callable[..., Any], job: Job, directory: str, arguments: dict[str, Any]) -> Answer:
    before = job.picture()
    found = refusal(partial(call, directory, **{**job.parts, "timeout": 600.0, **arguments}))
    close_checkpointers()
    return found, before == job.picture()


def both_refused(found: list[Answer], error: type[CheckpointError], told: str) -> None:
    """Each rank raised ``error`` with ``told`` in its message, and changed nothing."""
    assert [] == [one for one in found if not one[0].startswith(f"{error.__name__}: ") or told not in one[0]]
    assert [True, True] == [is_unchanged for _, is_unchanged in found]


BIG = {"weight": torch.ones(3000)}


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ([{"tag": "a/b"}] * 2, errors.InvalidTag, "tag 'a/b'"),
        ([{"tag": "one"}, {"tag": ""}], errors.InvalidTag, "tag must be"),
        ([{"tag": "one"}, {"tag": "two"}], errors.RanksDisagree, "ranks 0 and 1 disagree"),
        ([{"tag": "one"}, {"tag": "one", "use_xser": True}], errors.RanksDisagree, "ranks 0 and 1 disagree"),
        ([{"tag": "one"}, {"tag": "one", "use_xser": "perhaps"}], errors.InvalidArgument, "use_xser must be "),
        ([{"tag": "one"}, {"tag": "one", "optimizer": None}], errors.RanksDisagree, "ranks 0 and 1 disagree"),
        ([{"tag": "one"}, {"tag": "one", "rank_content": Settings()}], errors.UnsafePickle, "rank_content is"),
        ([{"tag": "one", "user_content": Settings()}, {"tag": "one"}], errors.UnsafePickle, "user_content is"),
        (
            [{"tag": "one", "memory_cap": 4096, "model": BIG}, {"tag": "one", "model": BIG}],
            errors.StagingTooLarge,
            "memory_cap",
        ),
        ([{"tag": "one", "num_kept_ckpts": 0}] * 2, errors.InvalidArgument, "num_kept_ckpts"),
    ],
)
def test_a_save_that_one_rank_refuses(
    pair: RankPool, tmp_path: Path, arguments: list[dict[str, Any]], error: type[CheckpointError], told: str
) -> None:
    """The other raises the same, not a timeout, and the directory is not even created."""
    both_refused(pair.run(saving, str(tmp_path / "ckpt"), arguments), error, told)
    assert {} == files_below(tmp_path)


def test_a_rank_s_file_that_is_lost(pair: RankPool, kept: Path) -> None:
    """Rank 1's shard is missing: rank 0, whose files are whole, changes nothing either."""
    lost = "optim/dp_rank_01_tp_rank_00_pp_rank_00.pt"
    (kept / "one" / lost).unlink()
    both_refused(pair.run(loading, str(kept), [{}] * 2), errors.PartLost, lost)


def test_a_rank_s_file_that_changed(pair: RankPool, kept: Path) -> None:
    """So it is for one that is damaged, and once it is whole again, the same processes load."""
    changed = kept / "one" / "optim" / "dp_rank_01_tp_rank_00_pp_rank_00.pt"
    flip(changed, 1500)
    both_refused(pair.run(loading, str(kept), [{}] * 2), errors.DigestMismatch, "optim/dp_rank_01")
    flip(changed, 1500)
    assert [("", False)] * 2 == pair.run(loading, str(kept), [{}] * 2)


def biases(names: list[str]) -> list[str]:
    return [name for name in names if "bias" in name]


def weights(names: list[str]) -> list[str]:
    return [name for name in names if "weight" in name]


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ([{"tag": "two"}] * 2, errors.CheckpointNotFound, "no tag 'two'; it holds 'one' (complete)"),
        ([{"tag": "../one"}] * 2, errors.InvalidTag, "tag '../one'"),
        ([{"rank_content": {}}, {}], errors.PartNotFound, "without rank_content; it holds model,"),
        ([{}, {"partitions": {"absent": Partition()}}], errors.InvalidArgument, "partitions= names 'absent'"),
        ([{"verify": "later"}, {}], errors.InvalidArgument, "verify must be "),
        ([{}, {"ignore_keys": ["optim/*"]}], errors.RanksDisagree, "ignore_keys=['optim/*']"),
        ([{}, {"strict_model_weights": False}], errors.RanksDisagree, "strict_model_weights=False"),
        ([{}, {"ignore_keys": np.array(["optim/*", "rng"])}], errors.RanksDisagree, "ignore_keys=['optim/*', 'rng']"),
        ([{"ignore_keys": biases}, {"ignore_keys": weights}], errors.RanksDisagree, "left out different ones"),
        ([{"ignore_keys": ["optm/*"]}] * 2, errors.KeyMismatch, "matches nothing with 'optm/*'"),
        ([{"key_mapping": {"up.weight": "down.weight"}}] * 2, errors.InvalidArgument, "would both be loaded"),
    ],
)
def test_a_load_that_is_refused(
    pair: RankPool, kept: Path, arguments: list[dict[str, Any]], error: type[CheckpointError], told: str
) -> None:
    """Whoever finds it, both ranks raise it, and nothing is changed in memory or on disk."""
    below = files_below(kept.parent)
    both_refused(pair.run(loading, str(kept), arguments), error, told)
    assert below == files_below(kept.parent)


def staged(rank: int, directory: str, options: dict[str, Any]) -> dict[str, float] | str:
    """Save and load two pipeline stages of one parameter each; what this one holds then, or the error."""
    topology = Topology(pp=2, rank=rank)
    model = {f"stage{rank}.weight": torch.full((2,), float(rank + 1))}
    save_checkpoint(directory, "one", model, topology=topology, durable=False, timeout=600.0)
    close_checkpointers()
    live = {f"{'part' if options.get('key_mapping') else 'stage'}{rank}.weight": torch.zeros(2)}
    found = refusal(lambda: load_checkpoint(directory, "one", live, topology=topology, timeout=600.0, **options))
    return found or {name: value[0].item() for name, value in live.items()}


def test_a_filter_is_about_all_stages_together(pair: RankPool, tmp_path: Path) -> None:
    """What one pipeline stage has nothing for another may have; what none has anything for, both are told."""
    glob = {"ignore_keys": ["model/stage1.*"]}
    assert [{"stage0.weight": 1.0}, {"stage1.weight": 0.0}] == pair.run(staged, str(tmp_path / "one"), glob)
    mapping = {"key_mapping": {f"part{stage}.weight": f"stage{stage}.weight" for stage in range(2)}}
    assert [{"part0.weight": 1.0}, {"part1.weight": 2.0}] == pair.run(staged, str(tmp_path / "two"), mapping)
    found = pair.run(staged, str(tmp_path / "three"), {"ignore_keys": ["model/stage2.*"]})
    assert [True, True] == ["matches nothing with 'model/stage2.*'" in message for message in found]


def own_content(rank: int, directory: str) -> dict[str, Any]:
    """Save content with a key of this rank's own, and load it without that of rank 1."""
    at: dict[str, Any] = {"topology": Topology(dp=2, rank=rank), "timeout": 600.0}
    save_checkpoint(directory, "one", {"w": torch.ones(1)}, rank_content={f"of{rank}": 1}, durable=False, **at)
    close_checkpointers()
    mine: dict[str, Any] = {}
    load_checkpoint(directory, "one", {}, rank_content=mine, ignore_keys=["rank_content/of1"], **at)
    return mine


def test_a_key_that_one_rank_alone_has(pair: RankPool, tmp_path: Path) -> None:
    """A glob for it matches something, though the ranks that speak for others have nothing for it."""
    assert [{"of0": 1}, {}] == pair.run(own_content, str(tmp_path / "ckpt"))


def asking(rank: int, directory: str) -> list[str]:
    """Load the model on rank 0 alone; return what is warned of."""
    model = {"w": torch.ones(1)}
    save_checkpoint(directory, "one", model, durable=False)
    close_checkpointers()
    with logged() as messages:
        load_checkpoint(directory, "one", model if rank == 0 else None)
    return messages


def test_a_rank_that_asks_for_less_is_named(pair: RankPool, tmp_path: Path) -> None:
    """It would go on with what it had, while the others resume."""
    (warning,), others = pair.run(asking, str(tmp_path / "ckpt"))
    assert ("the load of model=: nothing was passed on rank 1" in warning, others) == (True, [])


def saving_a_part(rank: int, directory: str) -> list[int]:
    """Save and load a replica whose optimizer has no state yet, on rank 1 of half of the parameters."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters()][rank:], lr=0.1)
    save_checkpoint(directory, "a", model, optimizer)
    load_checkpoint(directory, "a", model, optimizer)
    close_checkpointers()
    return [len(group["params"]) for group in optimizer.param_groups]


def test_replicas_with_optimizers_of_other_parameters_keep_their_own(pair: RankPool, tmp_path: Path) -> None:
    """The groups of rank 0 alone would fit no other."""
    assert [[2], [1]] == pair.run(saving_a_part, str(tmp_path))
