"""NxD's plug-in for Lightning: its class stays, its methods are ours."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from tests.tag.equality import difference

pytestmark = pytest.mark.usefixtures("nxd")


@pytest.fixture(params=["install first", "import first"])
def adapter(request: pytest.FixtureRequest) -> Any:
    """An instance of NxD's own class, made before or after install()."""
    if request.param == "install first":
        nxd_ckpt.install()
    made = import_module("neuronx_distributed.lightning").NeuronCheckpointIO(save_load_xser=True)
    nxd_ckpt.install()
    return made


def test_it_stays_an_instance(adapter: Any):
    """NxD's strategy takes no other class."""
    assert isinstance(adapter, import_module("neuronx_distributed.lightning.checkpoint_io").NeuronCheckpointIO)


@pytest.mark.parametrize("master_dp_only", [True, False])
def test_the_strategys_calls(tmp_path: Path, adapter: Any, master_dp_only: bool):
    path = tmp_path / "checkpoints" / "epoch=0-step=5.ckpt"
    checkpoint = {"state_dict": {"w": torch.ones(2)}, "optimizer_states": [{"state": {}}], "global_step": 5}
    assert None is adapter.save_checkpoint(checkpoint, path, storage_options=None, master_dp_only=master_dp_only)
    assert None is difference(checkpoint, adapter.load_checkpoint(path, master_dp_only=master_dp_only))
    assert [path] == list(path.parent.iterdir())
    for _ in range(2):
        adapter.remove_checkpoint(path)
        assert [] == list(path.parent.iterdir())
    adapter.teardown()


def test_storage_options_are_refused(tmp_path: Path, adapter: Any):
    """With the TypeError that Lightning knows from NxD."""
    with pytest.raises(TypeError):
        adapter.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})


def test_undone(tmp_path: Path, adapter: Any):
    nxd_ckpt.uninstall()
    with pytest.raises(AssertionError, match="own save_checkpoint"):
        adapter.save_checkpoint({}, tmp_path / "a.ckpt")
