"""Assignment of parameters to param groups, by trainers' usual groups. Pure.

Trainers put decayed parameters into the first group, and norms and biases, or biases only, into the second, each in the
model's order; or all parameters into one group. An assignment counts if it fits the saved groups, in the number and the
shape of all parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Shape = tuple[int, ...]

NOT_DECAYED = (("bias", "norm", "LayerNorm"), ("bias",), ())
"""Alternatives for the second group: a parameter is in it if its name contains one of the patterns."""


def grouped(
    parameters: Mapping[str, Shape | None], groups: Sequence[Sequence[Shape]], patterns: Iterable[str]
) -> list[list[str]] | None:
    """Return the names of each group, with names that contain one of ``patterns`` in the second; None if none fit.

    ``parameters`` are the model's, in order, with their shapes. ``groups`` are the shapes of the optimizer's state for
    each parameter; an empty shape fits any parameter.
    """
    later = [name for name in parameters if any(pattern in name for pattern in patterns)]
    first = [name for name in parameters if name not in set(later)]
    empty: list[list[str]] = [[] for _ in groups[2:]]
    names = [first, later, *empty][: len(groups)]

    def fit(names: Sequence[str], shapes: Sequence[Shape]) -> bool:
        expected = [parameters[name] for name in names]
        return len(names) == len(shapes) and all(
            shape is None or not saved or shape == saved for shape, saved in zip(expected, shapes, strict=True)
        )

    fits = sum(map(len, names)) == len(parameters) and all(map(fit, names, groups))
    return names if fits else None
