"""Names of tensors with placeholders for numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

Numbers = Mapping[str, int]
"""Values of placeholders."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"(?:\{\w+\}|\d)+")


@dataclass(frozen=True)
class Pattern:
    """A name with placeholders for numbers: ``model.layers.{layer}.mlp.down_proj.weight``."""

    text: str

    @cached_property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._keys))

    def match(self, name: str) -> dict[str, int] | None:
        match_ = self._regex.fullmatch(name)
        return None if match_ is None else {key: int(value) for key, value in match_.groupdict().items()}

    def fill(self, numbers: Numbers) -> str:
        return self._template % tuple([numbers[key] for key in self._keys])

    @cached_property
    def _keys(self) -> list[str]:
        """The placeholders, each as often as it occurs."""
        return _PLACEHOLDER.findall(self.text)

    @cached_property
    def _template(self) -> str:
        """A template for ``%``, because half a million names are filled for one model."""
        return "%d".join(part.replace("%", "%%") for part in _PLACEHOLDER.split(self.text)[::2])

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        regex = ""
        for number, part in enumerate(_PLACEHOLDER.split(self.text)):  # every second one is a placeholder
            group = f"(?P={part})" if f"(?P<{part}>" in regex else rf"(?P<{part}>0|[1-9]\d{{0,17}})"
            regex += group if number % 2 else re.escape(part)
        return re.compile(regex)


class PatternIndex:
    """Patterns by what a name that they match is without its numbers: there are thousands of names, and few matches."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._patterns: dict[str, list[Pattern]] = {}
        for pattern in dict.fromkeys(patterns):
            self._patterns.setdefault(_NUMBER.sub("#", pattern.text), []).append(pattern)

    def matches(self, name: str) -> Iterator[tuple[Pattern, Numbers]]:
        """Yield the patterns that match ``name``, with the values of their placeholders."""
        for pattern in self._patterns.get(_NUMBER.sub("#", name), ()):
            numbers = pattern.match(name)
            if numbers is not None:
                yield pattern, numbers
