"""Files that are lost, cut off or changed are found before a load changes anything, and named."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import load_checkpoint
from nxd_ckpt.core.manifest import load_index
from nxd_ckpt.errors import CheckpointError, CorruptCheckpoint, PartLost, PartNotFound
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.bad_input.live import Job, jobs, topologies
from tests.golden.checkpoints import saved
from tests.interop.saving import save_as_every_rank
from tests.support.damage import flip

FORMS = ["plain", "xser"]
MARKERS = ("checkpoint", "done")


@pytest.fixture(scope="module", params=FORMS)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two tags of two ZeRO-1 ranks: ``one``, and ``two`` of the same names with other values."""
    directory = tmp_path_factory.mktemp(request.param)
    for tag, seed in (("one", 1), ("two", 2)):
        ranks = jobs(2, zero1=True, seed=seed)

        def what(rank: int, ranks: list[Job] = ranks, tag: str = tag) -> dict[str, Any]:
            return {**ranks[rank].parts, "user_content": {"of": tag}, "rank_content": ranks[rank].rank_content}

        save_as_every_rank(directory, tag, topologies(ranks), what, use_xser=request.param == "xser")
    return directory


def files_of(tag: Path) -> list[Path]:
    return sorted(path.relative_to(tag) for path in tag.rglob("*") if path.is_file() and path.name not in MARKERS)


def outcome(directory: Path, rank: int) -> tuple[CheckpointError | None, dict[str, Any], Any]:
    """Load ``one`` into a job with other values: the error, and what is live then. After an error: unchanged."""
    [job] = jobs(2, zero1=True, seed=5)[rank : rank + 1]
    before = job.picture()
    try:
        content = load_checkpoint(directory, "one", **job.parts, rank_content=job.rank_content, topology=job.topology)
    except CheckpointError as error:
        assert before == job.picture()
        return error, {}, None
    return None, job.saved_picture(), content


def whole_outcomes(directory: Path) -> list[tuple[None, dict[str, Any], Any]]:
    """What both ranks load of the undamaged tag."""
    found = [outcome(directory, rank) for rank in (0, 1)]
    expected = [job.saved_picture() for job in jobs(2, zero1=True, seed=1)]
    assert [(None, picture, {"of": "one"}) for picture in expected] == found
    return [(None, picture, {"of": "one"}) for picture in expected]


def check_every_file(
    kept: Path, scratch: Path, damages: Callable[[Path, Path], Iterator[str]], errors: type | tuple[type, ...]
) -> dict[str, int]:
    """Damage one file after the other; how many damages of each file made a load fail.

    Each rank either loads what was saved to the last bit, because it does not need the damaged bytes, or raises one of
    ``errors`` naming the file, its live objects unchanged.
    """
    expected = whole_outcomes(kept)
    failures: dict[str, int] = {}
    shutil.copytree(kept, scratch)
    for file in files_of(kept / "one"):
        path = scratch / "one" / file
        failures[str(file)] = 0
        for damage in damages(path, kept / "two" / file):
            for rank in (0, 1):
                found = outcome(scratch, rank)
                if found[0] is None:
                    assert expected[rank] == found, f"{file} {damage}: rank {rank} loaded something else"
                    continue
                failures[str(file)] += 1
                assert isinstance(found[0], errors), f"{file} {damage}: {found[0]!r}"
                assert str(file) in str(found[0]), f"{file} {damage}"
        shutil.copy2(kept / "one" / file, path)
    return failures


@pytest.mark.parametrize("lost", ["manifest.json", "index"])
@pytest.mark.parametrize("instead", [None, os.mkfifo, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_tag_that_lost_its_manifest_or_its_index(
    kept: Path, tmp_path: Path, lost: str, instead: Callable[[Path], None] | None
) -> None:
    """The proof is never turned off in silence: a load and ``verify`` say so, whatever stands in its place."""
    shutil.copytree(kept, tmp_path / "copy")
    path = tmp_path / "copy" / "one" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if instead is not None:
        instead(path)
    for rank in (0, 1):
        error = outcome(tmp_path / "copy", rank)[0]
        assert isinstance(error, CorruptCheckpoint)
        assert str(path) in str(error)
    assert str(path) in verify_checkpoint(tmp_path / "copy", "one").problems[0]
    assert () == verify_checkpoint(tmp_path / "copy", "two").problems


def test_a_tag_without_manifest_and_index_is_a_foreign_one(
    kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the error of a lost manifest proposes: with neither it is read as what neuronx_distributed writes. A warning
    names it, and its marker, which shows that it was ours: not one of files that torch wrote, as saves of both programs
    lie in one directory when a job has changed over."""
    shutil.copytree(kept, tmp_path / "copy")
    tag = tmp_path / "copy" / "one"
    (tag / "manifest.json").unlink()
    shutil.rmtree(tag / "index")
    assert whole_outcomes(kept)[0] == outcome(tmp_path / "copy", 0)
    (warning,) = {message for message in caplog.messages if "has neither" in message}
    assert warning.startswith(f"{tag} has neither")
    assert "its 'done' marker" in warning
    caplog.clear()
    for file in tag.glob("**/*.pt"):
        if not file.with_name(f"{file.name}.tensors").is_dir():  # such hold references, and no tensor
            torch.save(torch.load(file, weights_only=False), file)
    assert whole_outcomes(kept)[0] == outcome(tmp_path / "copy", 0)
    assert [] == [message for message in caplog.messages if "of ours" in message]


def test_a_file_that_is_cut_off_or_lost_is_named(kept: Path, tmp_path: Path) -> None:
    """By one byte, in the middle, or altogether, or removed: no file that a rank reads is taken for whole."""

    def damages(path: Path, _: Path) -> Iterator[str]:
        size = path.stat().st_size
        for length in (size - 1, size // 2, 0):
            os.truncate(path, length)
            yield f"cut to {length} of {size} bytes"
        os.remove(path)
        yield "removed"

    failures = check_every_file(kept, tmp_path / "copy", damages, (PartNotFound, CorruptCheckpoint))
    assert [] == [file for file, count in failures.items() if count < 4]


@pytest.mark.one_in(2)
def test_a_changed_byte_never_loads(kept: Path, tmp_path: Path) -> None:
    """One flipped bit, anywhere in any file: a load fails, or does not depend on it; on a tensor's bytes it does."""
    indexes = [load_index(path.read_bytes(), path.name) for path in (kept / "one" / "index").iterdir()]
    contents = {entry.file: entry.offset for index in indexes for entry in index.tensors}

    def damages(path: Path, _: Path) -> Iterator[str]:
        size, file = path.stat().st_size, path.relative_to(tmp_path / "copy" / "one").as_posix()
        for place in (*range(7, size, max(size // 5, 1)), contents.get(file, 0)):
            flip(path, place)
            yield f"bit 2 of byte {place}"
            flip(path, place)

    failures = check_every_file(kept, tmp_path / "copy", damages, CheckpointError)
    assert [] == [file for file, count in failures.items() if not count]


def test_a_file_of_another_save_is_named(kept: Path, tmp_path: Path) -> None:
    """A file that is whole in itself, but was saved under another tag, is not what the manifest vouches for."""
    replaced = []

    def damages(path: Path, other: Path) -> Iterator[str]:
        if path.name != "manifest.json" and path.read_bytes() != other.read_bytes():
            shutil.copy2(other, path)
            replaced.append(str(path.relative_to(tmp_path / "copy" / "one")))
            yield "replaced"

    failures = check_every_file(kept, tmp_path / "copy", damages, CorruptCheckpoint)
    assert len(replaced) >= 8
    assert [] == [file for file in replaced if not failures[file]]


def test_weights_left_out_are_told_from_lost_ones(tmp_path: Path) -> None:
    """Without lower-precision weights, frozen parameters have files: one that is gone is missed."""
    [job, other] = jobs(2, zero1=True, seed=1)
    options = {"use_xser": True, "avoid_saving_lower_precision_weights": True}
    save_as_every_rank(tmp_path, "one", topologies([job, other]), lambda rank: [job, other][rank].parts, **options)
    expected = job.saved_picture()
    [again, _] = jobs(2, zero1=True, seed=5)
    load_checkpoint(tmp_path, "one", **again.parts, topology=again.topology)
    assert expected["model"] == again.saved_picture()["model"]

    [lost, _] = sorted((tmp_path / "one" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors").iterdir())
    os.remove(lost)
    before = again.picture()
    with pytest.raises(PartNotFound, match=rf"{lost.name} is missing.*tensor 'scale'"):
        load_checkpoint(tmp_path, "one", **again.parts, strict=False, topology=again.topology)
    assert before == again.picture()


def test_a_weight_that_a_tag_of_nxd_lost(golden: Path, tmp_path: Path) -> None:
    """Nothing lists its files, and ``strict=False`` is for names that differ: none of the others is loaded."""
    run = shutil.copytree(saved(golden, "b_dp2_zero1_xser").directory, tmp_path / "run")
    lost = min(run.glob("step_3/model/*.tensors/*"))
    lost.unlink()
    model: dict[str, torch.Tensor] = {}
    with pytest.raises(PartLost, match=rf"{lost.name} \(model, .*lost files since it was saved"):
        load_checkpoint(run, "step_3", model, strict=False)
    assert {} == model
