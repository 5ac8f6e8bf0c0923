"""Lightning's trainer with our CheckpointIO: what it keeps and resumes, and what killed or failed saves leave."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from examples.train_lightning import main
from nxd_ckpt import finalize_checkpoint, has_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.errors import (
    CheckpointNotFound,
    DirectoryInUse,
    IncompatibleState,
    InvalidArgument,
    OptimizerMismatch,
    SaveFailed,
    UnsupportedState,
)
from nxd_ckpt.integrations.lightning import CheckpointIO, ExactResume
from nxd_ckpt.prune import pin_checkpoint
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations.lightning_run import BATCHES, Module, ResumableLoader, every_epoch, fit, weights
from tests.support.slow_disks import slow_renames

pytestmark = pytest.mark.filterwarnings("ignore:::pytorch_lightning", "ignore:::lightning_fabric")


def tags(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def in_background() -> CheckpointIO:
    return CheckpointIO(async_save=True, durable=False)


def lightnings() -> Any:
    return pl.plugins.io.TorchCheckpointIO()


def in_lightnings_background() -> Any:
    return pl.plugins.io.AsyncCheckpointIO(lightnings())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """A run of three epochs that nothing interrupts."""
    return fit(every_epoch(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run that was stopped after two epochs."""
    directory = tmp_path_factory.mktemp("saved")
    fit(every_epoch(directory), epochs=2)
    return directory


def test_a_resumed_run_is_the_same_run(saved: Path, tmp_path: Path, whole: Module) -> None:
    """Losses, under dropout and shuffling, and weights equal those of a run that was not stopped."""
    resumed = fit(every_epoch(tmp_path), ckpt_path=saved / "last.ckpt", seed=2, io=in_background())
    assert whole.losses[2 * BATCHES :] == resumed.losses
    assert weights(whole) == weights(resumed)
    assert not verify_checkpoint(tmp_path, "last.ckpt").problems


def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """From data that knows where it was."""
    expected = fit(every_epoch(tmp_path / "whole", every_n_train_steps=1), loader=ResumableLoader())
    middle = tmp_path / "whole" / "epoch=1-step=3.ckpt"
    resumed = fit(every_epoch(tmp_path), loader=ResumableLoader(), ckpt_path=middle, seed=2)
    assert (expected.losses[3:], weights(expected)) == (resumed.losses, weights(resumed))


@pytest.mark.parametrize("every", [None, 1])
def test_a_loader_that_draws_its_order(every: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its state is loaded in the middle of an epoch. At the end Lightning does not do it, and a warning says so."""

    def loader() -> Any:
        rows: Any = torch.linspace(0, 1, 64).view(16, 4)
        return StatefulDataLoader(rows, batch_size=2, shuffle=True)

    whole = fit(every_epoch(tmp_path / "whole", every_n_train_steps=every), loader=loader())
    saved = tmp_path / "whole" / ("epoch=0-step=8.ckpt" if every is None else "epoch=1-step=11.ckpt")
    resumed = fit(every_epoch(tmp_path), loader=loader(), ckpt_path=saved, seed=2)
    is_same = whole.losses[-len(resumed.losses) :] == resumed.losses
    assert is_same == ("goes on in another order" not in caplog.text) == (every == 1)


class Waiting(Module):
    """Reduces its learning rate after each epoch but the first."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_class(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


def test_a_schedule_that_waits_for_a_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of an epoch Lightning saves before its step, and leaves that out later. A warning says so."""
    whole = fit(every_epoch(tmp_path / "whole"), kind=Waiting)
    resumed = fit(every_epoch(tmp_path), ckpt_path=tmp_path / "whole" / "epoch=1-step=4.ckpt", seed=2, kind=Waiting)
    assert weights(whole) != weights(resumed)
    assert "step of ReduceLROnPlateau" in caplog.text


def test_a_checkpoint_is_a_tag_of_named_tensors(saved: Path) -> None:
    """The optimizer's state too has the names of the model's parameters; all that is Lightning's is user content."""
    tag = open_checkpoint(saved, "last.ckpt")
    assert {"model/net.0.weight", "optim/net.0.weight/exp_avg"} <= tag.metadata.keys()
    assert 2 * BATCHES == tag.user_content()["global_step"]


@pytest.mark.parametrize(
    "options",
    [{"save_top_k": 1}, {"save_top_k": 2, "monitor": "loss", "mode": "max"}],
    ids=["latest", "best"],
)
def test_the_same_checkpoints_stay_as_without_it(options: dict[str, Any], tmp_path: Path) -> None:
    """ModelCheckpoint decides, also where saves are under way when it drops what they replace."""
    for name, io in [("lightning", lightnings()), ("ours", in_background())]:
        fit(every_epoch(tmp_path / name, **options), io=io)
    assert tags(tmp_path / "lightning") == tags(tmp_path / "ours")


def test_what_is_saved_before_slurm_requeues_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning asks for that as soon as the save returns; Slurm then ends the job."""
    slow_renames(monkeypatch, 0.1)
    io = in_background()
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, "epoch": 1}, tmp_path / "hpc_ckpt_1.ckpt")
    assert ["hpc_ckpt_1.ckpt"] == tags(tmp_path)
    io.teardown()


class Tuned(Module):
    """What Lightning's tuner chooses: the learning rate, and the size of batches."""

    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__(optimizer)
        self.lr, self.batch_size = 0.1, 1

    def train_dataloader(self) -> Any:
        rows: Any = torch.ones(8, 4)
        return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)


@pytest.mark.parametrize("find", ["lr_find", "scale_batch_size"])
def test_lightnings_tuner_saves_and_restores(find: str, tmp_path: Path) -> None:
    """Under hidden names, which no tag may have. The model is as it was, and nothing is left."""
    found = []
    for io in (lightnings(), in_background()):
        torch.manual_seed(1)
        module = Tuned()
        before = weights(module)
        callbacks: list[Any] = [ExactResume()] if isinstance(io, CheckpointIO) else []
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, plugins=[io], callbacks=callbacks, default_root_dir=tmp_path,
        )  # fmt: skip
        options: dict[str, Any] = {"num_training": 5} if find == "lr_find" else {"max_trials": 2, "steps_per_trial": 1}
        getattr(pl.tuner.Tuner(trainer), find)(module, **options)
        assert before == weights(module)
        assert [] == [*tmp_path.iterdir()]
        found.append((module.lr, module.batch_size))
    assert found[0] == found[1]


def test_a_pinned_checkpoint_is_not_dropped(tmp_path: Path) -> None:
    """Whatever ModelCheckpoint says; the others are."""
    io = CheckpointIO(durable=False)
    for name in ("one", "two", "three"):
        io.save_checkpoint({"state_dict": {"w": torch.ones(1)}}, tmp_path / name)
    pin_checkpoint(tmp_path, "one")
    for name in ("one", "two"):
        io.remove_checkpoint(tmp_path / name)
    io.teardown()
    assert ["one", "three"] == tags(tmp_path)


def test_a_run_of_lightnings_own_checkpoints_goes_on(tmp_path: Path, whole: Module) -> None:
    """Its file is read; a tag takes its name, and the file stays under another."""
    fit(every_epoch(tmp_path), epochs=2, io=lightnings())
    assert (tmp_path / "last.ckpt").is_file()
    resumed = fit(every_epoch(tmp_path), ckpt_path="last", seed=2)
    assert weights(whole) == weights(resumed)
    assert (tmp_path / "last-replaced.ckpt").is_file()
    assert not verify_checkpoint(tmp_path, "last.ckpt").problems


def test_a_last_checkpoint_may_be_a_link(tmp_path: Path, whole: Module) -> None:
    """``save_last="link"``: it loads, and what it points to is not written over."""
    fit(every_epoch(tmp_path, save_last="link"), epochs=2)
    assert (tmp_path / "last.ckpt").is_symlink()
    resumed = fit(every_epoch(tmp_path), ckpt_path=tmp_path / "last.ckpt", seed=2)
    assert weights(whole) == weights(resumed)
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert 2 * BATCHES == open_checkpoint(tmp_path, "epoch=1-step=4.ckpt").user_content()["global_step"]


def test_checkpoints_in_a_store(whole: Module) -> None:
    """A directory may be a URL."""
    place = "memory://lightning/run"
    fit(every_epoch(place, save_last=False, save_top_k=1), epochs=2)
    resumed = fit(every_epoch(place, save_last=False, save_top_k=1), ckpt_path=f"{place}/epoch=1-step=4.ckpt", seed=2)
    assert weights(whole) == weights(resumed)
    assert has_checkpoint(place)


class Full(pl.Callback):  # type: ignore[misc]
    """After an epoch the disk has no space."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            finalize_checkpoint()
            LocalStorage.create = no_space  # type: ignore[method-assign]


def no_space(self: LocalStorage, key: str, nbytes: int) -> Any:
    raise OSError(errno.ENOSPC, "no space left", key)


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards there is space again."""
    monkeypatch.setattr(LocalStorage, "create", LocalStorage.create)


@pytest.mark.parametrize("io", [CheckpointIO(), CheckpointIO(async_save=True)], ids=["sync", "async"])
@pytest.mark.usefixtures("space")
def test_a_save_that_fails_ends_the_run_and_removes_nothing(io: CheckpointIO, tmp_path: Path) -> None:
    """The checkpoint that it was to replace stays."""
    with pytest.raises(SaveFailed, match="no space left"):
        fit(every_epoch(tmp_path, save_top_k=1, save_last=False), io=io, callbacks=[Full()])
    assert ["epoch=0-step=2.ckpt"] == tags(tmp_path)
    assert not verify_checkpoint(tmp_path, "epoch=0-step=2.ckpt").problems


class Interrupt(pl.Callback):  # type: ignore[misc]
    """Ends the training right after a checkpoint was saved."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("the training's own error")


def test_an_error_in_training_finishes_what_is_under_way(tmp_path: Path) -> None:
    """And is raised as it is."""
    with pytest.raises(RuntimeError, match="own error"):
        fit(every_epoch(tmp_path), io=in_background(), callbacks=[Interrupt()])
    assert not verify_checkpoint(tmp_path, "last.ckpt").problems


@pytest.mark.usefixtures("space")
def test_an_error_in_training_is_not_hidden_by_a_save_that_fails(tmp_path: Path) -> None:
    """Which is logged."""
    checkpoints = every_epoch(tmp_path, every_n_epochs=2, save_last=False)
    with pytest.raises(RuntimeError, match="own error"):
        fit(checkpoints, io=in_background(), callbacks=[Full(), Interrupt()])


@pytest.mark.parametrize("io", [None, lightnings, in_lightnings_background], ids=["ours", "torch", "async"])
@pytest.mark.parametrize(
    ("changed", "kind"),
    [({"precision": "64-true"}, IncompatibleState), ({"optimizer": torch.optim.SGD}, OptimizerMismatch)],
    ids=["precision", "optimizer"],
)
def test_another_run_is_refused(
    changed: dict[str, Any], kind: type[Exception], io: Any, saved: Path, tmp_path: Path
) -> None:
    """Rather than one that only looks like the same, by whatever CheckpointIO; the model is then as it was, though
    Lightning makes optimizers only after it has loaded it."""
    made, kind_of = noted()
    path = saved / "last.ckpt"
    if io is not None:
        path = tmp_path / "of_lightning.ckpt"
        lightnings().save_checkpoint(CheckpointIO(durable=False).load_checkpoint(saved / "last.ckpt"), path)
    with pytest.raises(kind, match="was saved with"):
        fit(every_epoch(tmp_path), ckpt_path=path, seed=5, kind=kind_of, io=io and io(), **changed)
    torch.manual_seed(5)
    assert weights(Module()) == weights(made[0])


def test_a_strategy_that_loads_the_model_itself_is_asked_first(saved: Path, tmp_path: Path) -> None:
    """From one file, and from a directory of shards with the rest in a file of its own."""
    checkpoint = CheckpointIO(durable=False).load_checkpoint(saved / "last.ckpt")
    checkpoint["nxd_ckpt"]["runs_with"]["world size"] = 2
    lightnings().save_checkpoint(checkpoint, tmp_path / "whole.ckpt")
    lightnings().save_checkpoint({"nxd_ckpt": checkpoint["nxd_ckpt"]}, tmp_path / "shards" / "meta.pt")
    for name in ("whole.ckpt", "shards"):
        made, kind = noted()

        class LoadingStrategy(pl.strategies.SingleDeviceStrategy):  # type: ignore[misc]
            restore_checkpoint_after_setup = True

            def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None, made: Any = made) -> Any:
                made[0].net[0].weight.data.zero_()
                raise AssertionError("it was loaded")

        with pytest.raises(IncompatibleState, match="world size 2, and this run has 1"):
            fit(
                every_epoch(tmp_path), ckpt_path=tmp_path / name, seed=5, kind=kind, io=lightnings(),
                strategy=LoadingStrategy(torch.device("cpu")),
            )  # fmt: skip
        torch.manual_seed(5)
        assert weights(Module()) == weights(made[0])


def noted() -> tuple[list[Module], type[Module]]:
    """A class of modules, and those that are made of it."""
    made: list[Module] = []

    class Noted(Module):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer)
            made.append(self)

    return made, Noted


@pytest.fixture
def other_job(tmp_path: Path) -> Iterator[None]:
    """Another process that has saved here, and lives."""
    ready = tmp_path.with_name(tmp_path.name + "-ready")
    pid = os.fork()
    if pid == 0:
        try:
            CheckpointIO(durable=False).save_checkpoint({"state_dict": {"w": torch.ones(1)}}, tmp_path / "its")
            ready.touch()
            time.sleep(600)
        finally:
            os._exit(1)
    while not ready.exists():
        assert (0, 0) == os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    yield
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.usefixtures("other_job")
def test_a_second_job_is_refused_before_it_moves_or_removes_anything(tmp_path: Path) -> None:
    """Files of Lightning's, links and tags; by a whole run too."""
    lightnings().save_checkpoint({"state_dict": {}}, tmp_path / "file")
    lightnings().save_checkpoint({"state_dict": {}}, tmp_path / "last.ckpt")
    (tmp_path / "link").symlink_to("its")
    before = tags(tmp_path)
    io = CheckpointIO(durable=False)
    for act in (partial(io.save_checkpoint, {"state_dict": {"w": torch.ones(1)}}), io.remove_checkpoint):
        for name in before:
            with pytest.raises(DirectoryInUse):
                act(tmp_path / name)
            io = CheckpointIO(durable=False)
    with pytest.raises(DirectoryInUse):
        fit(every_epoch(tmp_path), epochs=1)
    assert before == tags(tmp_path)
    assert (tmp_path / "file").is_file()
    assert (tmp_path / "link").is_symlink()
    assert not verify_checkpoint(tmp_path, "its").problems


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    """A store's options for one save alone, a directory that is no checkpoint, a tag of another script's, and one that
    is two layouts at once."""
    io = CheckpointIO()
    with pytest.raises(InvalidArgument, match="CheckpointIO"):
        io.save_checkpoint({}, tmp_path / "t", storage_options={"key": "k"})
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointNotFound, match="'other' \\(not a checkpoint\\)"):
        io.load_checkpoint(tmp_path / "other")
    save_checkpoint(tmp_path, "t", {"w": torch.ones(1)}, durable=False)
    with pytest.raises(IncompatibleState, match="its user content is NoneType: Lightning did not save it"):
        io.load_checkpoint(tmp_path / "t")
    (tmp_path / "t" / "meta.pt").touch()
    with pytest.raises(UnsupportedState, match=r"t has meta\.pt, as Lightning's sharded checkpoints have"):
        io.load_checkpoint(tmp_path / "t")


def test_the_example_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """examples/train_lightning.py, twice."""
    for epochs in ("1", "2"):
        main(["--directory", str(tmp_path), "--epochs", epochs])
    assert ["epoch 1", "epoch 2"] == [line[:7] for line in capsys.readouterr().out.splitlines() if line[:5] == "epoch"]
