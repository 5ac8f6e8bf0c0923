"""docs/hugging-face.md is true: its code runs and prints what it says, and it describes the format of mappings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import nxd_ckpt
from nxd_ckpt.core.mapping_document import load_mapping
from nxd_ckpt.core.sizes import CONFIG_KEYS
from tests.docs.markdown import REPOSITORY, code_blocks, tables, unquoted

pytestmark = [pytest.mark.plain, pytest.mark.once]

PAGE = REPOSITORY / "docs" / "hugging-face.md"
SHIPPED = sorted((REPOSITORY / "nxd_ckpt" / "mappings").glob("*.json"))


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, and print what their comments say."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    page = "\n".join(code_blocks(PAGE, "python"))
    try:
        exec(compile(page, str(PAGE), "exec"), {"__name__": "page"})
    finally:
        nxd_ckpt.close_checkpointers()
    assert re.findall(r"^print\(.*\)  # (.*)$", page, re.MULTILINE) == capsys.readouterr().out.splitlines()


def test_the_mapping_on_the_page_is_one() -> None:
    """It can be loaded as it stands, and has every member that a mapping can have."""
    (block,) = code_blocks(PAGE, "json")
    document = json.loads(block)
    assert "mine" == load_mapping(document, "page").name
    assert {*document} - {"format_version"} == _members("Mappings")


def test_every_field_of_a_rule_is_described() -> None:
    """Whatever shipped mappings use is in the table of rules, and every size is named."""
    used = {name for path in SHIPPED for rule in json.loads(path.read_text())["rules"] for name in rule}
    assert used == _members("Rules")
    text = PAGE.read_text()
    assert [] == [size for size in CONFIG_KEYS if f"`{size}`" not in text]


def _members(heading: str) -> set[str]:
    """The names in the first column of the table."""
    return {unquoted(name) for row in tables(PAGE)[heading] for name in row[0].split(", ")}
