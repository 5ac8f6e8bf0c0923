"""JSON documents of many equal elements, written and read element by element.

An index of 100,000 tensors, parsed at once, is a million small containers, which the garbage collector visits again and
again. So each element is converted to its object as soon as it is parsed, and written from the object directly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nxd_ckpt.core.limits import shown
from nxd_ckpt.core.other_files import instead_of_json
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.gc_paused import gc_paused

quoted: Callable[[str], str] = json.encoder.encode_basestring_ascii
"""Return a string as JSON."""

_value_at: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_BLANKS = " \t\n\r"
_mark_at: Callable[[str, int], re.Match[str] | None] = re.compile(r"[ \t\n\r]*([][{}:,])[ \t\n\r]*").match

plain: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Return any plain value as JSON. Raises ValueError for NaN and infinity, which JSON does not have."""


def integers(values: Iterable[int]) -> str:
    """Return a list of integers as JSON."""
    return f"[{','.join(map(str, values))}]"


def array(elements: Iterable[str]) -> str:
    """Join JSON texts into one array."""
    return f"[{','.join(elements)}]"


def members(elements: Mapping[str, str]) -> str:
    """Join JSON texts, by name, into one object."""
    return "{" + ",".join(f"{quoted(name)}:{text}" for name, text in elements.items()) + "}"


def whole(data: bytes) -> Any:
    """Parse a whole document.

    Raises ValueError or RecursionError if it is invalid, or has a name twice, since readers differ in which value they
    take.
    """
    with gc_paused():  # it would visit nested lists again and again
        return _decode(data.decode(json.detect_encoding(data), "surrogatepass"))


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.80} is there twice")
    return values


_decode: Callable[[str], Any] = json.JSONDecoder(object_pairs_hook=_once_each).decode


def small(data: bytes, where: str) -> dict[str, Any]:
    """Parse a file that is one small JSON object. Raises MalformedFile, naming ``where``, for anything else."""
    try:
        fields = whole(data)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{where}: not valid JSON ({instead_of_json(data) or error})") from error
    if not isinstance(fields, dict):
        raise MalformedFile(f"{where}: expected a JSON object, found {shown(fields)}")
    return fields


def read(text: str, makers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Parse the JSON object ``text``; members in ``makers`` get ``makers[name](element)`` for each of their elements.

    These members must be arrays or objects, and stay lists and dicts. In an object, elements that are objects of equal
    text, near each other, share what was made of the first.

    Raises:
        ValueError: not valid JSON, or not such an object. Errors of makers pass.
    """
    scanner = _Scanner(text)

    def member(name: str) -> Any:
        make = makers.get(name)
        return scanner.value() if make is None else scanner.container(make)

    with gc_paused():
        document = scanner.members(member)
        scanner.end()
    return document


_RECENT = 8
"""Objects in one container whose text is compared with the next one: parameters of a model have few forms."""


class _Scanner:
    """A position in a JSON text: that of its next mark or value, behind blanks."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def value(self) -> Any:
        """Parse the next value."""
        try:
            value, self._at = _value_at(self._text, self._at)
        except StopIteration:
            raise self._expected("a value") from None
        return value

    def container(self, make: Callable[[Any], Any]) -> list[Any] | dict[str, Any]:
        """Parse the next array or object, with ``make(element)`` for each element."""
        if self._text.startswith("{", self._at):
            recent: dict[str, Any] = {}
            return self.members(lambda _: self._made(make, recent))
        elements: list[Any] = []
        has_next = self._begins("[", "]")
        while has_next:
            elements.append(make(self.value()))
            has_next = self._mark(",]", "',' or ']'") == ","
        return elements

    def _made(self, make: Callable[[Any], Any], recent: dict[str, Any]) -> Any:
        """Parse the next value as ``make(value)``, or return that of an equal text among the ``recent`` objects."""
        for text, made in recent.items():
            if self._text.startswith(text, self._at):
                self._at += len(text)
                return made
        begin = self._at
        made = make(self.value())
        if self._text.startswith("{", begin):  # it ends with its own mark: a longer text is no other value
            if len(recent) == _RECENT:
                del recent[next(iter(recent))]
            recent[self._text[begin : self._at]] = made
        return made

    def members(self, member: Callable[[str], Any]) -> dict[str, Any]:
        """Parse the next object; ``member(name)`` parses the value of each member."""
        fields: dict[str, Any] = {}
        has_next = self._begins("{", "}")
        while has_next:
            name = self.value()
            if type(name) is not str:
                raise self._expected("a name before it")
            self._mark(":", "':'")
            if name in fields:
                raise ValueError(f"{name!r:.80} is there twice")
            fields[name] = member(name)
            has_next = self._mark(",}", "',' or '}'") == ","
        return fields

    def end(self) -> None:
        if self._at < len(self._text):
            raise self._expected("the end")

    def _begins(self, opening: str, closing: str) -> bool:
        """Skip the opening mark; return whether an element follows."""
        self._mark(opening, repr(opening))
        if not self._text.startswith(closing, self._at):
            return True
        self._mark(closing, repr(closing))
        return False

    def _mark(self, marks: str, what: str) -> str:
        """Skip one of these marks, with the blanks around it, and return it."""
        next_two = self._text[self._at : self._at + 2]
        if len(next_two) == 2 and next_two[0] in marks and next_two[1] not in _BLANKS:
            self._at += 1
            return next_two[0]
        match = _mark_at(self._text, self._at)
        if match is None or match[1] not in marks:
            raise self._expected(what)
        self._at = match.end()
        return match[1]

    def _expected(self, what: str) -> ValueError:
        return json.JSONDecodeError(f"expected {what}", self._text, self._at)
