"""The example of a storage of one's own keeps the contract, and jobs save to it and load from it."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.testing.contract import StorageContract

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Storage]:
    """The storage of one database, opened anew."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    kind = import_module("sqlite_storage").SqliteStorage
    return lambda: cast("Storage", kind(tmp_path / "files.db"))


class TestSqliteStorage(StorageContract):
    @pytest.fixture
    def storage(self, opened: Callable[[], Storage]) -> Storage:
        return opened()


def test_one_job_saves_and_the_next_one_loads(opened: Callable[[], Storage]) -> None:
    """Tags are written over and retired in it as anywhere else."""
    for job in range(2):
        with Checkpointer("unused", storage=opened()) as checkpointer:
            for number in range(3):
                model = {"weight": torch.full((1000,), 10.0 * job + number)}
                checkpointer.save(f"step_{number}", model, overwrite=True, num_kept_ckpts=2)
    found: dict[str, torch.Tensor] = {}
    with Checkpointer("unused", storage=opened()) as checkpointer:
        assert ["step_1", "step_2"] == [info.tag for info in list_tags(checkpointer.storage)]
        checkpointer.load(None, found)
    assert torch.equal(torch.full((1000,), 12.0), found["weight"])
