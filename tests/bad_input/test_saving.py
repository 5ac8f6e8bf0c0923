"""What ``save_checkpoint`` refuses: before anything is written, with the live state as it was."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nxd_ckpt import Partition, Topology, errors, load_checkpoint, save_checkpoint
from tests.bad_input.live import files_below, jobs
from tests.bad_input.refused import TAGS, Settings


def refuse(directory: Path, tag: Any, error: type[Exception], match: str, **arguments: Any) -> None:
    """A save raises, leaves no trace below or beside the directory, and changes nothing live."""
    [job] = jobs()
    before, below = job.picture(), files_below(directory.parent)
    with pytest.raises(error, match=match):
        save_checkpoint(directory, tag, **{**job.parts, **arguments})
    assert below == files_below(directory.parent)
    assert before == job.picture()


def _with_a_key(part: str, key: Any) -> dict[str, Any]:
    """An optimizer's state dict with a key that is no name, in one of its dicts."""
    state: dict[Any, Any] = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"params": [0], "lr": 1.0}]}
    {"state": state["state"][0], "param_groups": state["param_groups"][0], "top": state}[part][key] = 2
    return state


@pytest.mark.parametrize("tag", [*TAGS, None])
def test_a_tag_must_be_a_plain_visible_name(tmp_path: Path, tag: Any) -> None:
    """Anything else is refused, naming it, before the directory is created."""
    refuse(tmp_path / "ckpt", tag, errors.InvalidTag, "found None" if tag is None else "tag")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_kept_ckpts": 0}, errors.InvalidArgument, r"num_kept_ckpts.*0 would delete"),
        ({"num_kept_ckpts": -2}, errors.InvalidArgument, r"num_kept_ckpts.*-2"),
        ({"num_workers": 0}, errors.InvalidArgument, r"num_workers.*0"),
        ({"use_zero1_dcp": True}, errors.UnsupportedState, r"use_zero1_dcp=True is for ZeRO-1.*leave it out"),
        ({"partitions": {"nowhere": Partition()}}, errors.InvalidArgument, r"nowhere"),
        ({"param_names": [["one"]]}, errors.InvalidArgument, r"\[3\] names, found \[1\]"),
        ({"param_names": [["up", "up", "down"]]}, errors.InvalidArgument, r"unique.*up"),
        ({"run_id": "no spaces"}, errors.InvalidArgument, r"run_id 'no spaces'"),
        ({"topology": Topology(dp=2)}, errors.InvalidArgument, r"2 ranks needs torch.distributed.*run_id="),
        *(
            ({"model": {"a": torch.ones(1), key: torch.ones(1)}}, errors.InvalidArgument, "cannot be the name of a ten")
            for key in (1, None, True, 1.5, b"b", ("c", "d"), "\ud800")
        ),
        *(
            ({"optimizer": _with_a_key(part, key)}, errors.UnsupportedState, r"optimizer: .* must be names.*no load")
            for part in ("state", "param_groups", "top")
            for key in (1, None, ("c", "d"))
        ),
        ({"model": {"0-weight": torch.nn.ReLU()}}, errors.InvalidArgument, "'0-weight' cannot.* after a letter"),
        ({"model": torch.ones(3)}, errors.InvalidArgument, r"model= must be.*Tensor"),
        ({"optimizer": "adam"}, errors.InvalidArgument, r"optimizer= must be.*str"),
        ({"model": {"a": torch.ones(2, device="meta")}}, errors.UnsupportedState, r"model/a.*meta.*give it values"),
        ({"model": {"a": torch.eye(2).to_sparse()}}, errors.UnsupportedState, r"model/a.*sparse.*densify"),
        *(
            (content, errors.UnsupportedState, rf"^{name} .*(meta|qint8)")
            for tensor in (torch.ones(2, device="meta"), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
            for name, content in {
                "model/a/b": {"model": {"a": {"b": tensor}}},
                "scheduler/at/0": {"scheduler": {"at": [tensor]}},
                "user_content/at": {"user_content": {"at": tensor}},
                "rank_content/at": {"rank_content": {"at": tensor}},
            }.items()
        ),
        (
            {"user_content": {"at": Settings()}},
            errors.UnsafePickle,
            r"user_content\['at'\] is .*Settings.*trust_pickle",
        ),
        *(
            ({"model": {"a": at}}, errors.UnsupportedState, r"^model/.* \[1\] is the key of a dict, or in a set")
            for at in ({torch.ones(1): 1}, {torch.ones(1)}, {(1, torch.ones(1)): 1})
        ),
        ({"user_content": [threading.Lock()]}, errors.UnsafePickle, r"user_content\[0\] is .*lock"),
        ({"user_content": print}, errors.UnsafePickle, r"user_content is .*builtin_function"),
        ({"rank_content": {"net": torch.nn.Linear(1, 1)}}, errors.UnsafePickle, r"rank_content\['net'\] is .*Linear"),
        ({"scheduler": {"fn": Settings}}, errors.UnsafePickle, r"scheduler\['fn'\] is .*Settings"),
        ({"user_content": [threading.Lock()], "trust_pickle": True}, errors.UnsafePickle, r"cannot be pickled.*lock"),
        ({"memory_cap": 4096, "model": {"a": torch.ones(3000)}}, errors.StagingTooLarge, r"12000 bytes.*memory_cap"),
    ],
)
def test_arguments_that_cannot_be_honoured(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    """Each is refused by name, with what to do instead, before the directory is created."""
    refuse(tmp_path / "ckpt", "step_1", error, match, **arguments)


def test_the_directory_is_given_once(tmp_path: Path) -> None:
    """Neither twice, nor not at all, nor as something that is no path."""
    for wrong in ({}, {"path": tmp_path / "a", "checkpoint_dir_str": tmp_path / "b"}, {"path": 7}):
        with pytest.raises(errors.InvalidArgument, match=r"checkpoint directory|^path must be a string or a path"):
            save_checkpoint(tag="one", model={}, **wrong)
    assert {} == files_below(tmp_path)


@pytest.fixture
def _one_rank_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import torch.distributed as dist

    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank_group")
@pytest.mark.filterwarnings("ignore:Please use DTensor")
def test_sharded_tensors_are_refused(tmp_path: Path) -> None:
    """Those of torch before DTensor, in any part, by name; a load refuses them too."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard

    tensor = init_from_local_shards([Shard(torch.ones(2), ShardMetadata([0], [2], "rank:0/cpu"))], 2)
    optimizer = {"state": {0: {"exp_avg": tensor}}, "param_groups": [{"params": [0]}]}
    for part, name in (
        ({"model": {"a": tensor}}, "model/a"),
        ({"optimizer": optimizer}, "optim/.*/exp_avg"),
        ({"user_content": [tensor]}, "user_content/0"),
        ({"scheduler": {"last_epoch": 1, "ema": tensor}}, "scheduler/ema"),
    ):
        match = f"{name} is a ShardedTensor.*make it a DTensor"
        refuse(tmp_path / "ckpt", "one", errors.UnsupportedState, match, **part)
    save_checkpoint(tmp_path / "ckpt", "one", {"a": torch.ones(2)})
    with pytest.raises(errors.UnsupportedState, match="model/a is a ShardedTensor"):
        load_checkpoint(tmp_path / "ckpt", "one", {"a": tensor})


def test_spmd_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an SPMD program no process holds its tensors; the message names what saves them."""
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", SimpleNamespace(is_spmd=lambda: True))
    refuse(tmp_path / "ckpt", "one", errors.UnsupportedState, r"use_spmd.*distributed_checkpoint")


def test_a_refused_save_leaves_the_job_going(tmp_path: Path) -> None:
    """After the first save too: what is visible stays as it is, and the next save and load work."""
    [job] = jobs()
    save_checkpoint(tmp_path, "step_1", **job.parts)
    visible = files_below(tmp_path / "step_1")
    before = job.picture()
    wrong: list[dict[str, Any]] = [
        {"tag": "a/b"},
        {"num_kept_ckpts": 0},
        {"user_content": Settings()},
        {"model": {"a": torch.eye(2).to_sparse()}},
    ]
    for arguments in wrong:
        with pytest.raises((errors.InvalidArgument, errors.UnsafePickle, errors.UnsupportedState)):
            save_checkpoint(tmp_path, **{"tag": "step_2", **job.parts, **arguments})
    assert before == job.picture()
    assert visible == files_below(tmp_path / "step_1")
    assert [".nxd_ckpt", "step_1"] == sorted(path.name for path in tmp_path.iterdir())

    save_checkpoint(tmp_path, "step_2", **job.parts)
    [again] = jobs(seed=3)
    load_checkpoint(tmp_path, **again.parts)
    assert job.saved_picture()["model"] == again.saved_picture()["model"]
    assert [] == list((tmp_path / ".nxd_ckpt" / "staging").iterdir())
