"""Mounted buckets: outputs where no directory can be renamed, and the refusal where nothing can."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import close_checkpointers, convert, load_checkpoint, save_checkpoint, unshard_checkpoint
from nxd_ckpt.errors import InvalidArgument, StorageError

CONVERSIONS = [partial(convert, to="files"), partial(convert, to="dcp")]


@pytest.fixture
def no_directory_is_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gcsfuse does it."""
    rename = os.rename

    def refused(old: str, new: str) -> None:
        if os.path.isdir(old) and os.listdir(old):
            raise OSError(errno.ENOSYS, "Function not implemented")
        rename(old, new)

    monkeypatch.setattr(os, "rename", refused)
    monkeypatch.setattr("nxd_ckpt.storage.local.exchange", lambda one, other: False)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("convert", CONVERSIONS, ids=["files", "dcp"])
@pytest.mark.usefixtures("no_directory_is_renamed")
def test_an_output_is_written_in_place_where_no_directory_is_renamed(
    tmp_path: Path, convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same files, also over an earlier one, and nothing beside it."""
    model = {"weight": torch.arange(6.0)}
    save_checkpoint(tmp_path / "run", "t", model)
    close_checkpointers()
    convert(tmp_path / "run" / "t", tmp_path / "out" / "placed")
    convert(tmp_path / "run" / "t", tmp_path / "out" / "placed", overwrite=True)
    assert ["placed"] == os.listdir(tmp_path / "out")
    with pytest.raises(InvalidArgument, match="is not empty"):
        convert(tmp_path / "run" / "t", tmp_path / "out" / "placed")
    monkeypatch.undo()
    convert(tmp_path / "run" / "t", tmp_path / "renamed")
    assert files(tmp_path / "renamed") == files(tmp_path / "out" / "placed")
    for name in files(tmp_path / "renamed"):
        if name.endswith((".pt", ".distcp")):
            assert (tmp_path / "renamed" / name).read_bytes() == (tmp_path / "out" / "placed" / name).read_bytes()


@pytest.mark.parametrize("convert", CONVERSIONS, ids=["files", "dcp"])
@pytest.mark.usefixtures("no_directory_is_renamed")
def test_an_output_that_fails_in_place_leaves_nothing(tmp_path: Path, convert: Callable[..., Any]) -> None:
    save_checkpoint(tmp_path / "run", "t", {"weight": torch.arange(6.0)})
    close_checkpointers()
    (model,) = (tmp_path / "run" / "t" / "model").iterdir()
    model.write_bytes(model.read_bytes()[:-100] + bytes(100))
    with pytest.raises(Exception, match=r"expected|found"):
        convert(tmp_path / "run" / "t", tmp_path / "out" / "placed")
    assert not (tmp_path / "out").exists()


def test_where_nothing_is_renamed_the_first_call_names_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with mountpoint-s3: a save and a conversion are refused before any data is written."""
    model = {"weight": torch.arange(6.0)}
    save_checkpoint(tmp_path / "run", "t", model)
    close_checkpointers()

    def refused(*paths: Any, **_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    for name in ("rename", "replace", "link"):
        monkeypatch.setattr(os, name, refused)
    for call in (
        lambda: save_checkpoint(tmp_path / "mounted", "t", model),
        lambda: unshard_checkpoint(tmp_path / "run" / "t", tmp_path / "mounted" / "whole"),
    ):
        with pytest.raises(StorageError, match="s3://BUCKET/FOLDER"):
            call()
        assert [] == list((tmp_path / "mounted").rglob("*.pt"))
    close_checkpointers()
    load_checkpoint(tmp_path / "run", "t", {})
