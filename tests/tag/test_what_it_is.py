"""A path to something else than a directory of tags: every reader reads it, or says what it is."""

import io
import json
import os
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, InvalidArgument
from nxd_ckpt.storage.urls import normalised, overlap
from nxd_ckpt.tag.verify import verify_checkpoint

STATE = {"w": torch.ones(4)}
READERS: dict[str, Callable[[str], Any]] = {
    "load": lambda path: nxd_ckpt.load_checkpoint(path, model={}),
    "load by an object": lambda path: nxd_ckpt.Checkpointer(path).load(model={}),
    "open": lambda path: nxd_ckpt.open_checkpoint(path),
    "verify": lambda path: verify_checkpoint(path),
}


def test_what_others_wrote_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, files, words in (
        ("dcp", [".metadata", "__0_0.distcp"], "torch DCP checkpoint: load_checkpoint"),
        ("trainer", ["trainer_state.json", "config.json", "model.safetensors"], "checkpoint of transformers' Trainer"),
        ("lightning", ["epoch=0-step=3.ckpt", "last.ckpt"], "checkpoint files of Lightning"),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text(json.dumps({}))
        main(["list", str(tmp_path / name)])
        assert words in " ".join(capsys.readouterr().out.split())


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


OTHERS: dict[str, tuple[bytes, str]] = {
    "readme.txt": (b"how it was trained", "is a text"),
    "model.gguf": (b"GGUF\3\0\0\0", "GGUF file of llama.cpp: .*gguf_file="),
    "noname": (b"GGUF\3\0\0\0", "GGUF file of llama.cpp"),
    "model.onnx": (b"\x08\x07\x12\x07pytorch", "ONNX model"),
    "model.npz": (b"PK\x03\x04", "file of NumPy"),
    "model.h5": (b"\x89HDF\r\n", "HDF5 file, such as Keras writes"),
    "ckpt-1.index": (b"\0\0\1\2", "file of TensorFlow"),
    "ckpt-1.data-00000-of-00001": (b"\0", "file of TensorFlow"),
    "flax_model.msgpack": (b"\x81\xa6params", "file of Flax"),
    "model.zip": (b"PK\x03\x04", "an archive: unpack it"),
    "weights": (b"\x1f\x8b\x08", "compressed, or an archive"),
    "model.pkl": (b"\x80\x04\x95", "a pickle of Python: save its tensors with torch.save"),
    "old": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P", "before torch 1.6. Save it again"),
    "model_best.pth.tar": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P" * 100, "before torch 1.6. Save it again"),
    "page.tar": (b"<!doctype html>" * 100, "an HTML page"),
    "optim.safetensors": (b"", "an optimizer's tensors: pass the directory"),
    "model_optim_rng.pt": (b"", "of Megatron-LM, whose own converter"),
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": (b"", "optimizer of DeepSpeed, whose zero_to_fp32.py"),
    "tensor.pt": (_saved(torch.ones(2)), "expected a dict, found a tensor"),
    "module.pt": (_saved({"a": torch.ones(2).to_sparse()}), r"a sparse tensor: densify it \(to_dense\(\)\)"),
    "qint.pt": (_saved({"a": torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)}), "a quantized tensor"),
    "meta.pt": (_saved({"a": torch.ones(2, device="meta")}), "a tensor on the meta device, without values"),
    "ragged.pt": (_saved({"a": torch.nested.nested_tensor([torch.ones(2)])}), "a nested tensor: keep its parts"),
    "jagged.pt": (_saved({"a": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}), "a nested tensor"),
    "trace.bin": (b"text in place of data", "expected a torch zip file, found a text"),
    "other": (b"\0\1\2", "is no checkpoint of a kind that is known"),
    "MODEL.SAFETENSORS": (b"\2\0\0\0\0\0\0\0{}", "are known by their names, which end in lower case"),
}
"""Files of other programs by their names, with how they begin and what is said."""


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_program_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """By its name or its beginning, with what to do, through every door. In a directory it is named too."""
    start, words = OTHERS[name]
    (tmp_path / name).write_bytes(start)
    for door in ("load", "load by an object", "open", "export"):
        with pytest.raises(CheckpointError, match=words):
            SOURCES[door](str(tmp_path / name), str(tmp_path / "out"))
    for command in ("inspect", "verify", "doctor"):
        assert 0 != main([command, str(tmp_path / name)])
        said = capsys.readouterr()
        assert re.search(words, " ".join((said.out + said.err).split())), command


def test_a_whole_module_is_named(tmp_path: Path) -> None:
    """The advice to trust the pickle led to a dict that was expected, and no word of what to do."""
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match=r"expected a dict, found Linear: save its state_dict\(\)"):
        nxd_ckpt.load_checkpoint(tmp_path / "whole.pt", model={}, trust_pickle=True)


def test_a_directory_of_another_program_is_named(tmp_path: Path) -> None:
    for number, (files, words) in enumerate(
        [
            (["model.Q4.gguf"], "'model.Q4.gguf' .a GGUF file"),
            (["config.json", "flax_model.msgpack"], "a file of Flax"),
            (["checkpoint", "ckpt-1.index"], "a file of TensorFlow"),
            (["optim.safetensors"], "an optimizer's tensors"),
            (["_CHECKPOINT_METADATA", "manifest.ocdbt"], "a checkpoint of Orbax, for JAX"),
            (["iter_0000100/mp_rank_00/model_optim_rng.pt"], "'iter_0000100/mp_rank_00'.* rank of Megatron-LM"),
            (["global_step10/mp_rank_00_model_states.pt"], "'global_step10'.* of DeepSpeed"),
            (["step_1.tar.gz"], "'step_1.tar.gz' .may be an archive of one: pass its own path"),
            (["a.pt", "b.pt"], "several files of torch.save: pass one of them"),
            (["epoch=0.ckpt", "last.ckpt"], "checkpoint files of Lightning: pass one of them"),
            (["__0_0.distcp"], "not .metadata, which torch DCP writes last"),
        ]
    ):
        place = tmp_path / str(number)
        for file in files:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_bytes(b"")
        for door in ("load", "open", "verify", "export"):
            with pytest.raises(CheckpointNotFound, match=words):
                SOURCES[door](str(place), str(tmp_path / "out"))


OUTPUTS = {
    "trainer": (
        ["checkpoint-10/trainer_state.json", "checkpoint-20/trainer_state.json", "runs/events"],
        r"'checkpoint-20' \(and 1 more like it\): .*transformers' Trainer.*nxd-ckpt verify {}/checkpoint-20",
    ),
    "accelerate": (
        ["checkpoints/checkpoint_0/random_states_0.pkl", "checkpoints/checkpoint_0/model.safetensors"],
        "'checkpoints/checkpoint_0': .*accelerate.*nxd-ckpt verify {}/checkpoints/checkpoint_0",
    ),
    "lightning": (
        ["lightning_logs/version_0/checkpoints/epoch=0.ckpt", "lightning_logs/version_0/checkpoints/last.ckpt"],
        "'lightning_logs/version_0/checkpoints': it holds checkpoint files of Lightning",
    ),
    "titan": (["outputs/checkpoint/step-10/.metadata"], "'outputs/checkpoint/step-10': it is a torch DCP checkpoint"),
    "deepspeed": (["global_step10/mp_rank_00_model_states.pt", "latest"], "'global_step10': it is a .* of DeepSpeed"),
    "runs": (["run1/t/done", "run1/t/manifest.json", "run2/t/done", "run2/t/checkpoint"], "nxd-ckpt list {}/run2"),
}


@pytest.mark.parametrize(("files", "words"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_directory_of_a_trainer_says_what_lies_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: list[str], words: str
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    for command in (["list"], ["verify"], ["doctor"], ["report", "-o", f"{tmp_path}.html"], ["watch", "--once"]):
        main([command[0], str(tmp_path), *command[1:]])
        said = capsys.readouterr()
        assert re.search(words.format(re.escape(str(tmp_path))), " ".join((said.out + said.err).split())), command
    with pytest.raises(CheckpointNotFound, match="but it holds '"):
        nxd_ckpt.load_checkpoint(tmp_path, model={})


@pytest.mark.parametrize("spelling", ["link", "link/", "./real//", "file", "sub/../real"])
def test_a_load_waits_for_a_save_however_the_place_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    """A save by another spelling goes on in the same place, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("real")
    path = f"file://{tmp_path}/real" if spelling == "file" else spelling
    state = {"w": torch.zeros(2**22)}
    for step in (1, 2):
        state["w"].fill_(step)
        nxd_ckpt.save_checkpoint("real" if step == 1 else path, f"step_{step}", state, async_save=True)
        loaded: dict[str, torch.Tensor] = {}
        nxd_ckpt.load_checkpoint(path, model=loaded)
        assert step == int(loaded["w"][0])
    nxd_ckpt.finalize_checkpoint()
    close_checkpointers()


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    nxd_ckpt.save_checkpoint("~/run", "t", STATE)
    close_checkpointers()
    assert (tmp_path / "home" / "run" / "t" / "done").is_file()
    assert not os.path.exists("~")
    assert "t" == nxd_ckpt.open_checkpoint("~/run").tag


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("s3://Bucket//run/", "s3a://bucket/run", True),
        ("s3://bucket/run", "s3://bucket/RUN", False),
        ("HTTP://Host/run/", "http://host/run", True),
        ("gs://bucket/run/.", "gs://bucket/run", True),
        ("/tmp/../tmp/run", "/tmp/run/", True),
        ("file:///tmp/run", "/tmp//run", True),
    ],
)
def test_spellings_of_one_place_are_alike(one: str, other: str, same: bool) -> None:
    """Keys of a store are told apart by case."""
    assert same == (normalised(one) == normalised(other)) == overlap(one, other)


def test_an_output_that_is_the_input_by_another_name_is_refused(tmp_path: Path) -> None:
    """By a link to the directory, and by one to the tag."""
    nxd_ckpt.save_checkpoint(tmp_path / "run", "t", STATE)
    close_checkpointers()
    (tmp_path / "link").symlink_to("run")
    for target in (tmp_path / "link" / "t", tmp_path / "link" / "t" / "inner"):
        with pytest.raises(InvalidArgument, match=r"are the same|lies inside"):
            nxd_ckpt.copy_checkpoint(tmp_path / "run" / "t", target)
        with pytest.raises(InvalidArgument, match=r"are the same|lies inside"):
            nxd_ckpt.convert(tmp_path / "run" / "t", target, to="tag", dp=1)


def _read(reader: Callable[[str], Any], path: str, out: str) -> None:
    reader(path)


SOURCES: dict[str, Callable[[str, str], Any]] = {
    "copy": nxd_ckpt.copy_checkpoint,
    "migrate": lambda path, out: nxd_ckpt.convert(path, out, names="hf", to="tag"),
    "export": lambda path, out: nxd_ckpt.convert(path, out, to="hf"),
    "from_dcp": lambda path, out: nxd_ckpt.convert(path, out, to="tag"),
    **{name: partial(_read, reader) for name, reader in READERS.items()},
}


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a device", "a FIFO of the shell"])
@pytest.mark.parametrize("call", SOURCES)
def test_what_is_neither_a_file_nor_a_directory_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, kind: str
) -> None:
    """Of an input that is there nobody is told that it does not exist; nothing is waited for."""
    monkeypatch.chdir(tmp_path)
    path = "/dev/null"
    reading, writing = os.pipe()
    if kind == "a FIFO":
        path = str(tmp_path / "pipe")
        os.mkfifo(path)
    elif kind == "a socket":
        path = str(tmp_path / "socket")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
    elif kind != "a device":  # as of "<(nxd-ckpt ...)"
        path = f"/dev/fd/{reading}"
    with pytest.raises(CheckpointError, match=f"{path} is {kind.removesuffix(' of the shell')}, expected a directory"):
        SOURCES[call](path, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    os.close(reading)
    os.close(writing)


def test_a_link_that_leads_nowhere_is_said(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    with pytest.raises(CheckpointNotFound, match="latest is a link that leads nowhere, expected a directory"):
        nxd_ckpt.load_checkpoint(tmp_path / "latest", model={})
