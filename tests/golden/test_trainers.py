"""Checkpoints of version 0.1's plug-ins for transformers and accelerate, with tags in them and a seal: they load.

They were made with tests/integrations: a Trainer's ``checkpoint-2``; an Accelerator's with a second model.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import convert, load_checkpoint
from nxd_ckpt.errors import CheckpointNotFound, DigestMismatch, PartLost
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations import accelerate_run, transformers_run
from tests.integrations.transformers_ranks import Begin
from tests.tag.equality import difference

_NUMBERS = (0, 2, 1, 3)
"""Of the parameters in the optimizer: that of transformers' has the weights before the biases."""


@pytest.fixture
def saved(golden_of_trainers: Path, tmp_path: Path) -> Path:
    """A copy."""
    return Path(shutil.copytree(golden_of_trainers, tmp_path / "saved"))


def test_a_trainers_checkpoint_is_resumed(saved: Path) -> None:
    """And the run goes on with tags, of which the limit counts it as one. A file that was added since does not matter.
    """
    run = saved / "transformers"
    (run / "checkpoint-2" / "metrics.json").touch()
    assert () == verify_checkpoint(run / "checkpoint-2", "training_state").problems
    expected, begin = torch.load(saved / "transformers.pt", weights_only=True), Begin()
    transformers_run.trained(run, resume=True, seed=2, max_steps=5, save_total_limit=2, callbacks=[begin])
    moments = [expected["optimizer"]["state"][number] for number in _NUMBERS]
    pairs = zip(expected["weights"], moments, strict=True)
    held = [each.flatten().tolist() for weight, state in pairs for each in (weight, *state.values())]
    assert held == begin.state
    assert ["checkpoint-4", "checkpoint-5"] == sorted(path.name for path in run.iterdir())


def test_a_checkpoint_is_replaced(saved: Path) -> None:
    """By a tag; of the seal, and of the tag that lay in it, nothing is left."""
    run = saved / "transformers"
    transformers_run.trained(run, max_steps=2)
    assert not {"training_state", "digests.json"} & {path.name for path in (run / "checkpoint-2").iterdir()}
    assert ((), ()) == ((found := verify_checkpoint(run / "checkpoint-2")).problems, found.guests)


def test_its_tag_loads(saved: Path) -> None:
    expected = torch.load(saved / "transformers.pt", weights_only=True)
    model = transformers_run.Tiny(transformers_run.TinyConfig())
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW([{"params": parameters[::2]}, {"params": parameters[1::2]}])
    load_checkpoint(saved / "transformers" / "checkpoint-2", "training_state", None, optimizer)
    assert None is difference(expected["optimizer"]["state"], optimizer.state_dict()["state"])


def test_of_several_models_none_is_guessed(saved: Path, tmp_path: Path) -> None:
    """A load by the checkpoint's path would take the last one; by its name each loads."""
    (place,) = (saved / "accelerate").glob("**/checkpoint_*")
    for door in (load_checkpoint, lambda path, model: convert(path, tmp_path / "out", to="dcp")):
        with pytest.raises(CheckpointNotFound, match=r"several models, .* one of training_state, training_state_1"):
            door(place, model={})
    second: dict[str, Any] = {}
    load_checkpoint(place, "training_state_1", model=second)
    assert {"weight", "bias"} == {*second}


def test_an_accelerators_checkpoint_is_loaded(saved: Path) -> None:
    expected = torch.load(saved / "accelerate.pt", weights_only=True)
    job: Any = accelerate_run.Job(saved / "accelerate")
    job.accelerator.prepare(torch.nn.Linear(2, 2))
    assert 1 == job.resume()
    weights = [each.detach() for model in job.accelerator._models for each in model.parameters()]
    assert None is difference(expected, {"weights": weights, "optimizer": job.optimizer.optimizer.state_dict()})


def test_damage_is_refused(saved: Path) -> None:
    place = saved / "transformers" / "checkpoint-2"
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
        transformers_run.trained(saved / "again", resume=str(place))
    assert "model.safetensors" in verify_checkpoint(place, "training_state").problems[0]
    (place / "digests.json").unlink()
    with pytest.raises(PartLost, match=r"digests\.json was saved, and is gone"):
        transformers_run.trained(saved / "again", resume=str(place))
