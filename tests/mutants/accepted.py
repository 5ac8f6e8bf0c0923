"""Mutants that no test can notice, or none should: why, by module and name."""

from __future__ import annotations

from collections.abc import Mapping

ACCEPTED: Mapping[str, Mapping[str, str]] = {
    "core/retention": {
        "Best.chosen: 1 -> 2": "only the sign matters: a factor changes no order",
    },
}
