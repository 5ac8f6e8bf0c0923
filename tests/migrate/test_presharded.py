"""Models as NxD inference loads them, a file of each tensor-parallel rank: read, and written for any sizes."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nxd_ckpt import convert
from nxd_ckpt.errors import CheckpointError, InvalidArgument, TopologyMismatch
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, save_job, weights, write_config
from tests.migrate.written_presharded import held_by, write_presharded

MODELS = {
    "as many heads of each kind": (Model(heads=4, kv_heads=4), 2),
    "one head for each rank": (Model(heads=8, kv_heads=2), 4),
    "several for each rank": (Model(heads=8, kv_heads=4), 2),
    "one for each query head": (Model(heads=6, kv_heads=3, intermediate=12), 2),
    "with biases": (Model(family="qwen2", heads=8, kv_heads=2, bias=True), 4),
    "with norms of heads": (Model(family="qwen3", heads=8, kv_heads=2), 4),
}


@pytest.mark.parametrize(("model", "tp"), MODELS.values(), ids=MODELS)
def test_it_is_read_and_written(tmp_path: Path, model: Model, tp: int) -> None:
    """From such files to Hugging Face's, and from a tag of other sizes to such files: bit for bit."""
    state = model.state()
    config = write_config(tmp_path / "config", model.config)
    place = write_presharded(tmp_path / "weights", model, state, tp)
    done = convert(place, tmp_path / "hf", to="hf", config=config)
    assert ("NxD inference", "nxd_inference") == (done.writer, done.mapping)
    assert [] == differences(state, weights(tmp_path / "hf"))

    tag = save_job(tmp_path / "run", Job(model), state)
    convert(tag, tmp_path / "out", to="hf", config=config, presharded=True, tp=tp)
    assert sorted(path.name for path in place.iterdir()) == sorted(path.name for path in (tmp_path / "out").iterdir())
    for rank in range(tp):
        name = f"tp{rank}_sharded_checkpoint.safetensors"
        assert [] == differences(load_file(place / name), load_file(tmp_path / "out" / name))


def test_a_job_of_many_ranks_becomes_one_for_inference(tmp_path: Path) -> None:
    """Copies of heads, fused layers, pipeline stages; cast on the way."""
    job = Job(Model(heads=8, head_dim=4), tp=4, pp=2, qkv="fused", copies=2)
    state = job.model.state()
    config = write_config(tmp_path / "config", job.model.config)
    tag = save_job(tmp_path / "run", job, state)
    options: dict[str, Any] = {"config": config, "kv_size_multiplier": 2, "presharded": True, "dtype": "bfloat16"}
    convert(tag, tmp_path / "out", to="hf", tp=2, **options)
    for rank in range(2):
        expected = held_by(job.model, {name: tensor.bfloat16() for name, tensor in state.items()}, 2, rank)
        found = load_file(tmp_path / "out" / f"tp{rank}_sharded_checkpoint.safetensors")
        assert [] == differences(expected, found)


def _refused(place: Path, kind: type[CheckpointError], complaint: str, **options: Any) -> None:
    out = place.parent / "out"
    with pytest.raises(kind, match=complaint):
        convert(place, out, to="hf", **options)
    assert not out.exists()


def test_what_cannot_be(tmp_path: Path) -> None:
    """No config.json, ranks that the heads cannot be shared out among."""
    model = Model(heads=8, kv_heads=2)
    config = write_config(tmp_path / "config", model.config)
    place = write_presharded(tmp_path / "weights", model, model.state(), 4)
    _refused(place, InvalidArgument, "config.json has no num_attention_heads")
    tag = save_job(tmp_path / "run", Job(model), model.state())
    _refused(tag, TopologyMismatch, "cannot be divided", config=config, presharded=True, tp=3)
    _refused(tag, InvalidArgument, "writes the model alone", config=config, presharded=True, optimizer=True)
