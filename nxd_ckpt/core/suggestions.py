"""Names in an error's words, with those that may have been meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_SHOWN = 8


def listed(names: Iterable[str], others: Collection[str]) -> str:
    """The names, at most eight, each with the one of ``others`` that is most like it, if one is."""
    names = list(names)
    shown = [_with_suggestion(name, others) for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more


def closest(name: str, others: Collection[str]) -> str | None:
    """The one of ``others`` that is most like the name, if one is."""
    return next(iter(difflib.get_close_matches(name, others, n=1)), None)


def _with_suggestion(name: str, others: Collection[str]) -> str:
    close = closest(name, others)
    return repr(name) if close is None else f"{name!r} (did you mean {close!r}?)"
