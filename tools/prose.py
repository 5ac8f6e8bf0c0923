"""Plain English, as far as a program can tell: no sentence is too long, and no word is one that readers stumble over.

``python -m tools.prose`` (part of ``make lint``) reads the pages, and the comments and texts of the package. It prints
each finding with its file and line, and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md")]
LEFT_OUT = ("reliability.md",)
"""Pages of docs/ in another style: their sentences are those of campaigns of tests."""

LONGEST = 42
"""Words in a sentence."""
PLAIN = {
    "[Aa]ll the same": "still",
    "[Aa]new": "again",
    "[Bb]ut for": "except",
    "[Ss]omewhen": "at some time",
    "[Ww]hoever": "the reader, the writer, ...",
    "So (?:is|are|does|do|has|have|was)": "the subject first",
}
"""Patterns of words that are not used, each with words that can take their place."""

_PATTERNS = {re.compile(rf"\b{word}\b".replace(" ", r"\s+")): plain for word, plain in PLAIN.items()}
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |\||#)")
_SENTENCE = re.compile(r"(?<=[.:;?!|])\s+")


def in_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and finding: words of `PLAIN`, and sentences of more than `LONGEST` words."""
    prose = _CODE.sub(lambda code: "code" + "\n" * code[0].count("\n"), text)
    yield from in_text(prose)
    start = 0
    for paragraph in _PARAGRAPH.split(prose):
        start = prose.index(paragraph, start)
        for sentence in _SENTENCE.split(paragraph):
            words = sentence.split()
            if len(words) > LONGEST:
                line = 1 + prose.count("\n", 0, prose.index(sentence, start))
                yield line, f"a sentence of {len(words)} words: {' '.join(words[:8])} ..."


def in_source(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and finding for comments, docstrings and messages of a Python file."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield from ((token.start[0] + line - 1, finding) for line, finding in in_text(token.string))


def in_text(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and finding for words of `PLAIN`."""
    for pattern, plain in _PATTERNS.items():
        for match in pattern.finditer(text):
            yield 1 + text.count("\n", 0, match.start()), f"{' '.join(match[0].split())!r}: write {plain!r}"


def main() -> int:
    """Print all findings; return the exit code."""
    docs = sorted(path for path in (REPOSITORY / "docs").glob("*.md") if path.name not in LEFT_OUT)
    findings = [(path, each) for path in [*PAGES, *docs] for each in in_page(path.read_text())]
    findings += [(path, each) for path in sorted((REPOSITORY / "nxd_ckpt").rglob("*.py")) for each in in_source(path)]
    for path, (line, finding) in findings:
        print(f"{path.relative_to(REPOSITORY)}:{line}: {finding}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
