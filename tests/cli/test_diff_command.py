"""``nxd-ckpt diff``: exit codes as diff has them, a document, and lines that say the same."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nxd_ckpt import Topology, save_checkpoint
from tests.cli.conftest import Run
from tests.interop.saving import save_as_every_rank


def test_what_differs_is_shown(run: Run, copied: Path) -> None:
    """0 where nothing does, 1 where something does, 2 where nobody can tell."""
    assert (0, "") == (run("diff", copied / "cut", copied / "cut", "--quiet").code, "")
    assert 2 == run("diff", copied / "cut", copied / "absent").code
    assert 2 == run("diff", copied / "cut", copied / "cut", "--prefix", "layers").code

    other = {"norm": torch.tensor([0.0, 1.0, float("nan")]), "new": torch.ones(2)}
    save_as_every_rank(copied, "other", [Topology()], lambda _: {"model": other, "user_content": {"steps": 8}})
    shown = run("diff", copied / "cut", copied / "other")
    assert 1 == shown.code
    assert "  model/norm  1 (1 NaN)  0    0         float32 [3]  float32 [3]" in shown.out.splitlines()
    assert "  model/new      only in b  -                float32 [2]" in shown.out.splitlines()

    document = run("diff", copied / "cut", copied, "--json", "--prefix", "model/n", "--prefix", "user").document
    assert {"model/norm": 1, "model/new": None} == {one["name"]: one["differing"] for one in document["tensors"]}
    assert [{"name": "user_content/steps", "a": None, "b": "8"}] == document["values"]
    assert (False, 0, 12) == (document["same"], document["same_tensors"], document["nbytes"])


def test_a_part_that_one_tag_lacks_takes_one_line(run: Run, tmp_path: Path) -> None:
    """Of its names, of which there are many; --all lists them."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, "a", model, optimizer, durable=False)
    save_checkpoint(tmp_path, "b", model, durable=False)
    lines = run("diff", tmp_path / "a", tmp_path / "b").out.splitlines()
    every = run("diff", tmp_path / "a", tmp_path / "b", "--all").out.splitlines()
    names = [line for line in every if "  optim/" in line]
    assert f"B has no optimizer: {len(names)} names missing (--all lists them)" == lines[-1]
    assert not [line for line in lines if "  optim/" in line]


def test_a_file_is_opened_once_to_compare_it(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning of it comes once."""
    torch.save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "a.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "b.safetensors")
    assert 1 == run("diff", tmp_path / "a.pt", tmp_path / "b.safetensors").code
    assert 1 == sum("taken as a script's own dict" in message for message in caplog.messages)
