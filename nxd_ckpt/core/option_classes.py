"""Options of public functions: a frozen dataclass defines their keywords, types, defaults and meaning.

Signatures, ``help()``, the flags of commands and docs/options.md derive from its fields. `nxd_ckpt.keywords`, which is
generated, has the same for type checkers and editors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, field, fields
from functools import wraps
from inspect import Parameter, cleandoc, get_annotations, signature
from textwrap import fill
from typing import Any, TypeVar, cast

from nxd_ckpt.core.other_names import meant
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import InvalidArgument

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Kind = TypeVar("_Kind")
_Value = TypeVar("_Value")


def option(default: _Value, help: str, *, repr: bool = True) -> _Value:
    """Return a field of an option class. Without ``repr``, no repr shows its value."""
    return field(default=default, repr=repr, metadata={"help": " ".join(help.split())})


def fields_of(kind: type[Any]) -> list[Field[Any]]:
    """Return the fields: those that the class adds before those of its bases."""
    bases = [get_annotations(base) for base in reversed(kind.__mro__)]
    return sorted(fields(kind), key=lambda field: -[field.name in base for base in bases].index(True))


def split_options(kind: type[Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into fields of ``kind`` and the rest."""
    accepted = {field.name for field in fields(kind)}
    return (
        {name: value for name, value in values.items() if name in accepted},
        {name: value for name, value in values.items() if name not in accepted},
    )


def options_of(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """Return a ``kind`` with these values. Raises InvalidArgument if it has no field of a name."""
    _, unknown = split_options(kind, values)
    if unknown:
        names = [field.name for field in fields_of(kind)]
        function = next((function for function, (kinds, _) in _takers.items() if kind in kinds), "")
        raise InvalidArgument(f"unknown option {_explained(unknown, function)}; the options are {', '.join(names)}")
    return kind(**values)


_takers: dict[str, tuple[tuple[type[Any], ...], Collection[str]]] = {}
"""The option classes, and the parameters, of each function that `takes` decorates."""

_RELATED = ("Checkpointer", "Checkpointer.save", "Checkpointer.load", "save_checkpoint", "load_checkpoint")
"""Functions of which one is called with keywords that another one takes."""


def _explained(unknown: Iterable[str], function: str) -> str:
    """List keywords that the function does not take, each with the one that was probably meant."""
    own = _takers[function][1] if function in _takers else ()
    is_method = function.startswith("Checkpointer")
    related = sorted(_RELATED if function in _RELATED else (), key=lambda one: one.startswith("Checkp") != is_method)
    elsewhere = {other: _takers[other][1] for other in related if other in _takers and other != function}
    return first_of(unknown, lambda name: meant(name, own, elsewhere))


def takes(*kinds: type[Any], checks: bool = True) -> Callable[[_Function], _Function]:
    """Decorate a function whose ``**options`` are the fields of ``kinds``; its signature and help() show each of them.

    Any other keyword raises TypeError with a suggestion; without ``checks`` the function has to check it.
    """
    added = {field.name: field for kind in kinds for field in fields_of(kind)}

    def decorated(function: _Function) -> _Function:
        whole = signature(function)
        declared = whole.parameters.items()
        parameters = {name: each for name, each in declared if each.kind is not Parameter.VAR_KEYWORD}
        for name, new in added.items():
            keyword = Parameter(name, Parameter.KEYWORD_ONLY, default=new.default, annotation=new.type)
            parameters.setdefault(name, keyword)
        shown_name = function.__qualname__.removesuffix(".__init__")
        _takers[shown_name] = kinds, parameters

        @wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            unknown = [name for name in options if name not in parameters]
            if unknown and checks:
                raise TypeError(f"{shown_name}() got an unexpected keyword argument {_explained(unknown, shown_name)}")
            return function(*args, **options)

        shown: Any = called
        shown.__signature__ = whole.replace(parameters=list(parameters.values()))
        shown.__doc__ = _with_help(function.__doc__, added.values())
        return cast(_Function, called)

    return decorated


def _with_help(doc: str | None, options: Iterable[Field[Any]]) -> str | None:
    """Return a function's docstring, with ``options`` at the end of its Args."""
    if doc is None:  # python -OO
        return None
    head, args, rest = cleandoc(doc).partition("\n\nArgs:\n")
    own, gap, rest = rest.partition("\n\n")
    entries = (f"{option.name}: {option.metadata['help']}" for option in options)
    lines = [fill(entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
    return head + args + "\n".join([own, *lines]) + gap + rest
