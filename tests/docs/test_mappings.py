"""docs/mappings.md describes the format of mappings, all of it."""

import json

from nxd_ckpt.hugging_face.mappings import find_mapping
from nxd_ckpt.hugging_face.sizes import CONFIG_KEYS
from tests.docs.markdown import DOCS, code_blocks, headings, tables, unquoted

PAGE = DOCS / "mappings.md"
SHIPPED = sorted((DOCS.parent / "nxd_ckpt" / "mappings").glob("*.json"))


def test_the_mappings_on_the_page_are_such() -> None:
    """They can be loaded as they stand, and have every member that a mapping can have."""
    documents = [json.loads(block) for block in code_blocks(PAGE, "json")]
    assert ["mine", "my_llama"] == [find_mapping(document, {}).name for document in documents]
    assert {name for document in documents for name in document} - {"format_version"} == _members(headings(PAGE)[0])


def test_every_field_of_a_rule_is_described() -> None:
    """Whatever shipped mappings use is in the tables, and every size is named."""
    used = {name for path in SHIPPED for rule in json.loads(path.read_text())["rules"] for name in rule}
    assert used == _members("Rules")
    documents = [json.loads(path.read_text()) for path in SHIPPED]
    assert {name for document in documents for one in document.get("packed", []) for name in one} == _members(
        "Packed tensors"
    )
    kinds = {name for document in documents for kind in document.get("layer_kinds", []) for name in kind}
    assert set() == kinds - _members("Kinds of layers")
    text = PAGE.read_text()
    assert [] == [size for size in CONFIG_KEYS if f"`{size}`" not in text]


def _members(heading: str) -> set[str]:
    """The names in the first column of the table."""
    return {unquoted(name) for row in tables(PAGE)[heading] for name in row[0].split(", ")}
