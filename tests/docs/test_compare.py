"""docs/compare.md answers each question for every library, with a source, and ours with a test."""

import re
from datetime import date

import pytest

from tests.docs.markdown import DOCS, tables
from tools.old_sources import old_cells

TABLES = tables(DOCS / "compare.md")
QUESTIONS = [heading for heading in TABLES if heading.endswith("?")]
LIBRARIES = [
    "nxd_ckpt", "NxD", "torch DCP", "torch_checkpointing", "TorchTitan", "Orbax", "Megatron-core", "lm-resiliency",
    "SageMaker",
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_library_answers(question: str) -> None:
    """Ours names tests, which tests/docs/test_pages.py looks for; the others link a file or name one of the package."""
    rows = TABLES[question]
    assert LIBRARIES == [row[0] for row in rows]
    assert all(answer for _, answer, _ in rows)
    ours, *others = [source for _, _, source in rows]
    assert re.search(r"`tests/[\w/]+\.py::\w+`", ours)
    assert [] == [source for source in others if not re.search(r"\]\[|\]\(https://|^package", source)]


def test_the_questions_that_people_ask_are_there() -> None:
    assert 6 == len(QUESTIONS)


def test_every_link_is_defined() -> None:
    """Links by name, as ``[file][name]``, have an address, and no address is left over."""
    text = (DOCS / "compare.md").read_text()
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == set(re.findall(r"^\[([\w-]+)\]: https://", text, re.MULTILINE))


def test_old_sources_are_found() -> None:
    """Each cell of another project has a date: some day all are old, and on the day of the first none was."""
    text = (DOCS / "compare.md").read_text()
    assert [] == old_cells(text, date(2026, 4, 9))
    assert len(QUESTIONS) * len(LIBRARIES[1:]) == len(old_cells(text, date(2036, 1, 1)))
