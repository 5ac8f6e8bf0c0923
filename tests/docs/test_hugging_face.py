"""docs/hugging-face.md describes the format of mappings, all of it."""

from __future__ import annotations

import json

import pytest

from nxd_ckpt.core.mapping_document import load_mapping
from nxd_ckpt.core.sizes import CONFIG_KEYS
from tests.docs.markdown import REPOSITORY, code_blocks, tables, unquoted

pytestmark = [pytest.mark.plain, pytest.mark.once]

PAGE = REPOSITORY / "docs" / "hugging-face.md"
SHIPPED = sorted((REPOSITORY / "nxd_ckpt" / "mappings").glob("*.json"))


def test_the_mapping_on_the_page_is_one() -> None:
    """It can be loaded as it stands, and has every member that a mapping can have."""
    (block,) = code_blocks(PAGE, "json")
    document = json.loads(block)
    assert "mine" == load_mapping(document, "page").name
    assert {*document} - {"format_version"} == _members("Mappings")


def test_every_field_of_a_rule_is_described() -> None:
    """Whatever shipped mappings use is in the tables, and every size is named."""
    used = {name for path in SHIPPED for rule in json.loads(path.read_text())["rules"] for name in rule}
    assert used == _members("Rules")
    documents = [json.loads(path.read_text()) for path in SHIPPED]
    assert {name for document in documents for one in document.get("packed", []) for name in one} == _members(
        "Packed tensors"
    )
    text = PAGE.read_text()
    assert [] == [size for size in CONFIG_KEYS if f"`{size}`" not in text]


def _members(heading: str) -> set[str]:
    """The names in the first column of the table."""
    return {unquoted(name) for row in tables(PAGE)[heading] for name in row[0].split(", ")}
