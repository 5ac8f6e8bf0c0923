"""A conversion that fails or is killed leaves no half tag, and what was there stays."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, convert, open_checkpoint
from nxd_ckpt.commit.session import Session, open_session
from nxd_ckpt.conversion import tag_writer
from nxd_ckpt.errors import CheckpointError, SaveFailed
from nxd_ckpt.output import locations
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import MemoryStorage
from tests.conversion.tags import contents, optimizers, plainly, remains, save_example, sharded, whole
from tests.tag.equality import difference


@pytest.mark.parametrize("in_a_store", [False, True])
def test_a_tag_that_another_job_completed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_store: bool
) -> None:
    """While the input was looked at: it is replaced only by a conversion that may overwrite."""
    source = save_example(tmp_path / "input", 2)
    target: Storage = MemoryStorage() if in_a_store else LocalStorage(tmp_path / "output")
    opened = {str(tmp_path / "output"): target}
    monkeypatch.setattr(locations, "open_storage", lambda path, *options: opened.get(path) or LocalStorage(path))

    def unshard(overwrite: bool) -> None:
        convert(source, tmp_path / "output" / "t", to="tag", optimizer_form="zero1_full", overwrite=overwrite)

    def late_session(*arguments: Any) -> Session:
        with Checkpointer("unused", storage=target) as other:
            other.save("t", {"weight": torch.ones(2)}, overwrite=True)
        return open_session(*arguments)

    monkeypatch.setattr(tag_writer, "open_session", late_session)
    with pytest.raises(SaveFailed, match=r"t exists.*overwrite=True"):
        unshard(overwrite=False)
    model: dict[str, torch.Tensor] = {}
    Checkpointer("unused", storage=target).load("t", model)
    assert {"weight": [1.0, 1.0]} == {name: tensor.tolist() for name, tensor in model.items()}
    unshard(overwrite=True)
    assert target.is_dir("t/optim")


def test_an_existing_result_is_replaced_only_by_a_complete_one(tmp_path: Path) -> None:
    """A failure leaves the old one in place; with success it is gone, and takes no space."""
    old = save_example(tmp_path / "output", 2, tag="dp3", step=1)
    source = save_example(tmp_path / "input", 2, step=2)
    damaged = save_example(tmp_path / "damaged", 2, step=2)
    shard = damaged / "optim" / "dp_rank_01_tp_rank_00_pp_rank_00.pt"
    shard.write_bytes(shard.read_bytes()[:-100])
    before = contents(old)

    with pytest.raises(CheckpointError, match="dp_rank_01"):
        convert(damaged, old, to="tag", optimizer_form="zero1", dp=3, overwrite=True)
    assert before == contents(old)
    assert [] == remains(tmp_path / "output")
    convert(source, old, to="tag", optimizer_form="zero1", dp=3, overwrite=True)

    assert {"steps": 2} == open_checkpoint(tmp_path / "output").user_content()
    assert None is difference(plainly(sharded(whole(step=2), 3, 1)), plainly(optimizers(old)[1]))
    assert [] == remains(tmp_path / "output")
