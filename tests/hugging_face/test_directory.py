"""Hugging Face directories as they are found: what is read, what is refused, and that ranks read their slices only."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialized

from nxd_ckpt import convert, load_checkpoint, open_checkpoint
from nxd_ckpt.errors import (
    CheckpointError,
    InvalidArgument,
    MalformedFile,
    PartNotFound,
    TagReplaced,
    UnsafePickle,
    UnsupportedState,
)
from nxd_ckpt.layouts.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.layouts.weight_files import INDEX
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.choosing import find_by_path
from tests.formats.assemblies import read_leaf
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, live, write_config, write_model


def is_hugging_face(storage: LocalStorage) -> bool:
    """True if a load finds a model in Hugging Face's form."""
    found = find_by_path(storage, "")
    return found is not None and found.is_weights


def opened(path: Path) -> HuggingFaceDirectory:
    return HuggingFaceDirectory(LocalStorage(path))


def test_a_tag_is_no_hugging_face_directory(tmp_path: Path) -> None:
    """Nor is an empty directory, or one with config.json alone."""
    storage = LocalStorage(tmp_path)
    assert not is_hugging_face(storage)
    write_config(tmp_path, {})
    assert not is_hugging_face(storage)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert is_hugging_face(storage)


@pytest.mark.parametrize("file", ["model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "script.pt"])
def test_a_model_without_config_json(tmp_path: Path, file: str) -> None:
    """It is imported and migrated with that of another place, as a directory and as a file; a load needs none."""
    state, held = write_model(tmp_path / "whole", Model()), Job(Model()).rank(Model().state())
    place = tmp_path / "bare"
    place.mkdir()
    if file.endswith(".safetensors"):
        save_file(state, place / file)
    else:
        torch.save(state if file == "pytorch_model.bin" else {"model": state, "step": 3}, place / file)
    load_checkpoint(place, model=(loaded := live(state)))
    assert [] == differences(state, dict(loaded.state_dict()))
    for number, source in enumerate((place, place / file)):
        with pytest.raises(InvalidArgument, match=r"model type is not known\. Pass the model's config\.json"):
            convert(source, tmp_path / "run" / "step_0", to="tag", names="nxd")
        for names, expected in (("nxd", held), ("hf", state)):
            found: dict[str, torch.Tensor] = {}
            made: dict[str, Any] = {"to": "tag", "names": names, "config": tmp_path / "whole", "overwrite": True}
            convert(source, tmp_path / str(number) / "step_0", **made)
            load_checkpoint(tmp_path / str(number), model=found)
            assert [] == differences(expected, found)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("model-00002-of-00003.safetensors", "is one of 3 files of a model: pass their directory"),
        ("diffusion_pytorch_model-00002-of-00003.safetensors", "is one of 3 files of a model: pass their directory"),
        ("adapter_model.safetensors", "is a PEFT adapter, without its base model: merge it"),
        ("tp0_sharded_checkpoint.safetensors", "is one rank's part of a model of NxD inference"),
        ("config.json", "is a JSON text, without tensors"),
        ("optimizer.safetensors", "is an optimizer's tensors: pass the directory"),
    ],
)
def test_a_file_that_is_no_whole_model_is_refused(tmp_path: Path, file: str, complaint: str) -> None:
    (tmp_path / file).write_bytes(b"")
    for names in ("own", "nxd", "hf"):
        with pytest.raises(UnsupportedState, match=complaint):
            convert(tmp_path / file, tmp_path / "run" / "step_0", to="tag", names=names)
    assert [tmp_path / file] == [*tmp_path.iterdir()]


def put(file: Path, content: Any) -> None:
    """Bytes as they are, else what a file of that name holds."""
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif file.suffix == ".bin":
        torch.save(content, file)
    elif file.suffix == ".safetensors":
        save_file(content, file)
    else:
        file.write_text(json.dumps(content))


ONE = {"a": torch.ones(1)}
SHARD, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
OF_TWO = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
BIN, OF_BIN = "pytorch_model.bin", [f"pytorch_model-0000{number}-of-00003.bin" for number in (1, 2, 3)]
ONLY_BIN = "pytorch_model-00001-of-00001.bin"
ALL = ["model*"]


def named(file: str) -> dict[str, Any]:
    """An index by which a tensor is in the file."""
    return {"weight_map": {"a": file}}


@pytest.mark.parametrize(
    ("lost", "new", "kind", "complaint"),
    [
        ([SECOND], {}, PartNotFound, r"model-00002-of-00003\.safetensors is missing, in which .* \d+ tensors"),
        (ALL, {"0.safetensors": ONE, "1.safetensors": ONE}, PartNotFound, r"index\.json is missing"),
        ([INDEX, SECOND], {}, PartNotFound, r"no model\.safetensors\.index\.json, and 2 of 3 shards, .* numbers 2;"),
        ([INDEX], {"model-1-of-3.safetensors": ONE}, PartNotFound, r"4 of 3 shards"),
        ([INDEX], {OF_TWO[0]: ONE}, MalformedFile, r"of several models: model-00001-of-00002.*, model-00001-of-0"),
        (ALL, dict.fromkeys(OF_TWO, ONE), MalformedFile, r"is in both model-00001-of-00002.* and model-00002-of-00002"),
        ([], {SHARD: ONE}, MalformedFile, r"model-00001.* does not hold the tensors that"),
        ([], {SHARD: serialized(ONE)[:-1]}, MalformedFile, r"model-00001.*truncated, or not whole"),
        (ALL, {OF_BIN[0]: ONE, OF_BIN[2]: ONE}, PartNotFound, r"2 of 3 shards, without numbers 2; download"),
        (ALL, {ONLY_BIN: ONE, f"{BIN}.index.json": named("../a.bin")}, MalformedFile, r"'\.\./a\.bin'"),
        (ALL, {BIN: {"a": Path}}, UnsafePickle, r"pytorch_model\.bin"),
        (ALL, {BIN: b"PK\x03\x04 and half of it"}, MalformedFile, r"pytorch_model\.bin"),
        (ALL, {}, PartNotFound, r"holds no weights"),
        ([], {INDEX: b"{"}, MalformedFile, r"index\.json: not valid JSON"),
        ([], {INDEX: []}, MalformedFile, r"expected a JSON object"),
        ([], {INDEX: {"weight_map": ["a"]}}, MalformedFile, r"weight_map must name"),
        ([], {INDEX: {"weight_map": {}}}, MalformedFile, r"weight_map names no tensor"),
        ([], {INDEX: named("../a.safetensors")}, MalformedFile, r"is not a \.safetensors file of this"),
    ],
)
def test_a_directory_that_is_not_whole_is_refused(
    tmp_path: Path, lost: list[str], new: dict[str, Any], kind: type[CheckpointError], complaint: str
) -> None:
    write_model(tmp_path, Model(), shards=3)
    for file in [file for pattern in lost for file in tmp_path.glob(pattern)]:
        file.unlink()
    for name, content in new.items():
        put(tmp_path / name, content)
    with pytest.raises(kind, match=complaint):
        read_all(tmp_path)


def read_all(path: Path) -> None:
    directory = opened(path)
    for name in directory.names:
        directory.tensor(name)


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("form", ["shards", "shards with index", "bin", "bin shards", "bin shards with index"])
def test_weights_in_other_files_are_found(tmp_path: Path, form: str, stem: str) -> None:
    """Shards that no index describes, files of torch.save, which are read as plain data, and shards of other names."""
    state = write_model(tmp_path, Model(), shards=3)
    index = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).unlink()
    if form.startswith("shards"):
        for shard in tmp_path.glob("*.safetensors"):
            shard.rename(tmp_path / shard.name.replace("model", stem))
        if form == "shards with index":
            (tmp_path / f"{stem}.safetensors.index.json").write_text(index.replace("model-0", f"{stem}-0"))
    else:
        shards = sorted(tmp_path.glob("*.safetensors"))
        parts = [load_file(shard) for shard in shards]
        for shard in shards:
            shard.unlink()
        whole = BIN if stem == "model" or form == "bin" else f"{stem}.bin"
        names = [f"{whole.removesuffix('.bin')}-0000{number}-of-00003.bin" for number in (1, 2, 3)]
        if form == "bin":
            names, parts = [whole], [{name: tensor for part in parts for name, tensor in part.items()}]
        for name, part in zip(names, parts, strict=True):
            torch.save(part, tmp_path / name)
        if form == "bin shards with index":
            places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
            (tmp_path / f"{whole}.index.json").write_text(json.dumps({"weight_map": places}))
    assert is_hugging_face(LocalStorage(tmp_path))
    directory = opened(tmp_path)
    found = {name: read_leaf(directory.tensor(name), directory.files.read_ranges) for name in directory.names}
    assert sorted(state) == directory.names
    assert [] == [name for name in state if not torch.equal(state[name], found[name])]
    assert directory.strays is None


def test_a_file_that_is_written_while_it_is_read(tmp_path: Path) -> None:
    """Nothing else tells that its bytes are not those of the header: most files have no digests."""
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    opened = open_checkpoint(tmp_path / "x.safetensors")
    assert ["model/w"] == [*opened.metadata]
    save_file({"w": torch.zeros(2)}, tmp_path / "x.safetensors")
    os.utime(tmp_path / "x.safetensors", (1, 1))
    with pytest.raises(TagReplaced, match=r"x\.safetensors changed while it was read"):
        opened.model_state()


def test_a_tensor_is_read_whatever_happens_to_other_files(tmp_path: Path) -> None:
    """They are not even looked at: a model may have hundreds of files, and each tensor is read by itself."""
    state = write_model(tmp_path, Model(), shards=2)
    opened = open_checkpoint(tmp_path)
    first, second = opened.keys(*(f"model/{name}" for name in [*state][:2]))
    os.utime(tmp_path / "model-00002-of-00002.safetensors", (1, 1))
    assert torch.equal(state[first.removeprefix("model/")], opened.read(first))
    with pytest.raises(TagReplaced, match="model-00002-of-00002"):
        opened.read(second)


def test_weights_that_are_not_read_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An old single file beside an index, which transformers would read; by an import, a copy and a load.

    Not files of torch.save beside safetensors, which many models have: every reader takes the latter.
    """
    state = write_model(tmp_path / "hf", Model(), shards=2)
    save_file({"old": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")
    torch.save({"old": torch.ones(1)}, tmp_path / "hf" / BIN)
    said = r"hf: model\.safetensors not read, since model\.safetensors\.index\.json says .* model-00001-of-00002"
    convert(tmp_path / "hf", tmp_path / "run" / "s", to="tag", names="nxd")
    convert(tmp_path / "hf", tmp_path / "files", to="files")
    assert 2 == len([one for one in caplog.messages if re.search(said, one)])
    caplog.clear()
    model = live(Job(Model()).rank(state))
    load_checkpoint(tmp_path / "hf", model=model)
    assert 1 == len([one for one in caplog.messages if re.search(said, one)])
    assert torch.equal(state["model.norm.weight"], model.state_dict()["model.norm.weight"])
