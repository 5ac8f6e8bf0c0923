"""``g_iostate``, through which trainers wait for saves and remove tags."""

import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.usefixtures("nxd")


@pytest.fixture
def library() -> Any:
    nxd_ckpt.install()
    return import_module("neuronx_distributed")


def save(library: Any, directory: Path, tag: str, **options: Any) -> None:
    library.save_checkpoint(str(directory), tag, {"weight": torch.ones(2)}, user_content={}, **options)


def tags(directory: Path) -> set[str]:
    return {tag.tag for tag in nxd_ckpt.list_checkpoints(directory)}


class Gate:
    """Stops the thread that writes at its first rename of a tag into place, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        rename = LocalStorage.rename

        def held(storage: LocalStorage, source: str, target: str) -> None:
            if target.startswith("epoch="):
                self.reached.set()
                self._open.wait()
            rename(storage, source, target)

        monkeypatch.setattr(LocalStorage, "rename", held)

    def open(self) -> None:
        self._open.set()


def test_there_is_none_before_the_first_save(tmp_path: Path, library: Any):
    """Trainers test it for None; after the first save it is there, under the module's name, until it is undone."""
    assert None is library.trainer.checkpoint.g_iostate
    save(library, tmp_path, "a")
    assert library.trainer.checkpoint.g_iostate is not None
    nxd_ckpt.uninstall()
    assert None is library.trainer.checkpoint.g_iostate


def test_a_removal_is_queued_behind_the_save_in_flight(tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch):
    """As the trainer's retention does: the older tag is removed right after the next one's save began, and stays until
    that is complete. Nothing waits; a tag that does not exist is no error."""
    save(library, tmp_path, "epoch=1.ckpt", async_save=True)
    library.finalize_checkpoint()
    gate = Gate(monkeypatch)
    save(library, tmp_path, "epoch=2.ckpt", async_save=True)
    library.trainer.checkpoint.g_iostate.submit_remove(-1, True, ["epoch=1.ckpt"])
    library.trainer.checkpoint.g_iostate.submit_remove(-1, True, ["epoch=0.ckpt"])
    gate.reached.wait()
    assert {"epoch=1.ckpt"} == tags(tmp_path)
    gate.open()
    library.finalize_checkpoint()
    assert {"epoch=2.ckpt"} == tags(tmp_path)


def test_a_removal_without_a_save_in_flight(tmp_path: Path, library: Any):
    save(library, tmp_path, "a")
    save(library, tmp_path, "b")
    library.trainer.checkpoint.g_iostate.submit_remove(-1, False, ["a"])
    assert {"b"} == tags(tmp_path)


def test_a_failed_save_keeps_the_tag_before_it(tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch):
    """A trainer drops the last good tag for one whose save then fails: it stays until the next save is complete."""
    save(library, tmp_path, "epoch=1.ckpt", async_save=True)
    library.finalize_checkpoint()
    with monkeypatch.context() as broken:
        broken.setattr(LocalStorage, "rename", _no_space)
        save(library, tmp_path, "epoch=2.ckpt", async_save=True)
        library.trainer.checkpoint.g_iostate.submit_remove(-1, True, ["epoch=1.ckpt"])
        with pytest.raises(CheckpointError):
            library.finalize_checkpoint()
        library.trainer.checkpoint.g_iostate.wait_remove()
    assert {"epoch=1.ckpt"} == tags(tmp_path)
    save(library, tmp_path, "epoch=3.ckpt", async_save=True)
    library.trainer.checkpoint.g_iostate.wait_all()
    nxd_ckpt.close_checkpointers()
    assert {"epoch=3.ckpt"} == tags(tmp_path)


def _no_space(storage: LocalStorage, source: str, target: str) -> None:
    raise OSError(28, "No space left on device")


def test_a_tag_that_is_saved_again_stays(tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch):
    """A removal that was put off is of the tag of then, not of a later one of that name."""
    save(library, tmp_path, "last", async_save=True)
    library.finalize_checkpoint()
    with monkeypatch.context() as broken:
        broken.setattr(LocalStorage, "rename", _no_space)
        save(library, tmp_path, "b", async_save=True)
        library.trainer.checkpoint.g_iostate.submit_remove(-1, True, ["last"])
        library.trainer.checkpoint.g_iostate.wait_remove()
        with pytest.raises(CheckpointError):
            library.finalize_checkpoint()
    save(library, tmp_path, "last")
    nxd_ckpt.close_checkpointers()
    assert {"last"} == tags(tmp_path)


def test_waiting_for_saves(tmp_path: Path, library: Any):
    """wait_save returns once the save in flight is complete, with and without one."""
    save(library, tmp_path, "shards", async_save=True)
    library.trainer.checkpoint.g_iostate.wait_save(async_remove=True)
    assert {"shards"} == tags(tmp_path)
    library.trainer.checkpoint.g_iostate.wait_save(async_remove=True)
