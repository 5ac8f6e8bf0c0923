"""Tags whose bytes are those that were written, in a form that this version does not read: they are not damaged."""

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, open_checkpoint
from nxd_ckpt.core import limits
from nxd_ckpt.core.retention_rules import Last
from nxd_ckpt.errors import MalformedFile, UnreadableFormat
from nxd_ckpt.prune import prune_checkpoints
from nxd_ckpt.verify import verify_checkpoint
from tests.bad_input.live import Net
from tests.tag.rewriting import Fields, rewrite, rewrite_index


def first(fields: Fields) -> Fields:
    found: Fields = fields["specifications"][0]
    return found


CHANGES: dict[str, Callable[[Path], None]] = {
    "format_version": lambda tag: rewrite(tag, lambda fields: fields.update(format_version=99)),
    "a value of another type": lambda tag: rewrite(tag, lambda fields: fields["parts"].update(user_content=1)),
    "another kind of optimizer": lambda tag: rewrite(tag, lambda fields: fields["parts"].update(optimizer="later")),
    "a field of a parameter": lambda tag: rewrite(tag, lambda fields: first(fields).update(shape="large")),
    "an index": lambda tag: rewrite_index(tag, lambda fields: fields.update(format_version=99)),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Four tags."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, Net(), user_content={"step": step})
    return tmp_path


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_this_version_cannot_read_is_not_called_damaged(
    directory: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By a load, by one that passes over it, and by verify: another version reads the bytes that were written."""
    CHANGES[change](directory / "step_4")
    with caplog.at_level(logging.WARNING, "nxd_ckpt"), Checkpointer(directory) as checkpointer:
        with pytest.raises(UnreadableFormat, match="cannot be read by this version of nxd_ckpt"):
            checkpointer.load("step_4", Net())
        assert 3 == checkpointer.load_latest(Net(), fallback=True)
    (warning,) = (record.getMessage() for record in caplog.records if "was loaded, not the latest" in record.message)
    assert "'step_4' is passed over" in warning
    (problem,) = verify_checkpoint(directory, "step_4").problems
    for text in (warning, problem):
        assert "cannot be read by this version of nxd_ckpt" in text
        assert "damage" not in text


@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("change", [change for change in CHANGES if change != "an index"])  # which no save reads
def test_retention_neither_counts_nor_removes_it(directory: Path, change: str, newest: bool) -> None:
    """Whether a job saves, or a person prunes: the job of another version may have no other."""
    CHANGES[change](directory / ("step_4" if newest else "step_2"))
    pruned = prune_checkpoints(directory, [Last(2)], dry_run=True)
    assert {} == pruned.damaged
    assert ("step_1",) == pruned.removed
    with Checkpointer(directory, num_kept_ckpts=2) as checkpointer:
        checkpointer.save(5, Net())
    left = sorted(path.name for path in directory.glob("step_*"))
    assert (["step_3", "step_4", "step_5"] if newest else ["step_2", "step_4", "step_5"]) == left


def test_a_manifest_that_changed_is_damaged(directory: Path) -> None:
    """Also if only white space was added: it ends with a digest of its own bytes."""
    manifest = directory / "step_4" / "manifest.json"
    for changed in (manifest.read_bytes() + b" \n", manifest.read_bytes().replace(b'"step_4"', b'"step_5"')):
        manifest.write_bytes(changed)
        (problem,) = verify_checkpoint(directory, "step_4").problems
        assert "its bytes changed" in problem
        with pytest.raises(MalformedFile, match="its bytes changed") as raised:
            open_checkpoint(directory, "step_4")
        assert not isinstance(raised.value, UnreadableFormat)


def test_content_that_is_refused_as_it_was_written_is_not_damaged(tmp_path: Path) -> None:
    """A pickle beyond the limits of a reader, say: with the digest that its index has."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1)}, user_content={"a": 1})
    tag = tmp_path / "step_1"
    content = tag / "user_content.pt"
    nested: list[Any] = []
    for _ in range(limits.TREE_DEPTH + 5):
        nested = [nested]
    torch.save(nested, content)
    data = content.read_bytes()

    def change(fields: Fields) -> None:
        fields["files"]["user_content.pt"] = [len(data), zlib.crc32(data)]
        del fields["trees"]["user_content.pt"]

    rewrite_index(tag, change)
    with pytest.raises(UnreadableFormat, match=r"user_content\.pt.*cannot be read"):
        open_checkpoint(tmp_path).user_content()
