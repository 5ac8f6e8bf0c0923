"""Options of public functions: a frozen dataclass defines their keywords, types, defaults and meaning.

``Attributes`` in the docstring of the class describes each field. ``help()``, docs/options.md and the help of the
commands show that text. A TypedDict beside each class has the same keywords for type checkers and editors; a test
compares the two.
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
    """Return the description of each field, from the docstring of the class or of a base."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        texts |= described(cleandoc(base.__doc__ or ""))
    return {name: texts.get(name, "") for name in names_of(kind)}


def fields_of(kind: type[Any]) -> list[Field[Any]]:
    """Return the fields: the class's own before those of its bases."""
    bases = [get_annotations(base) for base in kind.__mro__]
    return sorted(fields(kind), key=lambda field: [field.name in base for base in bases].index(True))


def names_of(kind: type[Any]) -> list[str]:
    """Return the names of the fields, in the order of `fields_of`."""
    return [field.name for field in fields_of(kind)]


def _accepted(kind: type[Any]) -> set[str]:
    """Return the names of the fields in no order; four times as fast as `names_of`, for every call with options."""
    return {field.name for field in fields(kind)}


def split_options(kind: type[Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into fields of ``kind`` and the rest."""
    accepted = _accepted(kind)
    return (
        {name: value for name, value in values.items() if name in accepted},
        {name: value for name, value in values.items() if name not in accepted},
    )


def options_of(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """Return a ``kind`` with these values. Raises InvalidArgument if it has no field of a name."""
    accepted = _accepted(kind)
    unknown = [name for name in values if name not in accepted]
    if unknown:
        names = names_of(kind)
        raise InvalidArgument(f"unknown option {listed(unknown, names)}; the options are {', '.join(names)}")
    return kind(**values)


def takes(*kinds: type[Any], checks: bool = True) -> Callable[[_Function], _Function]:
    """Decorate a function whose ``**options`` are the fields of ``kinds``; its signature and help() show each of them.

    Any other keyword raises TypeError with a suggestion; without ``checks`` the function has to check it.
    """

    def decorated(function: _Function) -> _Function:
        whole = signature(function)
        declared = whole.parameters.items()
        parameters = {name: each for name, each in declared if each.kind is not Parameter.VAR_KEYWORD}
        for field in (field for kind in kinds for field in fields_of(kind)):
            parameters.setdefault(field.name, _parameter(field))

        @wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            unknown = [name for name in options if name not in parameters]
            if unknown and checks:
                name = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{name}() got an unexpected keyword argument {listed(unknown, parameters)}")
            return function(*args, **options)

        shown: Any = called
        shown.__signature__ = whole.replace(parameters=list(parameters.values()))
        shown.__doc__ = _with_docs(function.__doc__, parameters, kinds)
        return cast(_Function, called)

    return decorated


def _parameter(field: Field[Any]) -> Parameter:
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=field.type)


def described(text: str) -> dict[str, str]:
    """Return the description of each parameter or attribute in a docstring without indentation."""
    section = _SECTION.search(text)
    entries = _ENTRY.findall(section[1]) if section else []
    return {name: " ".join(meaning.split()) for names, meaning in entries for name in names.split(", ")}


def _with_docs(doc: str | None, names: Iterable[str], kinds: Sequence[type[Any]]) -> str | None:
    """Return a function's docstring, with the fields of ``kinds`` added under Args."""
    if doc is None:  # python -OO
        return None
    doc = cleandoc(doc)
    texts = {name: meaning for kind in reversed(kinds) for name, meaning in docs_of(kind).items()} | described(doc)
    entries = (f"{name}: {texts[name]}" for name in names if name in texts)
    lines = [fill(entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
    return _SECTION.sub(lambda _: "Args:\n" + "\n".join(lines) + "\n", doc)
