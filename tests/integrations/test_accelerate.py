"""accelerate's save_state with our checkpoints: what it resumes, what stays, what killed saves leave."""

import errno
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from examples.train_accelerate import main
from nxd_ckpt import Checkpointer, effects, open_checkpoint
from nxd_ckpt.errors import (
    IncompatibleState,
    InvalidArgument,
    KeyMismatch,
    MalformedFile,
    OptimizerMismatch,
    SaveFailed,
)
from nxd_ckpt.integrations.accelerate import Accelerator
from nxd_ckpt.saving import ballot
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations.accelerate_run import Background, Job
from tests.support.slow_disks import slow_renames


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("*"))


def weights(job: Job) -> list[Any]:
    return [parameter.tolist() for parameter in job.model.parameters()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run of four steps that nothing interrupts."""
    return Job(tmp_path_factory.mktemp("whole")).run(4)


@pytest.mark.parametrize("kind", [accelerate.Accelerator, Accelerator, Background])
def test_a_resumed_run_is_the_same_run(kind: Any, tmp_path: Path, whole: list[float]) -> None:
    """Losses equal those of a run that was not stopped, also from checkpoints that accelerate wrote; two stay."""
    Job(tmp_path, kind).run(2)
    job = Job(tmp_path)
    assert 2 == job.resume()
    torch.rand(1)
    job.accelerator.load_state()
    assert whole[2:] == job.run(2)
    assert ["checkpoint_2", "checkpoint_3"] == names(tmp_path)


def test_a_run_that_failed_goes_on_in_the_same_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the save that was under way, also if the disk is slow."""
    slow_renames(monkeypatch, 1)
    Job(tmp_path).accelerator.save_state()
    assert 1 == Job(tmp_path).resume()


def test_a_save_of_an_earlier_run_that_failed_does_not_stop_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was logged, and is not this run's: the load takes the checkpoint before it."""

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    Job(tmp_path).run(1)
    with monkeypatch.context() as patch:
        patch.setattr(ballot, "write_index", full)
        Job(tmp_path, Background).accelerator.save_state()
        assert 1 == Job(tmp_path).resume()
    assert "No space left on device" in caplog.text


def test_a_save_of_one_s_own_that_failed_is_still_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not of a trainer's earlier run: the load waits for it, and would be the last to tell of it."""

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    Job(tmp_path / "run").run(1)
    own = Checkpointer(tmp_path / "own", durable=False)
    with monkeypatch.context() as patch:
        patch.setattr(ballot, "write_index", full)
        own.save("one", {"w": torch.ones(2)}, async_save=True)
        with pytest.raises(SaveFailed, match="No space left on device"):
            Job(tmp_path / "run").resume()


def test_a_checkpoint_is_a_tag_with_accelerates_files(tmp_path: Path) -> None:
    """With names, and digests of these files; no pickled optimizer is left. Other files may be added."""
    Job(tmp_path).run(1)
    place = tmp_path / "checkpoints" / "checkpoint_0"
    assert {"model/0.weight", "optim/0.weight/exp_avg"} <= open_checkpoint(place).metadata.keys()
    assert {"random_states_0.pkl", "scheduler.bin"} < {path.name for path in place.iterdir()}
    assert not (place / "optimizer.bin").exists()
    (place / "metrics.json").write_text("{}")
    assert (("metrics.json",), ()) == ((found := verify_checkpoint(place)).guests, found.problems)
    assert 2 > Job(tmp_path).resume()


def test_hooks_are_called(tmp_path: Path) -> None:
    """As accelerate calls them: with the models, weights to take out, and the directory."""
    job, calls = Job(tmp_path), []

    def save(models: list[Any], weights: list[Any], place: str) -> None:
        weights.pop()
        (Path(place) / "mine.txt").write_text("1")

    job.accelerator.register_save_state_pre_hook(save)
    job.accelerator.register_load_state_pre_hook(lambda models, place: calls.append((models[0], place)))
    place = job.accelerator.save_state()
    job.accelerator.load_state()
    assert [(job.model, place)] == calls
    assert (Path(place) / "mine.txt").is_file()


def test_several_models_are_one_tag(tmp_path: Path) -> None:
    """By name. All of them are loaded, or the job is refused that prepared fewer."""
    job = Job(tmp_path)
    job.accelerator.prepare(torch.nn.Linear(2, 2))
    place = job.accelerator.save_state()
    job.accelerator.load_state()
    assert {"model/model_0.0.weight", "model/model_1.weight"} < open_checkpoint(place).metadata.keys()
    with pytest.raises(IncompatibleState, match="with number of models 2, and this run has 1"):
        Job(tmp_path).accelerator.load_state(place)


def each_its_part(model: Any, second: Any) -> tuple[list[Any], list[Any]]:
    return [model], [torch.optim.Adam([model.weight]), torch.optim.SGD([model.bias], momentum=0.9)]


def more_optimizers_than_models(model: Any, second: Any) -> tuple[list[Any], list[Any]]:
    third = torch.optim.Adam([*model.parameters(), *second.parameters()])
    return [model, second], [*each_its_part(model, second)[1], third]


def one_for_both(model: Any, second: Any) -> tuple[list[Any], list[Any]]:
    return [model, second], [torch.optim.Adam([*model.parameters(), *second.parameters()])]


def in_another_order(model: Any, second: Any) -> tuple[list[Any], list[Any]]:
    return [model, second], [torch.optim.Adam(second.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)]


@pytest.mark.parametrize("kind", [each_its_part, more_optimizers_than_models, one_for_both, in_another_order])
def test_optimizers_and_models_of_any_number(kind: Any, tmp_path: Path) -> None:
    """Models and optimizers are saved and loaded as prepared, whichever parameters an optimizer has."""
    states: list[str] = []
    for _ in range(2):
        accelerator = Accelerator(cpu=True)
        models, optimizers = kind(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3))
        accelerator.prepare(*models, *optimizers)
        if states:
            accelerator.load_state(str(tmp_path / "one"))
        else:
            sum(model(torch.ones(1, 2)).sum() for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
            accelerator.save_state(str(tmp_path / "one"))
        states.append(str([each.state_dict() for each in (*models, *optimizers)]))
        accelerator.end_training()
    assert states[0] == states[1]


def test_a_load_takes_the_options_of_a_load(tmp_path: Path) -> None:
    """``strict`` as accelerate's, which errors advise, and the others."""
    Job(tmp_path).run(1)
    job = Job(tmp_path)
    job.model.register_parameter("more", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(KeyMismatch, match="strict=False"):
        job.accelerator.load_state()
    for options in ({"strict": False}, {"ignore_keys": ["model/more"]}):
        with torch.no_grad():
            job.model[0].weight.fill_(7.0)
        job.accelerator.load_state(**options)
        assert not (job.model[0].weight == 7.0).any()


@pytest.mark.parametrize("what", ["scheduler", "object"])
@pytest.mark.parametrize("more", [True, False], ids=["more", "fewer"])
def test_other_objects_are_refused_before_anything_changes(what: str, more: bool, tmp_path: Path) -> None:
    """Schedulers and registered objects are loaded after the models, by files of their numbers."""
    jobs = Job(tmp_path / "one"), Job(tmp_path / "two")
    for job in jobs:
        job.accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    more_of_them = jobs[1].accelerator
    if what == "scheduler":
        more_of_them.prepare(torch.optim.lr_scheduler.StepLR(jobs[1].optimizer.optimizer, 1))
    else:
        more_of_them.register_for_checkpointing(torch.nn.Linear(1, 1))
    saves, loads = jobs if more else jobs[::-1]
    place = saves.accelerator.save_state()
    saves.accelerator.end_training()
    with torch.no_grad():
        before = [parameter.fill_(7.0).tolist() for parameter in loads.model.parameters()]
    with pytest.raises(IncompatibleState, match="other schedulers or registered objects than this run has"):
        loads.accelerator.load_state(place)
    assert before == weights(loads)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [({"mixed_precision": "bf16"}, IncompatibleState), ({"optimizer": torch.optim.SGD}, OptimizerMismatch)],
    ids=["precision", "optimizer"],
)
def test_another_run_is_refused(changed: dict[str, Any], kind: type[Exception], tmp_path: Path) -> None:
    """Rather than one that only looks like the same."""
    Job(tmp_path).run(1)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(kind, match="was saved with"):
        Job(tmp_path, **changed).resume()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    """A run on two processes is not one on one. Nothing is loaded then."""

    class OfTwo(Background):
        def _setting(self) -> dict[str, Any]:
            return {**super()._setting(), "world size": 2}

    Job(tmp_path).run(1)
    job = Job(tmp_path, OfTwo)
    before = weights(job)
    with pytest.raises(IncompatibleState, match="world size 1, and this run has 2"):
        job.resume()
    assert before == weights(job)


def test_numbering_goes_on_after_a_restart(tmp_path: Path, whole: list[float]) -> None:
    """A new process counts from 0. The limit removes the oldest, and the next process loads the newest."""
    Job(tmp_path).run(3)
    for done, stay in [(3, ["checkpoint_2", "checkpoint_3"]), (4, ["checkpoint_3", "checkpoint_4"])]:
        job = Job(tmp_path)
        job.accelerator.load_state()
        losses = job.run(1)
        assert whole[done:][:1] == losses[: len(whole[done:])]
        assert stay == names(tmp_path)


def test_the_newest_is_the_one_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where numbering began at 0 again, as it did before, and accelerate's own still does; and where the clock was
    put back."""
    Job(tmp_path).run(3)
    now = effects.time
    monkeypatch.setattr(effects, "time", lambda: now() - 3600)
    job = Job(tmp_path)
    job.accelerator.load_state()
    job.run(1)
    (tmp_path / "checkpoints" / "checkpoint_3").rename(tmp_path / "checkpoints" / "checkpoint_0")
    expected = weights(job)
    job = Job(tmp_path)
    job.accelerator.load_state()
    assert expected == weights(job)
    job.run(1)
    assert ["checkpoint_0", "checkpoint_3"] == names(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Of accelerate's."""
    Job(tmp_path).run(1)
    job = Job(tmp_path)
    (tmp_path / "checkpoints" / "checkpoint_0" / "scheduler.bin").write_bytes(b"x")
    with pytest.raises(MalformedFile, match=r"scheduler\.bin has 1 bytes, expected"):
        job.resume()


def test_what_has_the_name_of_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint of accelerate's is replaced, and nothing of it is left; other files stay, and a file is refused."""
    job = Job(tmp_path)
    job.accelerator.project_configuration.automatic_checkpoint_naming = False
    place = tmp_path / "outputs"
    accelerate.Accelerator.save_state(job.accelerator, str(place))
    (place / "log.txt").write_text("mine")
    for _ in range(2):
        job.accelerator.save_state(str(place))
        job.accelerator.load_state(str(place))
        assert not {"model.safetensors", "optimizer.bin"} & {path.name for path in place.iterdir()}
        assert "mine" == (place / "log.txt").read_text()
    (tmp_path / "log.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match=r"log\.txt is a file"):
        job.accelerator.save_state(str(tmp_path / "log.txt"))
    assert "mine" == (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3:/bucket/run", "gs://bucket/run"])
def test_a_url_is_refused_at_once(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the project's directory, as one to save to, before a directory of that name is made, and to load from."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"is a URL.*copies them to the store"):
        Job(url)
    job = Job(tmp_path)
    job.accelerator.project_configuration.automatic_checkpoint_naming = False
    for call in (job.accelerator.save_state, job.accelerator.load_state):
        with pytest.raises(InvalidArgument, match=r"is a URL.*copies one back to resume from it"):
            call(url)
    job.accelerator.project_configuration.automatic_checkpoint_naming = True
    job.accelerator.project_configuration.set_directories(url)
    for call in (job.accelerator.save_state, job.accelerator.load_state):
        with pytest.raises(InvalidArgument, match="is a URL"):
            call()
    assert [] == [*tmp_path.iterdir()]


def test_the_example_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """examples/train_accelerate.py, twice."""
    for steps in ("2", "3"):
        main(["--directory", str(tmp_path), "--steps", steps])
    assert [1, 2, 3] == [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
