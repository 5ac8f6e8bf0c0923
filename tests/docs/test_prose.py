"""The check of the English sees what it is for, and nothing in code."""

from pathlib import Path

from tools import prose


def test_words_are_seen_in_pages_and_texts(tmp_path: Path) -> None:
    """With the line, also across its end; not in code."""
    page = "# Title\n\nIt is saved anew, all the\nsame. So is this. `anew`\n\n```text\nanew\n```\n"
    assert [(3, "all the same"), (3, "anew"), (4, "So is")] == sorted(_quoted(prose.in_page(page)))
    source = tmp_path / "module.py"
    source.write_text('anew = 1\n\n\ndef f():\n    """Begin.\n\n    Then anew.\n    """\n    return 2  # but for one\n')
    assert [(7, "anew"), (9, "but for")] == list(_quoted(prose.in_source(source)))


def _quoted(findings):
    return ((line, finding.split("'")[1]) for line, finding in findings)


def test_long_sentences_are_seen() -> None:
    """Sentences, and not paragraphs, items or rows of tables."""
    words = "word " * (prose.LONGEST - 1)
    fine = f"{words}end. {words}end.\n\n- {words}\n- {words}\n\n| {words} | {words} |\n"
    assert [] == list(prose.in_page(fine))
    assert [(3, 43)] == [(line, int(found.split()[3])) for line, found in prose.in_page(f"Title\n\n{words}one more.\n")]
