"""``nxd-ckpt doctor``: which tags it takes, what it says, and its exit code."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from nxd_ckpt import save_checkpoint
from nxd_ckpt.cli.main import main
from tests.support.damage import flip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tags of a run, the last of which has a NaN, and the optimizer of the one before."""
    directory = tmp_path_factory.mktemp("run")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(1, 4):
        model(torch.randn(2, 4)).square().sum().backward()
        if step < 3:
            optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                model.bias[0] = float("nan")
        save_checkpoint(directory, f"step_{step}", model, optimizer, user_content={"step": step})
    return directory


def test_a_directory_is_examined_with_the_tag_before(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its latest tag, after the one before; problems are printed, and the exit code is 1."""
    assert 1 == main(["doctor", str(run)])
    out = capsys.readouterr().out
    assert "problem: model/bias: 1 NaN and 0 infinite of 4 elements" in out
    assert "problem: optimizer: no parameter made a step: both tags are of step 2, but user_content/step" in out
    assert f"step 2; examined after {run}/step_2 (step 2)" in out


def test_findings_of_a_kind_are_grouped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three are shown whole, with the file that the tensor is in; of the others their names. JSON has all."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((1, 2), float("nan"))).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, "t", model, optimizer)
    assert 1 == main(["doctor", str(tmp_path / "t")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert 4 == len(lines)
    assert lines[0].startswith("problem: model/0.weight: 4 NaN and 0 infinite of 4 elements (in model/")
    assert lines[1].startswith("problem: model/1.weight: 4 NaN and 0 infinite of 4 elements (in model/")
    assert lines[3].startswith("problem: 9 more findings of values (--json has all): model/3.weight, optim/0.weight/")
    assert 1 == main(["doctor", str(tmp_path / "t"), "--json"])
    assert 12 == len(json.loads(capsys.readouterr().out)["findings"])


def test_names_that_were_passed_are_not_checked(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line says so, of an optimizer whose names the tag does not have; and only then."""
    names = tmp_path / "names.json"
    names.write_text(json.dumps([[["weight", "bias"]]]))
    for more in ([], ["--saved-param-names", str(names)]):
        assert 0 == main(["doctor", str(run / "step_1"), *more])
        assert bool(more) == ("names and cuts that you passed are not checked" in capsys.readouterr().out)


def test_tags_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One, and the one before it or another; all is well with these."""
    assert 0 == main(["doctor", str(run / "step_2"), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (True, f"{run}/step_2", f"{run}/step_1", []) == tuple(
        document[key] for key in ("ok", "tag", "before", "findings")
    )
    assert 0 == main(["doctor", str(run / "step_2"), "--alone", "--quiet"])
    assert "" == capsys.readouterr().out
    assert 0 == main(["doctor", str(run / "step_1"), str(run / "step_2"), "--json"])
    assert document == json.loads(capsys.readouterr().out), "as for diff, the earlier tag is the first"
    assert 1 == main(["doctor", str(run / "step_2"), str(run / "step_1")])
    out = capsys.readouterr().out
    assert ("was at step 2 and is at step 1" in out, "the earlier one is the first" in out) == (True, True)


def test_a_damaged_tag_is_named_once(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of it is called read and verified; the next step is named."""
    shutil.copytree(run / "step_1", tmp_path / "step_1")
    [file] = (tmp_path / "step_1" / "model").iterdir()
    flip(file)
    assert 1 == main(["doctor", str(tmp_path)])
    out = capsys.readouterr().out
    assert f"problem: {tmp_path}/step_1: model/{file.name}" in out
    assert "0 tensors" not in out
    assert f"nxd-ckpt verify --all {tmp_path} says which tags are undamaged" in out
    assert 1 == main(["doctor", str(tmp_path), "--json"])
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert ("files", "problem") == (finding["kind"], finding["severity"])
    assert f"no tensor was examined; nxd-ckpt verify {tmp_path}/step_1 lists what is damaged" in out


@pytest.mark.parametrize("lost", ["manifest.json", "index", "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt"])
def test_a_damaged_tag_before_does_not_hide_the_tag(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    """It is a problem, which names it, and the tag is examined by itself: nothing is called damaged but the other."""
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "step_2" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if lost == "manifest.json":
        path.write_text("{broken")
    assert 1 == main(["doctor", str(tmp_path / "run"), "--json"])
    document = json.loads(capsys.readouterr().out)
    before, own = document["findings"]
    assert ("before", "problem", "values") == (before["kind"], before["severity"], own["kind"])
    assert str(path) in before["message"]
    assert (document["tag"], 2) == (f"{tmp_path}/run/step_3", document["step"])
    assert 1 == main(["doctor", str(tmp_path / "run" / "step_2"), str(tmp_path / "run" / "step_3")])
    out = capsys.readouterr().out
    assert f"problem: the tag before: {path}" in out
    assert "step 2; examined by itself" in out
    assert "were read" in out
