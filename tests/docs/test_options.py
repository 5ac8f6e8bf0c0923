"""docs/options.md and docs/tiers.md are true: their tables are what functions take, and no function is left out."""

from tests.docs.markdown import DOCS, prose, tables
from tests.docs.options import ALIASES, DOCUMENTS, rendered


def test_tables_are_what_functions_take() -> None:
    """Names, defaults and meanings. `python -m tests.docs.options` brings them up to date."""
    texts = [document.read_text() for document in DOCUMENTS]
    assert [rendered(text) for text in texts] == texts


def test_every_function_with_options_is_there() -> None:
    """Tables of saving and loading, a row of each tool; and other names for a parameter are mentioned."""
    page = DOCS / "options.md"
    assert ["convert", "copy_checkpoint"] == [row[0].strip("`") for row in tables(page)["Tools"]]
    functions, text = ("save_checkpoint", "load_checkpoint"), page.read_text()
    assert [] == [name for name in functions if f"<!-- keywords: nxd_ckpt.{name} -->" not in text]
    assert [] == [name for name in ALIASES if f"`{name}=`" not in prose(page)]
