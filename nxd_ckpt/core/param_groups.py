"""Which parameters are in which param group, where trainers' usual groups tell it. Pure.

Trainers put parameters that are decayed into the first group, and norms and biases, or biases only, into the second,
each in the model's order; or all into one group. What fits the saved groups, in numbers and in the shape of every
parameter, is how it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Shape = tuple[int, ...]

NOT_DECAYED = (("bias", "norm", "LayerNorm"), ("bias",), ())
"""What is in the names of parameters of the second group."""


def grouped(
    parameters: Mapping[str, Shape | None], groups: Sequence[Sequence[Shape]], patterns: Iterable[str]
) -> list[list[str]] | None:
    """The names of each group, if those whose names have one of ``patterns`` in them are the second group.

    ``parameters`` are the model's in order with their shapes; ``groups`` are the shapes of what the optimizer keeps for
    each parameter, empty ones fitting any. None where they do not fit.
    """
    later = [name for name in parameters if any(pattern in name for pattern in patterns)]
    first = [name for name in parameters if name not in set(later)]
    empty: list[list[str]] = [[] for _ in groups[2:]]
    names = [first, later, *empty][: len(groups)]

    def fit(names: Sequence[str], shapes: Sequence[Shape]) -> bool:
        known = [parameters[name] for name in names]
        return len(names) == len(shapes) and all(
            one is None or not other or one == other for one, other in zip(known, shapes, strict=True)
        )

    fits = sum(map(len, names)) == len(parameters) and all(map(fit, names, groups))
    return names if fits else None
