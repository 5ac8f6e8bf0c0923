"""``nxd-ckpt list``: every tag in its order, whoever wrote it, and why the incomplete ones are."""

import json
import os
import re
import shutil
import sys
from datetime import datetime
from pathlib import Path

import pytest

from nxd_ckpt.coordination.control_files import trash_file
from tests.cli.conftest import Run


def bytes_below(tag: Path) -> int:
    """Of a tag's files, markers left out."""
    files = [path for path in tag.rglob("*") if path.is_file() and path.name not in ("checkpoint", "done")]
    return sum(path.stat().st_size for path in files)


def states(outcome_lines: list[str]) -> dict[str, str]:
    """TAG -> STATE of a printed table."""
    head = next(number for number, line in enumerate(outcome_lines) if line.split()[:2] == ["TAG", "STATE"])
    rows = [line.split() for line in outcome_lines[head + 1 :] if line.startswith("  ") and "--wide" not in line]
    return {row[0]: row[1] for row in rows}


def test_tags_come_in_the_order_in_which_they_became_visible(run: Run, examples: Path) -> None:
    """Not in that of their names; the last complete one is marked. With sizes and parts of each in words."""
    outcome = run("list", examples)
    lines = outcome.out.splitlines()
    assert (0, "") == (outcome.code, outcome.err)
    assert f"{examples}: 3 tags, 3 complete" == lines[0]
    assert [("z_plain", "complete"), ("zero1", "complete"), ("cut", "latest")] == list(states(lines).items())
    lines = run("list", examples, "--wide").out.splitlines()
    assert lines[2].endswith("model, plain optimizer, scheduler, user content")
    assert lines[3].endswith("model, zero1 optimizer, scheduler, rank content")
    for line, sizes in zip(lines[2:-1], ("1 rank", "dp=2", "dp=2 tp=4 ep=2"), strict=True):
        assert f"  {sizes}  " in line


def test_the_document_says_all_of_a_tag(run: Run, examples: Path) -> None:
    """Bytes are those on disk, the time is the manifest's order time, parts and sizes are the manifest's."""
    document = run("list", examples, "--json").document
    manifest = json.loads((examples / "cut" / "manifest.json").read_bytes())
    tag = document["tags"][-1]
    assert 0 <= tag.pop("age_seconds") < 3600
    assert manifest["order_time"] == datetime.fromisoformat(tag.pop("order_time").replace("Z", "+00:00")).timestamp()
    expected = {
        "tag": "cut",
        "complete": True,
        "latest": True,
        "written_by": "nxd_ckpt",
        "topology": {"dp": 2, "tp": 4, "pp": 1, "ep": 2},
        "parts": manifest["parts"],
        "metrics": {},
        "pinned": False,
        "guests": [],
        "nbytes": bytes_below(examples / "cut"),
        "lacks": [],
        "problems": [],
    }
    assert expected == tag
    assert (str(examples), "cut", None) == (document["directory"], document["latest"], document["note"])


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_listing_fits_the_terminal(run: Run, examples: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Columns that do not fit are left out, the least important first, and named; a wide terminal shows all, and so
    does a listing that is piped elsewhere."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    piped = run("list", examples).out.splitlines()[1].split()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, head, *rows, note = run("list", examples).out.splitlines()
    assert "nxd-ckpt verify" in note
    shown, everything = head.split(), run("list", examples, "--wide").out.splitlines()[1].split()
    assert max(map(len, [head, *rows])) <= width
    assert everything[: len(shown)] == shown
    assert everything == piped
    assert {"TAG", "STATE", "SAVED", "SIZE", "TOPOLOGY", "BY"} <= set(shown)
    assert everything[len(shown) :] == (re.findall("[A-Z]+", rows[-1]) if len(rows) > 3 else [])
    assert (width == 200) == (shown == everything)


def test_tags_of_neuronx_distributed_are_listed(run: Run, golden: Path) -> None:
    """Their sizes and parts come from the files; every key is there, as for ours."""
    directory = golden / "j_dp2_zero1_xser_async_kept2" / "ckpt"
    document = run("list", directory, "--json").document
    assert [("step_4", False), ("step_5", True)] == [(tag["tag"], tag["latest"]) for tag in document["tags"]]
    for tag in document["tags"]:
        assert "neuronx_distributed" == tag["written_by"]
        assert {"dp": 2, "tp": 1, "pp": 1, "ep": 1} == tag["topology"]
        assert "zero1" == tag["parts"]["optimizer"]
        assert bytes_below(directory / tag["tag"]) == tag["nbytes"]


def test_a_size_that_no_file_tells_is_not_made_up(run: Run, golden: Path, tmp_path: Path) -> None:
    """Without ZeRO-1, NxD's files are the same for any number of data-parallel replicas. The age is in days here."""
    directory = shutil.copytree(golden / "g_dp2_tp2_nozero1_xser" / "ckpt", tmp_path / "ckpt")
    then = datetime.now().timestamp() - 3 * 86400 - 60
    for done in directory.glob("*/done"):
        os.utime(done, (then, then))
    [tag] = run("list", directory, "--json").document["tags"]
    assert {"dp": None, "tp": 2, "pp": 1, "ep": 1} == tag["topology"]
    shown = run("list", directory, "--wide").out
    assert ("  dp=? tp=2  " in shown, "  3 d  " in shown) == (True, True)


def test_what_an_incomplete_tag_lacks_is_said(run: Run, golden: Path, tmp_path: Path) -> None:
    """The marker, and each part with ranks whose files are missing; it is never the latest."""
    shutil.copytree(golden / "c_dp2_tp2_zero1_xser" / "ckpt", tmp_path / "ckpt")
    shutil.copytree(tmp_path / "ckpt" / "step_3", tmp_path / "ckpt" / "step_4")
    (tmp_path / "ckpt" / "step_4" / "done").unlink()
    (tmp_path / "ckpt" / "step_4" / "optim" / "dp_rank_01_tp_rank_00_pp_rank_00.pt").unlink()
    document = run("list", tmp_path / "ckpt", "--json").document
    lacks = {tag["tag"]: tag["lacks"] for tag in document["tags"]}
    ranks = "1 of 4 ranks' files in optim/; there are 3 rank files: dp 0-1, tp 0-1, pp 0-0 with 1 missing"
    assert {"step_3": [], "step_4": ["its 'done' marker", ranks]} == lacks
    assert "step_3" == document["latest"]
    lines = run("list", tmp_path / "ckpt").out.splitlines()
    assert {"step_3": "latest", "step_4": "incomplete"} == states(lines)
    assert f"step_4 is incomplete: it lacks {ranks}" in lines


def test_an_empty_directory_holds_no_checkpoints(run: Run, tmp_path: Path) -> None:
    """That is an answer, not an error."""
    outcome = run("list", tmp_path)
    assert (0, f"{tmp_path}: no checkpoints; it is empty or absent\n") == (outcome.code, outcome.out)
    document = run("list", tmp_path, "--json").document
    assert ([], None) == (document["tags"], document["latest"])


def test_a_directory_of_something_else_is_described(run: Run, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    outcome = run("list", tmp_path)
    assert (0, f"{tmp_path}: no checkpoints; it holds 'logs' (not a checkpoint)\n") == (outcome.code, outcome.out)


def test_a_tag_is_no_directory_of_tags(run: Run, examples: Path) -> None:
    outcome = run("list", examples / "cut")
    assert (1, "") == (outcome.code, outcome.out)
    assert f"itself a tag: load_checkpoint('{examples}/cut') loads it" in outcome.err
    assert f"nxd-ckpt list {examples} lists its directory" in outcome.err


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_what_is_no_directory_of_tags_is_named(run: Run, copied: Path, command: str) -> None:
    """A directory in a tag, an incomplete tag, and a tag's name without its directory."""
    assert f"it is a part of the tag {copied}/zero1: name that" in run(command, copied / "zero1" / "model").err
    (copied / "zero1" / "done").unlink()
    said = run(command, copied / "zero1").err
    assert "it is itself a tag, and incomplete: it has no 'done' marker, its save was interrupted" in said
    assert f"does not exist; did you mean {copied}/cut?" in run(command, copied.parent / "cut").err


def test_a_damaged_tag_does_not_hide_the_others(run: Run, copied: Path) -> None:
    """Its row says what is wrong, and the others are as before."""
    (copied / "zero1" / "manifest.json").write_bytes(b"{")
    tags = {tag["tag"]: tag for tag in run("list", copied, "--json").document["tags"]}
    [problem] = tags["zero1"]["problems"]
    assert problem.startswith(f"{copied}/zero1/manifest.json: not valid JSON")
    assert (None, None) == (tags["zero1"]["topology"], tags["zero1"]["parts"])
    assert [[], []] == [tags[name]["problems"] for name in ("z_plain", "cut")]
    lines = run("list", copied).out.splitlines()
    assert f"zero1: {problem}" in lines
    assert {"z_plain": "complete", "zero1": "unreadable", "cut": "latest"} == states(lines)
    assert f"{copied}: 3 tags, 2 complete" == lines[0]


def test_a_replacement_that_a_crash_interrupted_hides_no_tag(run: Run, copied: Path) -> None:
    """The old tag was out of the way and the new one not in yet: it is put back, as by a load."""
    (copied / ".nxd_ckpt" / "trash").mkdir(parents=True, exist_ok=True)
    (copied / "zero1").rename(copied / trash_file("run-1", "zero1"))
    (copied / ".nxd_ckpt" / "journal.json").write_text('{"attempt": "run-1", "tag": "zero1"}')
    tags = run("list", copied, "--json").document["tags"]
    assert ["z_plain", "zero1", "cut"] == [tag["tag"] for tag in tags]


def test_names_cannot_move_the_cursor(run: Run, copied: Path) -> None:
    """A tag's name may hold anything but a slash; it stays on its line, and whole in the document."""
    os.rename(copied / "zero1", copied / "zero\n\x1b[2J1\udcff")
    assert r"  zero\n\x1b[2J1\udcff  " in run("list", copied).out
    names = [tag["tag"] for tag in run("list", copied, "--json").document["tags"]]
    assert ["z_plain", "zero\n\x1b[2J1\udcff", "cut"] == names
