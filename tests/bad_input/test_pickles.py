"""Reading never runs code: what is more than plain data is refused by the name of its class, unless it is trusted."""

import argparse
import datetime
import os
import shutil
from collections import OrderedDict, defaultdict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from nxd_ckpt import Topology, errors, load_checkpoint, save_checkpoint
from tests.bad_input.live import jobs
from tests.bad_input.refused import Settings

INERT: dict[str, Any] = {
    "arguments": argparse.Namespace(lr=0.1, layers=[1, 2], out=Path("/fsx/run7")),
    "paths": [Path("a/b"), PurePosixPath("/c")],
    "numbers": [np.float32(1.5), np.int64(7), np.float64(0.1), np.bool_(True), 2 + 3j, 10**30],
    "tuple": (1, (2, None)),
    "sets": {"a", 1},
    "ordered": OrderedDict(b=1, a=2),
    "times": [datetime.datetime(2026, 1, 2, 3, 4), datetime.timedelta(days=1)],
    "torch": [torch.float32, torch.Size([2, 3]), torch.device("cpu")],
    "bytes": b"\0\1",
    "counts": defaultdict(int, a=1),
}


class Exploit:
    """A pickle of this makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def foreign(golden: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint that NxD wrote, to put other files into."""
    return Path(shutil.copytree(golden / "a_dp2_zero1_pt" / "ckpt", tmp_path / "ckpt"))


def test_simple_inert_types_just_work(tmp_path: Path) -> None:
    """Arguments, paths, NumPy scalars and the like are saved and loaded as they are, without a word."""
    save_checkpoint(tmp_path, "one", {}, user_content=INERT, rank_content=INERT)
    mine: dict[str, Any] = {}
    content = load_checkpoint(tmp_path, rank_content=mine)
    assert (INERT, INERT) == (content, mine)
    assert [type(number) for number in INERT["numbers"]] == [type(number) for number in content["numbers"]]


@pytest.mark.parametrize(
    "file",
    [
        "user_content.pt",
        "scheduler.pt",
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt",
    ],
)
def test_code_in_a_file_is_not_run(foreign: Path, tmp_path: Path, file: str) -> None:
    """Wherever it is: the function is named, not called, and nothing is changed."""
    torch.save({"a": Exploit(tmp_path / "made")}, foreign / "step_3" / file)
    loaded: dict[str, Any] = {"model": {}, "optimizer": {}, "scheduler": {}}
    with pytest.raises(errors.UnsafePickle, match=rf"{file}.*mkdir.*trust_pickle=True"):
        load_checkpoint(foreign, **loaded, topology=Topology(dp=2))
    assert {"model": {}, "optimizer": {}, "scheduler": {}} == loaded
    assert not (tmp_path / "made").exists()


def test_other_classes_need_trust(foreign: Path) -> None:
    """A class of the user's is named; with ``trust_pickle=True`` it is made."""
    torch.save({"at": Settings()}, foreign / "step_3" / "user_content.pt")
    refused = r"user_content.pt.*tests\.bad_input\.refused\.Settings.*trust_pickle=True"
    with pytest.raises(errors.UnsafePickle, match=refused):
        load_checkpoint(foreign, topology=Topology(dp=2))
    content = load_checkpoint(foreign, topology=Topology(dp=2), trust_pickle=True)
    assert isinstance(content["at"], Settings)


def test_what_was_saved_with_trust_needs_it_again(tmp_path: Path) -> None:
    """A save that allowed a class does not oblige the one who loads: live objects stay as they were."""
    [job], [other] = jobs(seed=1), jobs(seed=2)
    save_checkpoint(tmp_path, "one", **job.parts, user_content=Settings(), trust_pickle=True)
    before = other.picture()
    with pytest.raises(errors.UnsafePickle, match=r"Settings"):
        load_checkpoint(tmp_path, "one", **other.parts)
    assert before == other.picture()
    assert isinstance(load_checkpoint(tmp_path, "one", **other.parts, trust_pickle=True), Settings)
    assert job.saved_picture()["optimizer"] == other.saved_picture()["optimizer"]
