"""Facts about tags are learned once, and again as soon as anything that they follow from has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest
import torch

from nxd_ckpt import save_checkpoint
from nxd_ckpt.core.manifest import load_manifest
from nxd_ckpt.storage import local_files
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag import facts as module
from nxd_ckpt.tag import order
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.facts import facts, stamp_of
from nxd_ckpt.tag.listing import ListedTag, list_checkpoints, metrics_of
from nxd_ckpt.tag.surveyed import surveyed
from nxd_ckpt.tag.verify import lost_names
from nxd_ckpt.testing.storage import MemoryStorage

pytestmark = [pytest.mark.plain, pytest.mark.once]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the manifests that are parsed."""
    parsed: list[str] = []

    def load(data: bytes, where: str) -> object:
        parsed.append(where.split("/")[-2])
        return load_manifest(data, where)

    monkeypatch.setattr(order, "load_manifest", load)
    facts.clear()
    return parsed


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tags, and no time within which a file may change unnoticed."""
    monkeypatch.setattr(local_files, "_LATELY", 0)
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def save(directory: Path, step: int) -> None:
    model = {"weight": torch.ones(step)}
    save_checkpoint(directory, f"step_{step}", model, metrics={"loss": step}, durable=False)


def damage(tag: Path) -> None:
    """Another byte in a manifest of the same size."""
    path = tag / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"weight", b"weighs"))


def shown(listed: tuple[ListedTag, ...], tag: str) -> ListedTag:
    return next(one for one in listed if one.tag == tag)


def test_a_tag_is_read_once(two: Path, read: list[str]) -> None:
    """By all that ask for its facts, as long as it is the same."""
    storage = LocalStorage(two)

    def look() -> tuple[object, ...]:
        metrics = [metrics_of(storage, info) for info in list_tags(storage)]
        return list_checkpoints(two), metrics, lost_names(storage, "step_1")

    first = look()
    assert ([{"loss": 1.0}, {"loss": 2.0}], None) == first[1:]
    read.clear()
    assert (first, []) == (look(), read)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (damage, "CRC-32"),
        (lambda tag: rmtree(tag / "index"), "index"),
        (lambda tag: (tag / "manifest.json").unlink(), "manifest"),
        (lambda tag: (tag / "done").unlink(), "it lacks its 'done' marker"),
        (lambda tag: os.truncate(tag / "manifest.json", 9), "manifest"),
    ],
)
def test_a_tag_that_has_changed_is_read_again(
    two: Path, read: list[str], change: Callable[[Path], object], problem: str
) -> None:
    """However it was damaged: the listing shows it, and the other tag as before."""
    before = list_checkpoints(two)
    read.clear()
    change(two / "step_1")
    after = list_checkpoints(two)
    assert shown(before, "step_2") == shown(after, "step_2")
    assert "step_2" not in read
    assert problem in " ".join(shown(after, "step_1").problems)


def test_a_replaced_tag_is_shown_with_its_own_facts(two: Path, read: list[str]) -> None:
    """Of its size, order and metrics."""
    list_checkpoints(two)
    save_checkpoint(two, "step_1", {"weight": torch.ones(50)}, metrics={"loss": 7.0}, durable=False)
    listed = list_checkpoints(two)
    assert [("step_2", 2.0), ("step_1", 7.0)] == [(tag.tag, tag.metrics["loss"]) for tag in listed]
    assert listed[1].nbytes > listed[0].nbytes


def test_lost_files_are_noticed(two: Path, read: list[str]) -> None:
    """What needs to be there is known; whether it is there is looked at each time."""
    storage = LocalStorage(two)
    assert None is lost_names(storage, "step_1")
    (file,) = (two / "step_1" / "model").iterdir()
    file.unlink()
    assert f"{two}/step_1 lost model/{file.name}" == lost_names(storage, "step_1")


def test_a_tag_that_changed_just_now_is_not_known(tmp_path: Path) -> None:
    """A file system may keep whole seconds: the next change would go unnoticed."""
    save(tmp_path, 1)
    assert None is stamp_of(LocalStorage(tmp_path), "step_1")


def test_a_store_shows_by_its_listing_that_a_tag_is_the_same(read: list[str]) -> None:
    """A file with another content has another mark; what the listing does not show is not vouched for."""
    store = MemoryStorage()
    for key in ("a/done", "a/manifest.json", "a/index/dp_rank_00.json"):
        store.write(key, b"1")
    stamp = stamp_of(surveyed(store), "a")
    assert stamp is not None
    assert stamp == stamp_of(surveyed(store), "a")
    assert None is stamp_of(surveyed(store), "a", ["index/dp_rank_00.json"])
    assert None is stamp_of(store, "a")
    store.write("a/manifest.json", b"2")
    assert stamp != stamp_of(surveyed(store), "a")


def test_facts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest tag makes room; another stamp ends what was known."""
    facts.clear()
    monkeypatch.setattr(module, "_TAGS", 2)
    for tag in ("a", "b", "c"):
        facts.put("url", tag, 1, "kind", tag)
    assert [{}, {"kind": "b"}, {"kind": "c"}] == [facts.get("url", tag, 1) for tag in ("a", "b", "c")]
    assert {} == facts.get("url", "c", 2)
