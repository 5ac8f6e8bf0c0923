"""``nxd-ckpt verify``: the exit code says whether a tag is what was written, the output what is not."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Run


@pytest.mark.parametrize("tag", ["z_plain", "zero1", "cut"])
def test_a_whole_tag_is_ok(run: Run, examples: Path, tag: str) -> None:
    """Every byte of every file is verified; the latest tag is meant unless another is named."""
    outcome = run("verify", examples, tag, "--json")
    found = outcome.document
    assert (0, "") == (outcome.code, outcome.err)
    data = [p for p in (examples / tag).rglob("*") if p.is_file() and p.suffix != ".json"]
    expected = {
        "directory": str(examples),
        "tag": tag,
        "ok": True,
        "verified_by": "index",
        "files": len(data),
        "nbytes": sum(path.stat().st_size for path in data),
        "verified_nbytes": sum(path.stat().st_size for path in data),
        "undigested_nbytes": 0,
        "problems": [],
        "guests": [],
    }
    assert expected == found
    assert run("verify", examples / tag).out.startswith(f"{examples}/{tag}: ok\n  read {len(data)} files, ")
    assert "cut" == run("verify", examples, "--json").document["tag"]


def test_all_tags_are_verified(run: Run, copied: Path) -> None:
    """With --all: a document for each complete tag, oldest first; one that is damaged hides none of the others."""
    (copied / "half").mkdir()
    (copied / "half" / "checkpoint").write_text("1")
    outcome = run("verify", copied, "--all", "--json")
    assert (0, True) == (outcome.code, outcome.document["ok"])
    assert ["z_plain", "zero1", "cut"] == [found["tag"] for found in outcome.document["tags"]]
    assert run("verify", copied, "zero1", "--json").document == outcome.document["tags"][1]
    assert run("verify", copied / "zero1", "--all", "--json").document["tags"] == outcome.document["tags"][1:2]

    (copied / "zero1" / "scheduler.pt").unlink()
    (copied / "z_plain" / "done").unlink()
    os.mkfifo(copied / "z_plain" / "done")

    outcome = run("verify", copied, "--all")
    assert 1 == outcome.code
    said = {line.rpartition("/")[2] for line in outcome.out.splitlines() if line.startswith(f"{copied}/")}
    assert {"z_plain: DAMAGED, 1 problem", "zero1: DAMAGED, 1 problem", "cut: ok"} == said


def test_all_means_no_tag(run: Run, examples: Path, tmp_path: Path) -> None:
    """One with a name is a wrong command line; a directory without a complete tag is an error."""
    with pytest.raises(SystemExit, match="2"):
        run("verify", examples, "zero1", "--all")
    outcome = run("verify", tmp_path, "--all")
    assert (1, True) == (outcome.code, "no complete checkpoint" in outcome.err)


def test_every_problem_is_listed(run: Run, copied: Path) -> None:
    """A changed file, a lost one and a lost index: exit code 1, and a line for each."""
    tag = copied / "zero1"
    changed, lost = tag / "scheduler.pt", tag / "rank_content" / "rank_00000.pt"
    changed.write_bytes(changed.read_bytes().replace(b"last_epoch", b"LAST_EPOCH"))
    whole = run("verify", copied, "zero1", "--json").document["files"]
    lost.unlink()
    assert whole - 1 == run("verify", copied, "zero1", "--json").document["files"]
    index = tag / "index" / "dp_rank_01_tp_rank_00_pp_rank_00.json"
    index.unlink()
    outcome = run("verify", copied, "zero1", "--json")
    assert (1, False, "") == (outcome.code, outcome.document["ok"], outcome.err)
    problems = outcome.document["problems"]
    assert sorted(map(str, (changed, lost, index))) == sorted(
        next(str(path) for path in (changed, lost, index) if str(path) in problem) for problem in problems
    )
    text = run("verify", copied, "zero1")
    first, *lines, read = text.out.splitlines()[:5]
    assert (1, f"{tag}: DAMAGED, 3 problems") == (text.code, first)
    assert [f"  problem: {problem}" for problem in problems] == lines
    assert "and the index; only " in read


def test_a_damaged_manifest_is_a_problem(run: Run, copied: Path) -> None:
    """A script gets its document also then."""
    (copied / "cut" / "manifest.json").write_bytes(b"")
    outcome = run("verify", copied, "--json")
    [problem] = outcome.document["problems"]
    assert (1, "cut", 0) == (outcome.code, outcome.document["tag"], outcome.document["verified_nbytes"])
    assert problem.startswith(f"{copied}/cut/manifest.json: not valid JSON")


def test_what_has_no_digests_is_not_called_ok(run: Run, tmp_path: Path) -> None:
    """A model of others can be read, and no more is known; advice about tags is none about it."""
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    save_file({"up.weight": torch.ones(2, 2)}, weights)
    for command in (("verify",), ("verify", "--all")):
        outcome = run(*command, weights.parent)
        assert (0, True) == (outcome.code, "model: readable, and without digests that could show damage" in outcome.out)
    assert "0 of 1 tag undamaged; 1 readable, and without digests" in outcome.out
    weights.write_bytes(weights.read_bytes()[:-4])
    outcome = run("verify", weights.parent)
    assert (1, False) == (outcome.code, "fallback=True" in outcome.out)
