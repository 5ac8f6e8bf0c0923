"""Whatever stands in place of a file: nobody hangs, raises anything but CheckpointErrors, or touches what lies outside.

A process tries all kinds in one place (``places``), with a limit on memory.
"""

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.core.manifest import FileEntry, dump_manifest, load_manifest
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.hostile.places import KINDS, model
from tests.support.processes import run_program

NAME = "dp_rank_00_tp_rank_00_pp_rank_00"
OF_THE_JOB = ["", "/journal.json", "/lease.json", "/staging", "/trash"]
OF_THE_DIRECTORY = [f".nxd_ckpt{place}" for place in OF_THE_JOB] + ["newest"]
PROVED = ["manifest.json", "index", f"index/{NAME}.json", "model", f"model/{NAME}.pt", "user_content.pt"]
OF_A_TAG = [f"one/{place}" for place in PROVED]
MARKERS = ["one/done", "one/checkpoint"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tags ``one`` and ``two``."""
    kept = tmp_path_factory.mktemp("kept") / "run"
    with Checkpointer(kept, durable=False) as checkpointer:
        checkpointer.save("one", model(), user_content={"steps": 1})
        checkpointer.save("two", {"weight": torch.zeros(3)})
    return kept


def calls(kept: Path, place: str) -> list[tuple[str, dict[str, Any]]]:
    """Return each hostile file's outcomes in that place, call by call: none may fail in another way than it should."""
    source = "import runpy\nrunpy.run_module('tests.hostile.places', run_name='__main__')"
    done = run_program(source, kept, place)
    assert 0 == done.returncode, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert list(KINDS) == [one["kind"] for one in outcomes]
    for one in outcomes:
        assert one["outside"], one
        assert not [done for done in one["calls"].values() if "raw" in done], one
    return [(one["kind"], one["calls"]) for one in outcomes]


@pytest.mark.parametrize("place", OF_THE_DIRECTORY)
@pytest.mark.one_in(2)
def test_a_file_of_the_directory_is_in_nobodys_way(kept: Path, place: str) -> None:
    """Tags are listed, loaded, verified and saved as if it were not there."""
    for kind, done in calls(kept, place):
        values = {name: outcome.get("value", outcome) for name, outcome in done.items()}
        loaded = {"weight": [1.0, 1.0, 1.0]}
        expected = {"has_checkpoint": True, "load": loaded, "verify": [], "list": ["one", "two"], "save": None}
        assert expected == values, kind


@pytest.mark.parametrize("place", OF_A_TAG)
def test_a_file_of_a_tag_is_a_problem_of_that_tag(kept: Path, place: str) -> None:
    """A load and ``verify`` name it; the other tag is listed, and another one is saved."""
    for kind, done in calls(kept, place):
        assert {"value": True} == done["has_checkpoint"], kind
        assert place in done["load"]["told"], kind
        assert place in done["verify"]["value"][0], kind
        assert {"value": ["one", "two"]} == done["list"], kind


@pytest.mark.parametrize("place", MARKERS)
def test_a_marker_that_is_none_is_a_problem(kept: Path, place: str) -> None:
    """``verify`` names it, or there is no such tag; the other one is there."""
    for kind, done in calls(kept, place):
        said = done["verify"]
        assert place in said["value"][0] if "value" in said else "is incomplete" in said["told"], kind
        assert {"one", "two"} == set(done["list"]["value"]), kind


def test_a_tag_that_is_no_directory_is_none(kept: Path) -> None:
    """It is named and left alone, and the other one is there."""
    for kind, done in calls(kept, "one"):
        assert {"value": ["two"]} == done["list"], kind
        assert re.search("/one is (a|no) |no tag 'one'", done["load"]["told"]), kind


NAMES = ["../../secret", "/etc/passwd", "model/../../../secret", "nul\0", "m" * 5000, "\ud800", "a\\b", ""]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["files", "tensors"])
def test_an_index_that_names_a_file_outside(tmp_path: Path, where: str, name: str) -> None:
    """Whoever made it fits all digests to it: the name is refused, and nothing of that name is read."""
    (tmp_path / "secret").write_bytes(b"hers")
    with Checkpointer(tmp_path / "run", durable=False) as checkpointer:
        checkpointer.save("one", model())
    tag = tmp_path / "run" / "one"

    def rename(document: dict[str, Any]) -> None:
        if where == "files":
            document["files"] = {name: [4, zlib.crc32(b"hers")]}
        else:
            document["tensors"]["files"][0] = name

    reseal(tag, rename)
    (problem, *_) = verify_checkpoint(tmp_path / "run", "one").problems
    assert f"{tag}/index/{NAME}.json: malformed" in problem
    with pytest.raises(MalformedFile, match=f"{NAME}.json: malformed"), Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.load("one", {})


def reseal(tag: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index of the one rank, and the manifest so that it vouches for it."""
    index, manifest = tag / "index" / f"{NAME}.json", tag / "manifest.json"
    document = json.loads(index.read_bytes())
    change(document)
    data = json.dumps(document).encode()
    index.write_bytes(data)
    line = FileEntry(len(data), zlib.crc32(data))
    manifest.write_bytes(dump_manifest(replace(load_manifest(manifest.read_bytes(), ""), ranks=(line,))))
