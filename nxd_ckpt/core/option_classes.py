"""Options of public functions: a frozen dataclass says what their keywords are, their types, defaults and meaning.

The meaning of each field stands under ``Attributes`` in the docstring of the class. From there it gets into ``help()``,
docs/options.md and the help of the commands. Beside each class a TypedDict tells type checkers and editors of the same
keywords; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import wraps
from inspect import Parameter, cleandoc, get_annotations, signature
from textwrap import fill
from typing import Any, TypeVar, cast

from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import InvalidArgument

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Kind = TypeVar("_Kind")

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n?)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def docs_of(kind: type[Any]) -> dict[str, str]:
    """What each field is for, as the docstring of the class says it, or that of a base."""
    said: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        said |= described(cleandoc(base.__doc__ or ""))
    return {name: said.get(name, "") for name in names_of(kind)}


def fields_of(kind: type[Any]) -> list[Field[Any]]:
    """The fields: the class's own before those of its bases."""
    bases = [get_annotations(base) for base in kind.__mro__]
    return sorted(fields(kind), key=lambda field: [field.name in base for base in bases].index(True))


def names_of(kind: type[Any]) -> list[str]:
    return [field.name for field in fields_of(kind)]


def _accepted(kind: type[Any]) -> set[str]:
    """The names in no order, in a quarter of the time: every call of a function with options asks."""
    return {field.name for field in fields(kind)}


def parted(kind: type[Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of what is ``given`` by name, the fields of ``kind``; and the rest."""
    known = _accepted(kind)
    return (
        {name: value for name, value in given.items() if name in known},
        {name: value for name, value in given.items() if name not in known},
    )


def options_of(kind: type[_Kind], given: Mapping[str, Any]) -> _Kind:
    """The options that are ``given`` by name. Raises InvalidArgument where ``kind`` has no field of that name."""
    accepted = _accepted(kind)
    unknown = [name for name in given if name not in accepted]
    if unknown:
        known = names_of(kind)
        raise InvalidArgument(f"unknown option {listed(unknown, known)}; the options are {', '.join(known)}")
    return kind(**given)


def takes(*kinds: type[Any], checks: bool = True) -> Callable[[_Function], _Function]:
    """Decorates a function whose ``**options`` are the fields of ``kinds``: its signature and help() show each.

    A keyword that is none of them raises TypeError, which says what may have been meant; without ``checks`` that is
    for the function to find.
    """

    def decorated(function: _Function) -> _Function:
        whole = signature(function)
        known = {name: one for name, one in whole.parameters.items() if one.kind is not Parameter.VAR_KEYWORD}
        for field in (field for kind in kinds for field in fields_of(kind)):
            known.setdefault(field.name, _parameter(field))

        @wraps(function)
        def called(*args: Any, **given: Any) -> Any:
            unknown = [name for name in given if name not in known]
            if unknown and checks:
                name = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{name}() got an unexpected keyword argument {listed(unknown, known)}")
            return function(*args, **given)

        shown: Any = called
        shown.__signature__ = whole.replace(parameters=list(known.values()))
        shown.__doc__ = _with_docs(function.__doc__, known, kinds)
        return cast(_Function, called)

    return decorated


def _parameter(field: Field[Any]) -> Parameter:
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=field.type)


def described(text: str) -> dict[str, str]:
    """What a docstring without indentation says of each parameter or attribute; of several together the same."""
    section = _SECTION.search(text)
    found = _ENTRY.findall(section[1]) if section else []
    return {name: " ".join(meaning.split()) for names, meaning in found for name in names.split(", ")}


def _with_docs(doc: str | None, names: Iterable[str], kinds: Sequence[type[Any]]) -> str | None:
    """The docstring of a function, with the meaning of the fields of ``kinds`` under Args too."""
    if doc is None:  # python -OO
        return None
    doc = cleandoc(doc)
    said = {name: meaning for kind in reversed(kinds) for name, meaning in docs_of(kind).items()} | described(doc)
    told = (f"{name}: {said[name]}" for name in names if name in said)
    lines = [fill(one, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for one in told]
    return _SECTION.sub(lambda _: "Args:\n" + "\n".join(lines) + "\n", doc)
