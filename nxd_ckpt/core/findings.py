"""Findings of an examination of a tag. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One fault, or suspected fault, of a tag.

    Attributes:
        kind: a keyword for programs: "values", "steps", "weights", "moments", "shards", "rounding", "ties", "groups",
            "scheduler", "position", "random", "parts", "files", "buffers", "loss".
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
