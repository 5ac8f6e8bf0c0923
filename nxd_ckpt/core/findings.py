"""What an examination finds wrong with a tag. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: a word for programs: "values", "steps", "weights", "moments", "shards", "rounding", "ties", "groups",
            "scheduler", "position", "random", "parts", "files", "buffers", "loss".
        severity: "problem", which no correct run explains; "doubt", for which there may be a good reason.
        what: the tensor, value or part that it is about.
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
