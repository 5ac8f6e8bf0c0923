"""The flags of a command: one for each field of the options that its function takes, with the field's doc for help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from nxd_ckpt.cli import text
from nxd_ckpt.cli.json_files import nested_lists, partitions_in
from nxd_ckpt.cli.storage_options import add_output_option, add_storage_option
from nxd_ckpt.core.option_classes import docs_of, fields_of
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.options.opening import OpenOptions

_FLAGS = {
    "saved_param_names": "--param-names",
    "hardware": "--hw-backend",
    "use_safetensors": "--safetensors",
    "unshard_strategy": "--strategy",
}
"""Those that are not called as their keyword is."""

_OF_THEIR_OWN = {
    "storage_options": add_storage_option,
    "output_options": add_output_option,
    "progress": text.add_quiet,
}
"""Keywords whose flag says it in another form."""

_WITHOUT_FLAG = ("durable", "timeout", "trust_pickle")


class _Form(NamedTuple):
    """How values of a type are given: what argparse is told, what the help begins with, and what becomes of them."""

    arguments: Mapping[str, Any]
    prefix: str = ""
    read: Callable[[Any], Any] = lambda given: given


def add_options(
    parser: argparse._ActionsContainer,
    kind: type[Any],
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    flags: Mapping[str, str] | None = None,
) -> None:
    """A flag for each field of ``kind``, or for ``only`` some, explained by the first sentence of the field's doc.

    ``flags`` are those that are spelled differently than usual.
    """
    docs, hints, spelled = docs_of(kind), get_type_hints(kind), {**_FLAGS, **(flags or {})}
    for field in fields_of(kind):
        name = field.name
        if name in (*_WITHOUT_FLAG, *without) or (only is not None and name not in only):
            continue
        if name in _OF_THEIR_OWN:
            _OF_THEIR_OWN[name](parser)
            continue
        form = _form_of(hints[name])
        said = docs[name].partition(". ")[0].rstrip(".").replace("``", "")
        default = "" if field.default in (None, False) else f" (default: {field.default})"
        parser.add_argument(
            spelled.get(name, f"--{name.replace('_', '-')}"),
            dest=name,
            default=field.default,
            help=f"{form.prefix}{said}{default}".replace("%", "%%"),
            **form.arguments,
        )


def options_of(args: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """What the flags say, as keywords of the function. Raises InvalidArgument for a JSON file of another form."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in args}
    given = {name: _form_of(hint).read(getattr(args, name)) for name, hint in hints.items()}
    return given | ({"progress": not args.quiet} if "quiet" in args else {})


def _form_of(hint: Any) -> _Form:
    kinds = [one for one in get_args(hint) if one is not NoneType] if get_origin(hint) in (Union, UnionType) else [hint]
    origins = [get_origin(one) or one for one in kinds]
    if origins == [bool]:
        return _Form({"action": "store_true"})
    if origins == [int]:
        return _Form({"type": int, "metavar": "N"})
    if origins == [str]:
        return _Form({"metavar": "KEY"})
    if origins[0] is Literal:
        return _Form({"choices": get_args(kinds[0])})
    if origins == [Sequence]:
        names = partial(nested_lists, depth=str(hint).count("Sequence["))
        return _Form({"metavar": "FILE"}, "JSON: ", names)
    if get_args(kinds[0]) == (str, Partition):
        return _Form({"metavar": "FILE"}, 'JSON, such as {"NAME": {"partition_dim": 0}}: ', partitions_in)
    return _Form({"metavar": "SIZE" if int in origins else "NAME" if Mapping in origins else "PATH"})


def opening(args: argparse.Namespace, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keywords of :func:`open_checkpoint` that the flags say, and the options of the URL."""
    found = options_of(args, OpenOptions) | {"storage_options": options}
    found.pop("progress", None)
    return found
