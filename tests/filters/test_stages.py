"""A pipeline's tags that neuronx-distributed wrote, which say no names of the optimizer's parameters, loaded into
models that are not quite the saved ones."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nxd_ckpt
from nxd_ckpt import Topology, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import OptimizerMismatch
from tests.filters.named import Named, averages, stepped


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two pipeline stages of one parameter each, without what we write beside neuronx-distributed's files."""
    directory = tmp_path_factory.mktemp("stages")
    for rank in range(2):
        model = Named({f"stage{rank}.weight": rank + 1.0})
        at: dict[str, Any] = {"topology": Topology(pp=2, rank=rank), "run_id": "of-both", "async_save": True}
        save_checkpoint(directory, "t", model, stepped(model), durable=False, **at)
    nxd_ckpt.finalize_checkpoint()
    nxd_ckpt.close_checkpointers()
    (directory / "t" / "manifest.json").unlink()
    shutil.rmtree(directory / "t" / "index")
    yield directory
    nxd_ckpt.close_checkpointers()


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_keys": "model/head.*"},
        {"ignore_keys": lambda names: [name for name in names if "head" in name]},
        {"strict": False},
    ],
    ids=["glob", "function", "not strict"],
)
def test_a_new_tensor_does_not_move_a_stage(stages: Path, options: dict[str, Any]) -> None:
    """The optimizer's entries are this stage's own by position, not the first stage's."""
    model = Named({"stage1.weight": 77.0, "head.weight": 77.0})
    optimizer = stepped(model)
    del optimizer.param_groups[0]["params"][1]
    load_checkpoint(stages, "t", model, optimizer, topology=Topology(pp=2, rank=1), **options)
    assert {"stage1.weight": 2.0, "head.weight": 77.0} == model.held()
    assert 20.0 == averages(model, optimizer)["stage1.weight"]


def test_positions_tell_nothing_where_stages_moved(stages: Path) -> None:
    """A stage that holds what another one held: the tag has to say names, or the caller."""
    model = Named({"stage0.weight": 77.0})
    optimizer = stepped(model)
    load: dict[str, Any] = {"topology": Topology(pp=2, rank=1), "model": model, "optimizer": optimizer}
    with pytest.raises(OptimizerMismatch, match="saved_param_names="):
        load_checkpoint(stages, "t", **load)
    with pytest.raises(OptimizerMismatch, match="saved_param_names="):
        load_checkpoint(stages, "t", **{**load, "model": dict(model.state_dict())})
    assert ({"stage0.weight": 77.0}, {"stage0.weight": 770.0}) == (model.held(), averages(model, optimizer))
    load_checkpoint(stages, "t", **load, saved_param_names=[[["stage0.weight"]], [["stage1.weight"]]])
    assert ({"stage0.weight": 1.0}, {"stage0.weight": 10.0}) == (model.held(), averages(model, optimizer))
