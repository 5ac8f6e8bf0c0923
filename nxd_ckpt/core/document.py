"""JSON documents of many equal elements, written and read element by element.

An index of 100,000 tensors, read at once, is a million small containers, and the garbage collector goes through all
that live again and again. So each element becomes what it stands for as soon as it is parsed, and text straight from
that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

quoted: Callable[[str], str] = json.encoder.encode_basestring_ascii
"""A string as JSON."""

_value_at: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_blanks = re.compile(r"[ \t\n\r]*").match


def plain(value: Any) -> str:
    """Any plain value as JSON. Raises ValueError for NaN and infinity, which JSON does not have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def integers(values: Iterable[int]) -> str:
    """A list of integers as JSON."""
    return f"[{','.join(map(str, values))}]"


def array(elements: Iterable[str]) -> str:
    """JSON texts as one array."""
    return f"[{','.join(elements)}]"


def members(elements: Mapping[str, str]) -> str:
    """JSON texts as one object, by name."""
    return "{" + ",".join(f"{quoted(name)}:{text}" for name, text in elements.items()) + "}"


def read(text: str, makers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """The members of the JSON object ``text``; those in ``makers`` with ``makers[name](element)`` for each element.

    These must be arrays or objects themselves, and stay lists and dicts.

    Raises:
        ValueError: not valid JSON, or not such an object. Whatever a maker raises.
    """
    scanner = _Scanner(text)

    def member(name: str) -> Any:
        make = makers.get(name)
        return scanner.value() if make is None else scanner.container(make)

    document = scanner.members(member)
    scanner.end()
    return document


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def value(self) -> Any:
        """The next value, whole."""
        try:
            value, self._at = _value_at(self._text, self._blank())
        except StopIteration:
            raise self._expected("a value") from None
        return value

    def container(self, make: Callable[[Any], Any]) -> list[Any] | dict[str, Any]:
        """The next array or object, with ``make(element)`` for each element."""
        if self._text.startswith("{", self._blank()):
            return self.members(lambda _: make(self.value()))
        found: list[Any] = []
        self._need("[")
        if self._takes("]"):
            return found
        while True:
            found.append(make(self.value()))
            if self._takes("]"):
                return found
            self._need(",")

    def members(self, member: Callable[[str], Any]) -> dict[str, Any]:
        """The next object; ``member(name)`` reads the value of each member."""
        found: dict[str, Any] = {}
        self._need("{")
        if self._takes("}"):
            return found
        while True:
            if not self._text.startswith('"', self._blank()):
                raise self._expected("a name")
            name = self.value()
            self._need(":")
            found[name] = member(name)
            if self._takes("}"):
                return found
            self._need(",")

    def end(self) -> None:
        if self._blank() != len(self._text):
            raise self._expected("the end")

    def _blank(self) -> int:
        """Go over white space; where that ends."""
        if self._text[self._at : self._at + 1] in _BLANK:
            self._at = _blanks(self._text, self._at).end()  # type: ignore[union-attr]
        return self._at

    def _takes(self, mark: str) -> bool:
        """Whether ``mark`` comes next; then it is gone over."""
        found = self._text.startswith(mark, self._blank())
        self._at += found
        return found

    def _need(self, mark: str) -> None:
        if not self._takes(mark):
            raise self._expected(repr(mark))

    def _expected(self, what: str) -> ValueError:
        return json.JSONDecodeError(f"expected {what}", self._text, self._at)


_BLANK = (" ", "\t", "\n", "\r")
