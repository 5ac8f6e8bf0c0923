"""What a save may replace, and how tags are ordered after they were copied."""

from pathlib import Path

import pytest
import torch

import nxd_ckpt
from nxd_ckpt.errors import SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.directory import clash


@pytest.mark.parametrize(
    "file",
    [
        *("manifest.json", "checkpoint", "done", "scheduler.pt", "done/mine", "model", "index"),
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors/tensor_0.pt",
    ],
)
def test_a_file_of_the_user_is_never_replaced(tmp_path: Path, file: str) -> None:
    """The names of a checkpoint's files do not make it one: the save fails and says so, and the bytes stay."""
    own = tmp_path / "final" / file
    own.parent.mkdir(parents=True)
    own.write_text("a month of work")

    refused = pytest.raises(SaveFailed, match=f"final/{file.removesuffix('/mine')} exists and is not a checkpoint")
    with nxd_ckpt.Checkpointer(tmp_path) as checkpointer, refused:
        checkpointer.save("final", {"w": torch.ones(2)})

    assert "a month of work" == own.read_text()


def test_the_remains_of_an_interrupted_save_are_replaced(tmp_path: Path) -> None:
    """What NxD leaves behind when it is killed: its first marker and some ranks' files."""
    (tmp_path / "t" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors").mkdir(parents=True)
    (tmp_path / "t" / "checkpoint").write_text("1")

    assert clash(LocalStorage(tmp_path), "t") is None


def test_a_wrapper_with_state_of_its_own_is_saved_whole(tmp_path: Path) -> None:
    """Only NxD's wrapper, which has none, is taken off an optimizer."""

    class Lookahead(torch.optim.SGD):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, lr=0.1)
            self.optimizer = optimizer

        def state_dict(self) -> dict[str, object]:
            return {**super().state_dict(), "state": {0: {"slow": torch.full((2,), 7.0)}}}

    weight = torch.nn.Parameter(torch.ones(2))
    wrapper = Lookahead(torch.optim.SGD([weight], lr=0.1))
    with nxd_ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save("t", None, wrapper)

    assert [7.0, 7.0] == nxd_ckpt.open_checkpoint(tmp_path).optimizer_state()["state"][0]["slow"].tolist()
