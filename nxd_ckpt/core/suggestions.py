"""Lists of names in error messages, with suggestions of similar names. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable

from nxd_ckpt.errors import ShapeMismatch

_SHOWN = 8
_LISTED = 16
"""Keys of an option that an error lists, so that it can be copied. Nobody leaves more tensors out by name."""


def listed(names: Iterable[str], others: Collection[str]) -> str:
    """Return at most eight of the names, each with the most similar one of ``others``, if there is one."""
    return first_of(names, lambda name: _with_suggestion(name, others))


def first_of(names: Iterable[str], text: Callable[[str], str] = str) -> str:
    """Return the first eight of the names, as ``text`` shows each, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(text, names[:_SHOWN])) + more


def ranks_of(ranks: Collection[int]) -> str:
    """Return "rank 3", or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {first_of(map(str, ranks))}"


def closest(name: str, others: Collection[str], least: float = 0.6) -> str | None:
    """Return the one of ``others`` that is most similar to the name, if one is: ``least`` of 1, which is equal."""
    return next(iter(difflib.get_close_matches(name, others, n=1, cutoff=least)), None)


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


def left_out(names: Collection[str]) -> str:
    """Return the options of a load that leave the optimizer's state of these parameters out."""
    keys = f"ignore_keys={[f'optim/{name}' for name in names]}, or with "
    return f"{keys if len(names) <= _SHOWN else ''}strict=False"


SIZE_ADVICE = "build the layer with the sizes of the save (such as in_features and out_features of nn.Linear)"
"""Advice for a tensor that has another shape now; `ShapeProblems` adds how to leave it out."""


class ShapeProblems:
    """Tensors whose shapes differ, for one error that names them all."""

    def __init__(self) -> None:
        self._errors: dict[str, ShapeMismatch] = {}

    def keep(self, name: str, error: ShapeMismatch) -> None:
        """Keep that of the tensor ``name``, which is not raised yet."""
        self._errors[name] = error

    def complain(self) -> None:
        """Raise the first ShapeMismatch, with the names of all."""
        names = list(self._errors)
        if names:
            keys = f"ignore_keys={[f'*/{name}' for name in names]}" if len(names) <= _LISTED else "ignore_keys="
            others = f". {len(names)} tensors have other shapes: {first_of(names)}" if len(names) > 1 else ""
            raise ShapeMismatch(
                f"{self._errors[names[0]]}, or keep what the live one has, untrained, with {keys}{others}"
            )


def _first_components(names: Iterable[str]) -> Collection[str]:
    return dict.fromkeys(name.partition(".")[0] + "." for name in names)


def _with_suggestion(name: str, others: Collection[str]) -> str:
    close = closest(name, others)
    return repr(name) if close is None else f"{name!r} (did you mean {close!r}?)"
