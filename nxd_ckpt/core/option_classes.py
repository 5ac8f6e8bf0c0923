"""Options of public functions: a frozen dataclass defines their keywords, types, defaults and meaning.

Signatures, ``help()``, the flags of commands and docs/options.md derive from its fields. `nxd_ckpt.keywords`, which is
generated, has the same for type checkers and editors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from functools import cache, wraps
from inspect import Parameter, cleandoc, get_annotations, signature
from textwrap import TextWrapper
from typing import Any, TypeVar, cast, get_type_hints

from nxd_ckpt.core.arguments import plain_value, read
from nxd_ckpt.core.suggestions import closest, first_of
from nxd_ckpt.errors import InvalidArgument

_OURS = {
    "async_": "async_save",
    "asynchronous": "async_save",
    "checkpoint_dir_str": "path",
    "every_steps": "every",
    "interval": "every",
    "keep": "num_kept_ckpts",
    "keep_last": "num_kept_ckpts",
    "keep_latest_k": "num_kept_ckpts",
    "max_shard_size": "size_per_shard",
    "lr_scheduler": "scheduler",
    "max_to_keep": "num_kept_ckpts",
    "num_kept": "num_kept_ckpts",
    "optim": "optimizer",
    "save_every": "every",
    "save_interval": "every",
    "save_interval_steps": "every",
    "save_top_k": "retain",
    "save_total_limit": "num_kept_ckpts",
    "save_xser": "use_xser",
    "sched": "scheduler",
}
"""Keywords of other libraries, each with the one of ours that takes its place, for error messages."""
_ALIKE = 0.8
"""Similarity from which on an unknown keyword is taken for a misspelt one."""
_WITHOUT = {"prefix": "the names of a tag's files are fixed, and parameters are saved by their own names: leave it out"}
"""Keywords of other libraries that have no place here, each with the reason."""
_EXAMPLES = {"retain": 'retain=[Last(3), Every(1000), Best("loss", 2)]'}


_Function = TypeVar("_Function", bound=Callable[..., Any])
_Kind = TypeVar("_Kind")


def _meant(name: str, own: Collection[str], elsewhere: Mapping[str, Collection[str]]) -> str:
    """Return the name of an unknown keyword, with the keyword that was probably meant.

    ``own`` are the keywords that the function has; ``elsewhere`` those of related functions, by the functions' names.
    """
    if name in _WITHOUT and name not in own:
        return f"{name!r} ({_WITHOUT[name]})"
    ours = _OURS.get(name, name)
    if ours == "num_kept_ckpts" and "keep" in own:
        ours = "keep"
    if ours not in own and any(name in names for names in elsewhere.values()):
        ours = name
    places = [function for function, names in elsewhere.items() if ours in names]
    if ours not in own and not places:
        close = closest(name, {*own, *(one for names in elsewhere.values() for one in names)}, _ALIKE)
        if close is None:
            return repr(name)
        ours = close
        places = [function for function, names in elsewhere.items() if close in names]
    if ours in own:
        return f"{name!r} (did you mean {_EXAMPLES.get(ours, repr(ours))}?)"
    return f"{name!r} (pass {_EXAMPLES.get(ours, ours + '=')} to {places[0]}())"


def checks_keywords(kind: type[_Kind]) -> type[_Kind]:
    """Decorate a dataclass: an unknown keyword of its constructor raises TypeError with a suggestion."""
    made = kind.__init__
    names = [field.name for field in fields(cast(Any, kind))]

    @wraps(made)
    def init(self: _Kind, *args: Any, **values: Any) -> None:
        _refuse_unknown(values, kind.__name__, names)
        made(self, *args, **values)

    cast(Any, kind).__init__ = init
    return kind


@cache
def _hints(annotated: Any) -> dict[str, Any]:
    """Return the types of a class's fields, or of a function's parameters, by name."""
    return get_type_hints(annotated, include_extras=True)


class Options:
    """Base of dataclasses whose fields are arguments: each is checked, and made plain, by its type.

    None is the default where it is no value of the type. Raises InvalidArgument for a value that means none.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        values = vars(self)
        for name, hint, default, plain in _arguments_of(kind):
            value = values[name]
            if value is default is plain:  # as most of them are
                continue
            where = "" if kind.__name__.endswith("Options") else f"{kind.__name__}(): "
            object.__setattr__(self, name, plain_value(hint, value, where + name, default))  # frozen


@cache
def _arguments_of(kind: Any) -> list[tuple[str, Any, Any, Any]]:
    """Return the name, type, default, and plain value of the default of each field."""
    types = _hints(kind)
    return [
        (each.name, hint := types[each.name], each.default, each.default is MISSING or read(hint, each.default))
        for each in fields(kind)
    ]


def option(default: Any, help: str, *, repr: bool = True) -> Any:
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


def plain_options(values: Mapping[str, Any], *kinds: type[Any]) -> dict[str, Any]:
    """Return ``values`` with those that are fields of ``kinds`` made plain. Raises InvalidArgument."""
    plain = dict(values)
    for kind in kinds:
        own, _ = split_options(kind, values)
        made = kind(**own)
        plain |= {name: getattr(made, name) for name in own}
    return plain


def options_of(kind: type[_Kind], values: Mapping[str, Any], function: str | None = None) -> _Kind:
    """Return a ``kind`` with these values, passed to ``function``. Raises InvalidArgument for a name without field."""
    _, unknown = split_options(kind, values)
    if unknown:
        names = [field.name for field in fields_of(kind)]
        function = function or next((function for function, (kinds, _) in _takers.items() if kind in kinds), "")
        own = _takers[function][1] if function in _takers else ()
        explained = _explained(unknown, function, own)
        raise InvalidArgument(f"unknown option {explained}; the options are {', '.join(names)}")
    return kind(**values)


_takers: dict[str, tuple[tuple[type[Any], ...], Collection[str]]] = {}
"""The option classes, and the parameters, of each function that `takes` decorates."""

_RELATED = (
    *("Checkpointer", "Checkpointer.save", "Checkpointer.load", "Checkpointer.load_latest"),
    *("save_checkpoint", "load_checkpoint"),
)
"""Functions of which one is called with keywords that another one takes."""


def _kind(function: str) -> tuple[bool, bool]:
    """Return whether it is a Checkpointer's method, and whether it loads."""
    return function.startswith("Checkpointer"), "load" in function


def _explained(unknown: Iterable[str], function: str, own: Collection[str]) -> str:
    """List keywords that the function does not take, each with the one of its ``own`` that was probably meant."""
    is_method, is_load = _kind(function)
    related = sorted(
        _RELATED if function in _RELATED else (),
        key=lambda one: (_kind(one)[0] != is_method, _kind(one)[1] != is_load),
    )
    elsewhere = {other: _takers[other][1] for other in related if other in _takers and other != function}
    return first_of(unknown, lambda name: _meant(name, own, elsewhere))


def _refuse_unknown(names: Iterable[str], function: str, own: Collection[str]) -> None:
    """Raise TypeError for names that are not the function's ``own`` parameters."""
    unknown = [name for name in names if name not in own]
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument {_explained(unknown, function, own)}")


def takes(*kinds: type[Any], checks: bool = True) -> Callable[[_Function], _Function]:
    """Decorate a function whose ``**options`` are the fields of ``kinds``; its signature and help() show each of them.

    Any other keyword raises TypeError with a suggestion; without ``checks`` the function has to check it. Other
    arguments are made plain by the types of their parameters, which raises InvalidArgument.
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

        positional = [name for name, each in parameters.items() if each.kind is Parameter.POSITIONAL_OR_KEYWORD]

        def plain(name: str, value: Any) -> Any:
            if name in added or name not in parameters:
                return value  # the class of these options makes it plain
            return plain_value(_hints(function).get(name, Any), value, name, parameters[name].default)

        @wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            if checks:
                _refuse_unknown(options, shown_name, parameters)
            plain_args = [*map(plain, positional, args), *args[len(positional) :]]
            return function(*plain_args, **{name: plain(name, value) for name, value in options.items()})

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
    wrapper = TextWrapper(116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    lines = [wrapper.fill(entry) for entry in entries]
    return head + args + "\n".join([own, *lines]) + gap + rest
