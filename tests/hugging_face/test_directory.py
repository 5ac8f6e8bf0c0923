"""Hugging Face directories as they are found: what is read, what is refused, and that ranks read their slices only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file

from nxd_ckpt import Topology
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.errors import CheckpointError, KeyMismatch, MalformedFile, PartNotFound, ShapeMismatch, UnsupportedState
from nxd_ckpt.formats.assembly import read_assembly
from nxd_ckpt.formats.tensors import dtype_name
from nxd_ckpt.hugging_face.mapped_directory import MappedDirectory
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.foreign.hugging_face_directory import INDEX, HuggingFaceDirectory, is_hugging_face
from nxd_ckpt.tag.mappings import find_mapping
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.hugging_face.jobs import jobs
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import write_config, write_model

pytestmark = [pytest.mark.plain, pytest.mark.once]


def opened(path: Path) -> HuggingFaceDirectory:
    return HuggingFaceDirectory(LocalStorage(path))


def mapped(directory: HuggingFaceDirectory, job: Job, topology: Topology) -> MappedDirectory:
    sizes = Sizes(directory.config, job.copies, job.hardware)
    return MappedDirectory(directory, find_mapping(None, directory.config), sizes, topology)


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_found(tmp_path: Path, shards: int) -> None:
    """In one file or several, with config.json."""
    state = write_model(tmp_path, Model(), shards)
    assert is_hugging_face(LocalStorage(tmp_path))
    directory = opened(tmp_path)
    assert sorted(state) == directory.names
    assert Model().config == directory.config
    found = {name: directory.files.read(directory.tensor(name)) for name in directory.names}
    assert [] == [name for name in state if not torch.equal(state[name], found[name])]


def test_a_tag_is_no_hugging_face_directory(tmp_path: Path) -> None:
    """Nor is an empty directory, or one with config.json alone."""
    storage = LocalStorage(tmp_path)
    assert not is_hugging_face(storage)
    write_config(tmp_path, {})
    assert not is_hugging_face(storage)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert is_hugging_face(storage)


@given(job=jobs())
@settings(max_examples=40)
def test_every_rank_reads_what_a_conversion_by_hand_gives_it(
    tmp_path_factory: pytest.TempPathFactory, job: Job
) -> None:
    """Any sizes, heads and copies: each rank's tensors straight from the files, hardly more bytes than it has."""
    path = tmp_path_factory.mktemp("hf")
    state = write_model(path, job.model, shards=2)
    log: list[Operation] = []
    directory = HuggingFaceDirectory(HookedStorage(LocalStorage(path), log.append))
    topology = Topology(dp=job.ep, tp=job.tp, ep=job.ep)
    for at in map(topology.at, range(topology.world_size)):
        source = mapped(directory, job, at)
        held = job.rank(state, at.tp_rank, at.ep_rank)
        for match in find_mapping(None, directory.config).matches(held):
            expected = held[match.name]
            leaf = source.assembly(match, dtype_name(expected.dtype), tuple(expected.shape))
            log.clear()
            assert torch.equal(expected, read_assembly(leaf, directory.files.read_ranges)), match.name
            assert sum(one.nbytes for one in log) <= expected.nbytes * 17 / 16


def test_tied_tensors_are_read_from_what_they_are_tied_to(tmp_path: Path) -> None:
    """Files leave out the head where config.json says that it is tied; else it is missing."""
    model = Model()
    state = write_model(tmp_path, model)
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    job = Job(model)
    (match,) = find_mapping("llama", {}).matches(["lm_head.weight"])
    with pytest.raises(KeyMismatch, match=r"has no tensor lm_head\.weight; is it"):
        mapped(opened(tmp_path), job, Topology()).assembly(match, "float32", (24, 8))
    write_config(tmp_path, {**model.config, "tie_word_embeddings": True})
    directory = opened(tmp_path)
    leaf = mapped(directory, job, Topology()).assembly(match, "float32", (24, 8))
    assert torch.equal(state["model.embed_tokens.weight"], read_assembly(leaf, directory.files.read_ranges))
    del state["model.embed_tokens.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(KeyMismatch, match=r"nor model\.embed_tokens\.weight, to which it is tied"):
        mapped(opened(tmp_path), job, Topology()).assembly(match, "float32", (24, 8))


def test_a_live_tensor_of_another_model_is_refused(tmp_path: Path) -> None:
    """Naming both shapes."""
    write_model(tmp_path, Model())
    (match,) = find_mapping("llama", {}).matches(["model.layers.0.mlp.down_proj.weight"])
    with pytest.raises(ShapeMismatch, match=r"down_proj\.weight has shape \(8, 12\), expected \(8, 14\)"):
        mapped(opened(tmp_path), Job(Model()), Topology(tp=2)).assembly(match, "float32", (8, 7))


def _lose_a_shard(path: Path) -> None:
    next(path.glob("model-00002*")).unlink()


def _lose_the_index(path: Path) -> None:
    (path / INDEX).unlink()


def _swap_shards(path: Path) -> None:
    one, other = sorted(path.glob("model-*"))[:2]
    one.write_bytes(other.read_bytes())


def _cut_a_shard(path: Path) -> None:
    shard = next(path.glob("model-00001*"))
    shard.write_bytes(shard.read_bytes()[:-1])


def _leave_pickles(path: Path) -> None:
    _lose_the_index(path)
    for number, shard in enumerate(path.glob("*.safetensors")):
        shard.rename(path / ("pytorch_model.bin" if number == 0 else f"{number}.bin"))


def _leave_sharded_pickles(path: Path) -> None:
    _leave_pickles(path)
    (path / "pytorch_model.bin").rename(path / "pytorch_model-00001-of-00003.bin")
    (path / "pytorch_model.bin.index.json").write_text("{}")


def _leave_nothing(path: Path) -> None:
    _lose_the_index(path)
    for shard in path.glob("*.safetensors"):
        shard.unlink()


def _index(document: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / INDEX).write_text(document if isinstance(document, str) else json.dumps(document))

    return damage


@pytest.mark.parametrize(
    ("damage", "kind", "complaint"),
    [
        (_lose_a_shard, PartNotFound, r"model-00002-of-00003\.safetensors is missing, in which .* \d+ tensors"),
        (_lose_the_index, PartNotFound, r"index\.json is missing"),
        (_swap_shards, MalformedFile, r"model-00001.* does not hold the tensors that"),
        (_cut_a_shard, MalformedFile, r"model-00001.*truncated, or not whole"),
        (_leave_pickles, UnsupportedState, r"pickles.*safe_serialization=True"),
        (_leave_sharded_pickles, UnsupportedState, r"pickles.*safe_serialization=True"),
        (_leave_nothing, PartNotFound, r"holds no weights"),
        (_index("{"), MalformedFile, r"index\.json: not valid JSON"),
        (_index([]), MalformedFile, r"expected a JSON object"),
        (_index({"weight_map": ["a"]}), MalformedFile, r"weight_map must name"),
        (_index({"weight_map": {"a": "../secret.safetensors"}}), MalformedFile, r"is not a safetensors file of this"),
    ],
)
def test_a_directory_that_is_not_whole_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], kind: type[CheckpointError], complaint: str
) -> None:
    """The error names the file, and what to do."""
    write_model(tmp_path, Model(), shards=3)
    damage(tmp_path)
    with pytest.raises(kind, match=complaint):
        read_all(tmp_path)


def read_all(path: Path) -> None:
    directory = opened(path)
    for name in directory.names:
        directory.tensor(name)
