"""Names in the words of an error: some of many, with those that may have been meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable

_SHOWN = 8


def listed(names: Iterable[str], others: Collection[str]) -> str:
    """The names, at most eight, each with the one of ``others`` that is most like it, if one is."""
    return first_of(names, lambda name: _with_suggestion(name, others))


def first_of(names: Iterable[str], text: Callable[[str], str] = str) -> str:
    """The first eight of the names, as ``text`` shows each, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(text, names[:_SHOWN])) + more


def closest(name: str, others: Collection[str]) -> str | None:
    """The one of ``others`` that is most like the name, if one is."""
    return next(iter(difflib.get_close_matches(name, others, n=1)), None)


def prefix_advice(missing: Collection[str], unexpected: Collection[str], all_missing: bool) -> str | None:
    """How to load, if each of the ``missing`` live names is an unexpected saved one but for a first component.

    ``all_missing`` says that no live name is in the checkpoint as it is.
    """
    spare = set(unexpected)
    for prefix in _first_components(unexpected):
        if missing and {prefix + one for one in missing} <= spare:
            each = f"key_mapping={{name: {prefix!r} + name}} for each of them"
            remedy = f"prefix={prefix!r}" if all_missing else each
            return f"all that are missing are there with {prefix!r} in front: pass {remedy}"
    for prefix in _first_components(missing):
        if all(one.startswith(prefix) and one.removeprefix(prefix) in spare for one in missing):
            return (
                f"all that are missing are there without {prefix!r} in front: pass key_mapping={{name: "
                f"name.removeprefix({prefix!r}) for name in model.state_dict()}}"
            )
    return None


def _first_components(names: Iterable[str]) -> Collection[str]:
    return dict.fromkeys(name.partition(".")[0] + "." for name in names)


def _with_suggestion(name: str, others: Collection[str]) -> str:
    close = closest(name, others)
    return repr(name) if close is None else f"{name!r} (did you mean {close!r}?)"
