"""docs/compare.md answers each question for every library, with a source, and ours with a test."""

from __future__ import annotations

import re

import pytest

from tests.docs.markdown import DOCS, tables

pytestmark = [pytest.mark.plain, pytest.mark.once]

TABLES = tables(DOCS / "compare.md")
QUESTIONS = [heading for heading in TABLES if heading.endswith("?")]
LIBRARIES = [
    "nxd_ckpt",
    "NxD",
    "torch DCP",
    "torch_checkpointing",
    "TorchTitan",
    "Orbax",
    "Megatron-core",
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
    assert 9 == len(QUESTIONS)


def test_every_link_is_defined() -> None:
    """Links by name, as ``[file][name]``, have an address, and no address is left over."""
    text = (DOCS / "compare.md").read_text()
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == set(re.findall(r"^\[([\w-]+)\]: https://", text, re.MULTILINE))
