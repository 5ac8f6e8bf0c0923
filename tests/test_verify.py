"""Proving a whole tag: a flipped byte anywhere is found, and the file is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nxd_ckpt
from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.verify import verify_checkpoint

pytestmark = pytest.mark.plain


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with one xser tag and one plain tag, written by a closed checkpointer."""
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    with nxd_ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save("xser", model, optimizer, None, {"step": 1}, use_xser=True)
        checkpointer.save("plain", model, optimizer, None, {"step": 2}, rank_content={"seed": 3})
    return tmp_path / "run"


@pytest.mark.parametrize("tag", ["xser", "plain"])
def test_a_fresh_tag_is_proved_in_full(directory: Path, tag: str) -> None:
    """Every file but the manifest and the indexes, which prove the others, is counted, with all its bytes."""
    files = [p for p in (directory / tag).rglob("*") if p.is_file() and p.suffix != ".json"]

    found = verify_checkpoint(directory, tag)

    assert (tag, len(files), sum(p.stat().st_size for p in files), ()) == (
        found.tag,
        found.files,
        found.nbytes,
        found.problems,
    )


@pytest.mark.parametrize("tag", ["xser", "plain"])
def test_a_flipped_bit_anywhere_is_found(directory: Path, tag: str) -> None:
    """In every file, at its first, middle and last byte: headers, padding and directories are covered too."""
    for path in [p for p in (directory / tag).rglob("*") if p.is_file() and p.name != "manifest.json"]:
        good = path.read_bytes()
        for position in {0, len(good) // 2, len(good) - 1}:
            bad = bytearray(good)
            bad[position] ^= 0x10
            path.write_bytes(bad)
            problems = verify_checkpoint(directory, tag).problems
            assert problems, (path, position)
            assert any(str(path.relative_to(directory)) in problem for problem in problems)
        path.write_bytes(good)


def test_a_lost_file_is_found(directory: Path) -> None:
    """A file that an index lists and the directory lacks is a problem that names it."""
    lost = next((directory / "xser" / "model").rglob("tensor_0.pt"))
    lost.unlink()

    (problem,) = verify_checkpoint(directory, "xser").problems

    assert str(lost.relative_to(directory)) in problem


def test_a_tag_of_neuronx_distributed_has_no_digests_to_prove(golden: Path) -> None:
    """Where nothing was recorded, nothing is claimed."""
    with pytest.raises(PartNotFound, match="no manifest"):
        verify_checkpoint(golden / "a_dp2_zero1_pt" / "ckpt")
