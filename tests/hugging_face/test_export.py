"""Exports: whatever job saved the model, the directory holds Hugging Face's tensors, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_ckpt.convert import export_checkpoint
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, save_job, weights, write_config

pytestmark = pytest.mark.plain

JOBS = {
    "Llama, one rank": Job(Model()),
    "Llama, q k v apart": Job(Model(kv_heads=4, bias=True), tp=4, pp=2),
    "Llama, copies on trn1": Job(Model(heads=8), tp=4, qkv="linear", copies=2),
    "Llama, copies on trn2": Job(Model(heads=8), tp=4, qkv="fused", copies=2, hardware="trn2"),
    "Llama, coalesced": Job(Model(kv_heads=4), tp=2, qkv="coalesced", fused_mlp=False),
    "Llama, padded vocabulary": Job(Model(vocab=21), tp=2, padded_vocab=24),
    "Mixtral": Job(Model("mixtral"), tp=2, qkv="linear"),
    "Mixtral, expert parallel": Job(Model("mixtral"), tp=2, pp=2, ep=2, fused_mlp=False),
    "GPT-NeoX": Job(Model("gpt_neox"), tp=2, pp=2),
}


@pytest.mark.parametrize("use_xser", [False, True])
@pytest.mark.parametrize("name", JOBS)
def test_every_job_exports_its_model(tmp_path: Path, name: str, use_xser: bool) -> None:
    """Any way to keep heads and experts, any sizes, both kinds of files; several weight files and their index."""
    job = JOBS[name]
    state = job.model.state()
    tag = save_job(tmp_path / "run", job, state, use_xser=use_xser)
    export_checkpoint(
        tag,
        tmp_path / "out",
        config=write_config(tmp_path / "config", job.model.config),
        kv_size_multiplier=job.copies,
        hardware=job.hardware,
        size_per_shard=1000,
    )
    assert [] == differences(state, weights(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
