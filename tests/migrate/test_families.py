"""Which form takes which family, tried: the table of docs/layouts.md, from tags of jobs of several ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import load_checkpoint
from nxd_ckpt.convert import import_checkpoint, migrate
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.tag.mappings import shipped_mappings
from tests.docs.markdown import DOCS, tables
from tests.hugging_face.families import CASES, FAMILIES, OF_TORCHTITAN, random_model
from tests.hugging_face.reference import State
from tests.hugging_face.saved import differences, weights
from tests.migrate.dcp_directory import from_dcp

pytestmark = [pytest.mark.plain, pytest.mark.once]

_ROWS = tables(DOCS / "layouts.md")["Families"]
TABLE = {name: forms for names, *forms in _ROWS for name in re.findall(r"`(\w+)`", names)}
NAMES = {
    "llama": "llama", "mistral": "mistral", "granite": "granite", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3-moe-dense-layers", "deepseek_v3": "deepseek_v3", "glm4_moe": "glm4-moe",
    "llama4_text": "llama4", "qwen3_next": "qwen3-next", "olmo2": "olmo2", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "gpt2": "gpt2", "mixtral": "mixtral", "dbrx": "dbrx",
    "gpt_oss": "gpt_oss", "gpt_neox": "gpt-neox",
}


def test_the_table_has_every_family() -> None:
    """By what config.json calls models of the shipped mappings; those asked for by name have no such name."""
    chosen = {name for mapping in shipped_mappings().values() for name in mapping.model_types}
    assert TABLE.keys() == NAMES.keys() == chosen


@pytest.mark.parametrize("model_type", NAMES)
@pytest.mark.one_in(2)
def test_a_family_goes_where_the_table_says(tmp_path: Path, model_type: str) -> None:
    """To torch DCP and a tag of one rank bit for bit; to TorchTitan, or refused before anything is written."""
    name = NAMES[model_type]
    how: dict[str, Any] = {"tp": 2} if name in CASES else {**FAMILIES, **OF_TORCHTITAN}[name][2]
    random_model(name).save_pretrained(tmp_path / "hf")
    files = weights(tmp_path / "hf")
    source = tmp_path / "run" / "step_1"
    import_checkpoint(tmp_path / "hf", source, **how)
    options: dict[str, Any] = {"config": tmp_path / "hf"}
    if "kv_size_multiplier" in how:
        options |= {"kv_size_multiplier": how["kv_size_multiplier"], "hardware": "trn1"}
    forms, of_torchtitan = TABLE[model_type]
    assert "yes" == forms
    migrate(source, tmp_path / "dcp", to="dcp", **options)
    found = from_dcp(tmp_path / "dcp")
    assert [] == differences(files, {name: found[f"model.{name}"] for name in files})
    migrate(source, tmp_path / "plain" / "step_1", to="tag", **options)
    fresh: State = {}
    load_checkpoint(tmp_path / "plain", model=fresh)
    assert [] == differences(files, fresh)
    for release in ("0.3", "0.2.2"):
        target, titan = tmp_path / release, {**options, "to": "torchtitan", "torchtitan_release": release}
        if of_torchtitan == "yes":
            migrate(source, target, **titan)
            assert any(torch.equal(files["model.norm.weight"], each) for each in from_dcp(target / "step-0").values())
            continue
        with pytest.raises(UnsupportedState, match=f"names of model_type '{model_type}' are not known"):
            migrate(source, target, **titan)
        assert not target.exists()
