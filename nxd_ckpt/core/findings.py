"""Findings of an examination of a tag. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from nxd_ckpt.errors import CheckpointError, TagReplaced


@dataclass(frozen=True)
class Finding:
    """One fault, or suspected fault, of a tag.

    Attributes:
        kind: a keyword for programs: "values", "steps", "weights", "ties", "groups", "scheduler", "position", "parts",
            "files" and "before"; of a load's proof also "moments".
        severity: "problem" cannot occur in a correct run; "doubt" may have a good reason.
        what: the tensor, value or part.
        message: what was expected and what was found.
    """

    kind: str
    severity: Literal["problem", "doubt"]
    what: str
    message: str


def problem(kind: str, what: str, message: str) -> Finding:
    return Finding(kind, "problem", what, message)


def doubt(kind: str, what: str, message: str) -> Finding:
    return Finding(kind, "doubt", what, message)


@contextmanager
def collect_problems(problems: list[str]) -> Iterator[None]:
    """Turn the error of one part of a tag into one of ``problems``, each once; TagReplaced is raised."""
    try:
        yield
    except TagReplaced:
        raise
    except CheckpointError as error:
        if str(error) not in problems:
            problems.append(str(error))
