"""``nxd-ckpt convert --to hf``: what it prints and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxd_ckpt.cli.main import main
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, save_job, weights, write_config

pytestmark = [pytest.mark.plain, pytest.mark.once]

JOB = Job(Model(heads=8), tp=4, qkv="fused", copies=2, hardware="trn2")


def command(tmp_path: Path, *arguments: str) -> int:
    tag = tmp_path / "run" / "step_1"
    if not tag.exists():
        save_job(tmp_path / "run", JOB, JOB.model.state())
    config = write_config(tmp_path / "config", JOB.model.config)
    heads = ["--kv-size-multiplier", "2", "--hw-backend", "trn2"]
    return main(["convert", "--to", "hf", str(tag), str(tmp_path / "out"), "--config", str(config), *heads, *arguments])


def test_the_command_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what was done; --quiet says nothing."""
    assert 0 == command(tmp_path, "--size-per-shard", "1kB")
    assert "is converted to" in capsys.readouterr().out
    assert [] == differences(JOB.model.state(), weights(tmp_path / "out"))
    assert 0 == command(tmp_path, "--overwrite", "--quiet")
    assert ("", "") == capsys.readouterr()


def test_a_dry_run_shows_what_maps_to_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And writes nothing."""
    assert 0 == command(tmp_path, "--dry-run", "--json")
    document = json.loads(capsys.readouterr().out)
    assert sorted(JOB.model.state()) == sorted(one["name"] for one in document["tensors"])
    assert not (tmp_path / "out").exists()


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


def test_what_cannot_be_exported_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr."""
    assert 1 == command(tmp_path, "--mapping", "gpt_neox")
    assert capsys.readouterr().err.startswith("nxd-ckpt: error: --kv-size-multiplier=2, but mapping 'gpt_neox'")
