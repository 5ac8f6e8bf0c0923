"""Verifying a whole tag: a flipped byte anywhere is found, and the file is named; NxD's as far as digests reach."""

import re
import shutil
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch

import nxd_ckpt
from nxd_ckpt.cli.inspection import View, inspection
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.golden.checkpoints import CONFIGURATIONS, saved
from tests.support.damage import flip


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
def test_a_flipped_bit_anywhere_is_found(directory: Path, tag: str) -> None:
    """In every file, at its first, middle and last byte: headers, padding and directories are covered too."""
    for path in [p for p in (directory / tag).rglob("*") if p.is_file() and p.name != "manifest.json"]:
        for position in {0, path.stat().st_size // 2, -1}:
            flip(path, position)
            problems = verify_checkpoint(directory, tag).problems
            assert any(str(path.relative_to(directory)) in problem for problem in problems), (path, position)
            flip(path, position)


def files_of(tag: Path) -> list[Path]:
    """All but the markers, sorted."""
    return sorted(path for path in tag.rglob("*") if path.is_file() and path.name not in ("checkpoint", "done"))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_tag_of_neuronx_distributed_is_verified_by_its_own_digests(golden: Path, name: str) -> None:
    """Every file is read, and every record equals the CRC-32 that its file gives for it, as zipfile finds them too."""
    golden_one = saved(golden, name)
    for tag in golden_one.tags:
        files = files_of(golden_one.directory / tag)
        archives = [zipfile.ZipFile(file) for file in files if file.suffix == ".pt"]
        records = sum(record.file_size for archive in archives for record in archive.infolist())

        found = verify_checkpoint(golden_one.directory, tag)

        assert (tag, False, ()) == (found.tag, found.ours, found.problems)
        assert (len(files), sum(p.stat().st_size for p in files)) == (found.files, found.nbytes)
        assert [None] * len(archives) == [archive.testzip() for archive in archives]
        if not golden_one.config["dcp"]:
            assert (records, 0) == (found.verified, found.undigested)


FOREIGN = ["a_dp2_zero1_pt", "b_dp2_zero1_xser", "l_dp2_zero1_dcp_async"]


@pytest.fixture(params=FOREIGN)
def foreign(request: pytest.FixtureRequest, golden: Path, tmp_path: Path) -> Path:
    """A tag of neuronx_distributed, to be damaged."""
    shutil.copytree(golden / request.param / "ckpt", tmp_path / "ckpt")
    return tmp_path / "ckpt" / "step_3"


def one_of_each_kind(tag: Path) -> list[Path]:
    """Files whose names differ in more than numbers."""
    return list({re.sub(r"\d+", "N", str(path)): path for path in files_of(tag)}.values())


def test_the_tensor_that_changed_is_named(tmp_path: Path) -> None:
    model = {name: torch.full((3,), value) for name, value in (("a", 1.0), ("b", 2.0))}
    nxd_ckpt.save_checkpoint(tmp_path, "step_1", model)
    (file,) = (tmp_path / "step_1" / "model").iterdir()
    flip(file, file.read_bytes().index(model["b"].numpy().tobytes()))
    (problem,) = verify_checkpoint(tmp_path).problems
    assert problem.endswith(": its bytes changed: model/b")


def test_a_flipped_bit_of_a_foreign_tensor_is_found(foreign: Path) -> None:
    """In its first byte or its last; the problem names the file and the record."""
    tensors = inspection(str(foreign), None, View(rank=1, pattern="*"))["tensors"]
    for tensor in tensors[:: len(tensors) // 8]:
        path = foreign / tensor["file"]
        for position in {tensor["offset"], tensor["offset"] + tensor["nbytes"] - 1}:
            flip(path, position)
            (problem,) = verify_checkpoint(foreign.parent).problems
            assert problem.startswith(f"{path}, record 'data/")
            assert "expected CRC-32" in problem
            flip(path, position)


def test_a_truncated_foreign_file_is_found(foreign: Path) -> None:
    for path in one_of_each_kind(foreign):
        good = path.read_bytes()
        for length in (0, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:length])
            (problem,) = verify_checkpoint(foreign.parent).problems
            assert str(path.relative_to(foreign)) in problem
        path.write_bytes(good)


def test_a_lost_foreign_tensor_is_found(foreign: Path) -> None:
    """A file that another refers to is named, with the tensor where that is known."""
    for path in [path for path in one_of_each_kind(foreign) if path.parent.suffix == ".tensors" or "dist" in path.name]:
        good = path.read_bytes()
        path.unlink()
        problems = verify_checkpoint(foreign.parent).problems
        assert any(path.name in problem for problem in problems)
        path.write_bytes(good)


def test_lost_metadata_of_torch_dcp_is_found(golden: Path, tmp_path: Path) -> None:
    """Its data files cannot be read without it: one problem, that names it."""
    shutil.copytree(golden / "l_dp2_zero1_dcp_async" / "ckpt", tmp_path / "ckpt")
    metadata = tmp_path / "ckpt" / "step_3" / "optim" / ".metadata"
    metadata.unlink()
    (problem,) = verify_checkpoint(tmp_path / "ckpt").problems
    assert problem.startswith(f"{metadata} is missing")


def test_a_lost_rank_of_a_foreign_tag_is_found(golden: Path, tmp_path: Path) -> None:
    """The files of the other ranks tell that there was one."""
    shutil.copytree(golden / "c_dp2_tp2_zero1_xser" / "ckpt", tmp_path / "ckpt")
    for part in ("model/dp_rank_00_tp_rank_01_pp_rank_00.pt", "optim/dp_rank_01_tp_rank_00_pp_rank_00.pt"):
        path = tmp_path / "ckpt" / "step_3" / part
        good = path.read_bytes()
        path.unlink()
        (problem,) = verify_checkpoint(tmp_path / "ckpt").problems
        assert problem.startswith(f"{path} does not exist")
        path.write_bytes(good)


def test_weights_that_were_left_out_are_not_lost(golden: Path, tmp_path: Path) -> None:
    """Where master weights stand for them, a reference without a file is as it was written."""
    shutil.copytree(golden / "f_dp2_tp2_bf16_master_avoid_lp_xser" / "ckpt", tmp_path / "ckpt")
    assert () == verify_checkpoint(tmp_path / "ckpt").problems
    lost = next((tmp_path / "ckpt" / "step_3" / "optim").rglob("tensor_40.pt"))
    lost.unlink()
    (problem,) = verify_checkpoint(tmp_path / "ckpt").problems
    assert str(lost) in problem


def test_a_directory_of_0_5_is_verified(tmp_path: Path) -> None:
    """It is a checkpoint without tags, and its files carry digests, too."""
    file = tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt"
    file.parent.mkdir()
    torch.save({"model": {"w": torch.full((100,), 7.0)}}, file)
    found = verify_checkpoint(tmp_path)
    assert ("", 1, ()) == (found.tag, found.files, found.problems)
    flip(file, file.read_bytes().index(b"\0\0\xe0\x40" * 100) + 200)
    (problem,) = verify_checkpoint(tmp_path).problems
    assert problem.startswith(f"{file}, record 'data/0'")


def test_bytes_without_a_digest_are_counted_not_verified(tmp_path: Path) -> None:
    """torch.save can leave digests out; and a file that is no torch file has none."""
    (tmp_path / "step_1" / "model").mkdir(parents=True)
    weights = torch.arange(100.0)
    with_digest, without = BytesIO(), BytesIO()
    torch.save({"w": weights}, with_digest)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": weights}, without)
    finally:
        torch.serialization.set_crc32_options(True)
    tag = tmp_path / "step_1"
    file = tag / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    for name in ("checkpoint", "done"):
        (tag / name).write_bytes(b"1")
    (tag / "notes.txt").write_text("12345")

    file.write_bytes(with_digest.getvalue())
    verified = verify_checkpoint(tmp_path)
    file.write_bytes(without.getvalue())
    unverified = verify_checkpoint(tmp_path)

    assert ((), ()) == (verified.problems, unverified.problems)
    assert 5 == verified.undigested
    assert weights.nbytes + 5 <= unverified.undigested
    assert verified.verified + verified.undigested == unverified.verified + unverified.undigested
