"""Lists of names in error messages, with suggestions of similar names. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable

_SHOWN = 8


def listed(names: Iterable[str], others: Collection[str]) -> str:
    """Return at most eight of the names, each with the most similar one of ``others``, if there is one."""
    return first_of(names, lambda name: _with_suggestion(name, others))


def first_of(names: Iterable[str], text: Callable[[str], str] = str) -> str:
    """Return the first eight of the names, as ``text`` shows each, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(text, names[:_SHOWN])) + more


def closest(name: str, others: Collection[str]) -> str | None:
    """Return the one of ``others`` that is most similar to the name, if one is."""
    return next(iter(difflib.get_close_matches(name, others, n=1)), None)


def prefix_advice(missing: Collection[str], unexpected: Collection[str], all_missing: bool) -> str | None:
    """Return advice if each ``missing`` live name differs from an unexpected saved one by a first component only.

    ``all_missing`` is True if no live name is in the checkpoint.
    """
    spare = set(unexpected)
    for prefix in _first_components(unexpected):
        if missing and {prefix + name for name in missing} <= spare:
            each = f"key_mapping={{name: {prefix!r} + name}} for each of them"
            remedy = f"prefix={prefix!r}" if all_missing else each
            return f"all missing names are there with {prefix!r} in front: pass {remedy}"
    for prefix in _first_components(missing):
        if all(name.startswith(prefix) and name.removeprefix(prefix) in spare for name in missing):
            return (
                f"all missing names are there without {prefix!r} in front: pass key_mapping={{name: "
                f"name.removeprefix({prefix!r}) for name in model.state_dict()}}"
            )
    return None


def renaming_advice(missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """Return the ``key_mapping=`` that takes each ``missing`` live name from the most similar ``unexpected`` saved one.

    None if some of the first names have no such counterpart of their own.
    """
    first = list(missing)[:_SHOWN]
    pairs = {name: close for name in first if (close := closest(name, unexpected)) is not None}
    if not first or len({*pairs.values()}) < len(first):
        return None
    more = ", ..." if len(missing) > len(first) else ""
    shown = ", ".join(f"{live!r}: {saved!r}" for live, saved in pairs.items())
    return f"if these were renamed, pass key_mapping={{{shown}{more}}}"


def _first_components(names: Iterable[str]) -> Collection[str]:
    return dict.fromkeys(name.partition(".")[0] + "." for name in names)


def _with_suggestion(name: str, others: Collection[str]) -> str:
    close = closest(name, others)
    return repr(name) if close is None else f"{name!r} (did you mean {close!r}?)"
