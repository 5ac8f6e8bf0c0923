"""TorchTitan's own containers, saved and resumed by our checkpoint manager, on two ranks under FSDP2.

The environment has torchtitan 0.3; 0.2.2 lies in a folder of its own in it, which its ranks import first.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed: see the Makefile")

from safetensors.torch import save_file

from nxd_ckpt import load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.core.manifest import Manifest
from nxd_ckpt.integrations.torchtitan import CheckpointManager
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations import titan
from tests.support.processes import run_program
from tests.support.rank_pool import RankPool

RELEASES = ("0.3", "0.2.2")
OLD = Path(sys.prefix, "torchtitan-0.2.2")


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Iterator[str]:
    """The release that ranks import: they take this process' path."""
    if request.param == "0.2.2":
        assert OLD.is_dir(), f"{OLD} is not there: make {sys.prefix}/.nxd-ckpt-installed"
        sys.path.insert(0, str(OLD))
    yield str(request.param)
    sys.path[:] = [path for path in sys.path if path != str(OLD)]


@pytest.fixture(scope="module")
def pool(release: str) -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


def tags(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoint").iterdir() if not path.name.startswith("."))


def manifest_of(directory: Path, tag: str) -> Manifest:
    found = open_checkpoint(directory / "checkpoint", tag).manifest
    assert found is not None
    return found


@pytest.mark.parametrize("mode", ["disabled", "async", pytest.param("async_with_pinned_mem", marks=pytest.mark.soak)])
def test_a_run_continues_as_if_it_had_not_stopped(mode: str, tmp_path: Path, pool: RankPool) -> None:
    """Model, optimizer, learning rate, data and counters; the latest two checkpoints are kept, each a good tag."""
    for whole, again, state, latest in pool.run(titan.resumed, tmp_path, mode, timeout=300):
        assert whole == again
        assert (4, 4 * 12, 4) == state
        assert 6 == latest
    assert ["step-4", "step-6"] == tags(tmp_path)
    assert not verify_checkpoint(tmp_path / "checkpoint", "step-4").problems


def test_the_latest_is_the_one_saved_last(tmp_path: Path, pool: RankPool) -> None:
    """Not the highest step, if the run went on from an earlier one."""
    assert [[4, 4]] * 2 == pool.run(titan.from_an_earlier_step, tmp_path)
    assert ["step-2", "step-4", "step-6"] == tags(tmp_path)


def test_a_run_of_torchtitans_own_manager_continues(tmp_path: Path, pool: RankPool) -> None:
    """One line of config changes; what was saved before loads, what comes after is a tag."""
    for whole, taken_up in pool.run(titan.continued, tmp_path):
        assert whole == taken_up
    assert ["step-2", "step-4"] == tags(tmp_path / "both")
    assert "embed.weight" in manifest_of(tmp_path / "both", "step-4").parameters


def test_the_last_save_is_the_model_in_the_export_dtype(tmp_path: Path, pool: RankPool, release: str) -> None:
    """``last_save_model_only`` and ``export_dtype``; plain jobs load it."""
    pool.run(titan.last_save, tmp_path)
    assert ["step-2", "step-3"] == tags(tmp_path)
    manifest = manifest_of(tmp_path, "step-3")
    assert manifest.parts.optimizer is None
    assert "bfloat16" == manifest.parameters["embed.weight"].dtype
    model = titan.Model().to(torch.bfloat16)
    if release == "0.2.2":  # casts the counter too
        model.counter.seen = model.counter.seen.to(torch.bfloat16)
    load_checkpoint(tmp_path / "checkpoint", "step-3", model)


def test_a_run_that_goes_on_from_the_model_alone_is_told_so(tmp_path: Path, pool: RankPool) -> None:
    """And how: torch's own error names the first key that is missing."""
    for [error] in pool.run(titan.after_the_last_save, tmp_path):
        assert "step-3 holds the model alone, as with last_save_model_only=True" in error
        assert "load_step" in error


def test_data_positions_of_other_ranks_are_refused_by_name(tmp_path: Path, pool: RankPool) -> None:
    """Before anything changes, with what to do: TorchTitan asserts it when the model is loaded, or a key is missing."""
    for error, step in pool.run(titan.of_other_ranks, tmp_path):
        assert "step-2 has the data positions of 2 data-parallel ranks, and this run has 4" in error
        assert "exclude_from_loading=['dataloader']" in error
        assert "2" == step


@pytest.mark.parametrize("hf", [False, True])
def test_a_run_begins_with_a_model_of_others(hf: bool, tmp_path: Path, pool: RankPool) -> None:
    """``initial_load_path``: a tag that ``save_checkpoint`` wrote, or with ``initial_load_in_hf`` safetensors."""
    torch.manual_seed(5)
    model = titan.Model()
    where: Any = tmp_path / "given" / "step_1"
    if hf:
        where = tmp_path / "hf"
        where.mkdir()
        save_file({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, where / "model.safetensors")
    else:
        save_checkpoint(tmp_path / "given", "step_1", model)
    expected = [parameter.tolist() for parameter in model.parameters()]
    assert [expected] * 2 == pool.run(titan.initially, tmp_path, where, hf)


@pytest.mark.parametrize("release", ["0.2.2"], indirect=True)  # 0.3 has no torchft in its manager
def test_each_replica_of_torchft_has_its_own_data_position(tmp_path: Path, pool: RankPool) -> None:
    """The first replica saves everything, each its data loader, and both are tags."""
    for step, data in pool.run(titan.fault_tolerant, tmp_path, timeout=300):
        assert 2 == step
        assert data != {}
    assert ["ft-replicat-0", "ft-replicat-1", "step-2"] == tags(tmp_path)
    replicas = tmp_path / "checkpoint" / "ft-replicat-1"
    assert "step-4" == open_checkpoint(replicas).tag


def test_the_trainer_takes_our_manager(tmp_path: Path, pool: RankPool, release: str) -> None:
    """Of 0.2.2 by the one import that its config names; 0.3's config builds its own."""
    for module, file in pool.run(titan.through_the_trainer, tmp_path):
        assert "nxd_ckpt.integrations.torchtitan" == module
        assert (str(OLD) in file) == (release == "0.2.2")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"looked for torchtitan.components.checkpointer.CheckpointManager \(0.3\), torchtitan.components.ch"),
        (
            {
                "checkpoint.py": "AsyncMode = MODEL = OPTIMIZER = DATALOADER = 1\n"
                "class CheckpointManager:\n    dcp_save = 1\n"
            },
            "components.checkpoint has no CheckpointManager.dcp_load, CheckpointManager._find_load_step",
        ),
    ],
)
@pytest.mark.one_in(2)
def test_another_torchtitan_is_refused_by_the_names_that_it_lacks(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    """A fork may have renamed what we extend: the error says what was looked for."""
    package = tmp_path / "torchtitan"
    sources = {"__init__.py": "", "components/__init__.py": "", "tools/__init__.py": ""}
    sources |= {"tools/utils.py": "GarbageCollection = None\n", **{f"components/{k}": v for k, v in files.items()}}
    for name, source in sources.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source)
    ended = run_program(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import nxd_ckpt.integrations.torchtitan")
    assert re.search(message, ended.stderr), ended.stderr


def test_its_config_is_torchtitans() -> None:
    """The options, their defaults, and the class that they build."""
    config = CheckpointManager.Config(interval=7, async_mode="ASYNC")
    assert (7, "async", 10) == (config.interval, config.async_mode, config.keep_latest_k)
    with pytest.raises(ValueError, match="at least 2"):
        CheckpointManager.Config(keep_latest_k=1)
    assert isinstance(config.build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    ), CheckpointManager)  # fmt: skip
