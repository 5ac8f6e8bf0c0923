"""A download that went wrong, in place of weights or of a tag's files, is called what it is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nxd_ckpt import close_checkpointers, convert, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import MalformedFile

LFS = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""

FOUND = {
    LFS: "Git LFS pointer.*git lfs pull",
    "<!DOCTYPE html>\n<html><body>Sign in</body></html>": "HTML page.*download",
    "\n<HTML><head>": "HTML page",
    "<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>": "XML document",
    '{"error": "not found"}': "JSON text",
}
WEIGHTS = ["model.safetensors", "pytorch_model.bin"]


@pytest.mark.parametrize("file", WEIGHTS)
@pytest.mark.parametrize(("content", "said"), FOUND.items(), ids=FOUND.values())
def test_weights(tmp_path: Path, file: str, content: str, said: str) -> None:
    """Of a Hugging Face directory, both formats."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / file).write_text(content)
    with pytest.raises(MalformedFile, match=rf"{file}: .*{said}"):
        load_checkpoint(tmp_path, None, torch.nn.Linear(2, 2))


def _load(tag: Path) -> None:
    load_checkpoint(tag.parent, tag.name, {})


def _read_dcp(tag: Path) -> None:
    convert(tag, tag.parent / "back", to="tag")


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("t/manifest.json", _load),
        ("foreign/model/*.pt", _load),
        ("dcp/.metadata", _read_dcp),
        ("hf/model.safetensors.index.json", lambda tag: load_checkpoint(tag, None, torch.nn.Linear(2, 2))),
    ],
)
@pytest.mark.parametrize("content", [LFS, "<html></html>"], ids=["LFS", "HTML"])
def test_files_of_a_checkpoint(tmp_path: Path, file: str, read: Callable[[Path], None], content: str) -> None:
    """A clone without its large files, of every layout."""
    save_checkpoint(tmp_path, "t", {"w": torch.ones(2)})
    save_checkpoint(tmp_path, "foreign", {"w": torch.ones(2)})
    close_checkpointers()
    for ours in (tmp_path / "foreign" / "manifest.json", *tmp_path.glob("foreign/index/*.json")):
        ours.unlink()  # as NxD writes it
    (tmp_path / "foreign" / "index").rmdir()
    convert(tmp_path / "t", tmp_path / "dcp", to="dcp")
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / "hf" / name).write_text("{}")
    (found,) = tmp_path.glob(file)
    found.write_text(content)
    with pytest.raises(MalformedFile, match=r"Git LFS pointer.*git lfs pull|HTML page"):
        read(tmp_path / file.partition("/")[0])
