"""``nxd-ckpt convert --to hf``: what it prints and returns."""

import json
from pathlib import Path

import pytest

from nxd_ckpt.cli.main import main
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import save_job, write_config

JOB = Job(Model(heads=8), tp=4, qkv="fused", copies=2, hardware="trn2")


def command(tmp_path: Path, *arguments: str) -> int:
    tag = tmp_path / "run" / "step_1"
    if not tag.exists():
        save_job(tmp_path / "run", JOB, JOB.model.state())
    config = write_config(tmp_path / "config", JOB.model.config)
    heads = ["--kv-size-multiplier", "2", "--hw-backend", "trn2"]
    return main(["convert", "--to", "hf", str(tag), str(tmp_path / "out"), "--config", str(config), *heads, *arguments])


def test_a_dry_run_shows_what_does_not_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names without a rule with the closest rules, tensors that are missing; the exit code is 1."""
    names = {"nxd": "model.layers.{layer}.self_attn.qkv_proj.weight", "hf": "layers.{layer}.qkv"}
    rules = {**names, "heads": "kv", "dim": 0}
    mapping = tmp_path / "mine.json"
    mapping.write_text(json.dumps({"format_version": 1, "name": "mine", "rules": [rules]}))
    assert 1 == command(tmp_path, "--dry-run", "--mapping", str(mapping))
    lines = capsys.readouterr().out.splitlines()
    closest = [line.split() for line in lines if line.startswith("  model.layers.0.self_attn.qkv_proj.weight_qkv")]
    assert [["model.layers.0.self_attn.qkv_proj.weight_qkv", rules["nxd"]]] == closest
    assert "missing, though every such model has them: layers.0.qkv, layers.1.qkv" == lines[-1]
