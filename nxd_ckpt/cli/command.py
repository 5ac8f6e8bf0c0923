"""A command of ``nxd-ckpt`` as a declaration, and its flags: one for each field of its function's options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from nxd_ckpt.core.option_classes import fields_of
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.units import ShardSize, Size
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from nxd_ckpt.options.execution import BLANK, OpenOptions

if TYPE_CHECKING:
    from nxd_ckpt.tag.listing import Options

_FLAGS = {
    "use_safetensors": "--safetensors",
    "unshard_strategy": "--strategy",
}
"""Flags that are not named after their keyword."""

_ALIASES = {"saved_param_names": "--param-names", "hardware": "--hw-backend"}
"""Other names of flags, for scripts that use them; help does not show them."""

TEMPLATES = ("--partitions", "--saved-param-names")
"""Flags whose files ``inspect`` makes templates of."""

_PARTITIONS = 'JSON, such as {"NAME": {"partition_dim": 0, "num_partitions": 2}}: '

_WITHOUT_FLAG = ("durable", "timeout", "trust_pickle")


class _Form(NamedTuple):
    """Command-line form of a type: arguments for argparse, a prefix for the help, and a conversion of the value."""

    arguments: Mapping[str, Any]
    prefix: str = ""
    read: Callable[[Any], Any] = lambda value: value


def add_options(
    parser: argparse._ActionsContainer,
    kind: type[Any],
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    flags: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each field of ``kind`` (or of ``only``), explained by the first sentence of its help.

    ``flags`` overrides the usual spelling.
    """
    hints = get_type_hints(kind, include_extras=True)
    spelled = {**_FLAGS, **(flags or {})}
    for entry in fields_of(kind):
        name = entry.name
        if name in (*_WITHOUT_FLAG, *without) or (only is not None and name not in only):
            continue
        if name in _NESTED:
            _add_nested(parser, name)
            continue
        if name == "progress":
            _add_quiet(parser)
            continue
        form = _form_of(hints[name])
        meaning = entry.metadata["help"].partition(". ")[0].rstrip(".").replace("``", "")
        default = "" if entry.default in (None, False, "") else f" (default: {entry.default})"
        parser.add_argument(
            spelled.get(name, f"--{name.replace('_', '-')}"),
            dest=name,
            default=entry.default,
            help=f"{form.prefix}{meaning}{default}".replace("%", "%%"),
            **form.arguments,
        )
        if name in _ALIASES and name not in spelled:
            add_alias(parser, _ALIASES[name], name, **form.arguments)


def add_alias(parser: argparse._ActionsContainer, flag: str, dest: str, **arguments: Any) -> None:
    """Add another name of the flag whose value is ``dest``, which help does not show."""
    parser.add_argument(flag, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **arguments)


def options_of(args: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Return the flags' values as keywords of the function. Raises InvalidArgument for a malformed JSON file."""
    hints = {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if name in args}
    values = {name: getattr(args, name) for name in hints}
    options = {name: None if value is None else _form_of(hints[name]).read(value) for name, value in values.items()}
    return options | ({"progress": not args.quiet} if "quiet" in args else {})


def _form_of(hint: Any) -> _Form:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if Size in members or ShardSize in members:
        return _Form({"metavar": "SIZE"})
    kinds = [get_args(one)[0] if get_origin(one) is Annotated else one for one in members if one is not NoneType]
    origins = [get_origin(member) or member for member in kinds]
    if origins == [bool]:
        return _Form({"action": "store_true"})
    if origins == [int]:
        return _Form({"type": int, "metavar": "N"})
    if origins == [str]:
        return _Form({"metavar": "KEY"})
    if origins[0] is Literal:
        return _Form({"choices": get_args(kinds[0])})
    if origins == [Sequence]:
        names = partial(_nested_lists, depth=str(hint).count("Sequence["))
        return _Form({"metavar": "FILE"}, "JSON: ", names)
    if get_args(kinds[0]) == (str, Partition):
        return _Form({"metavar": "FILE"}, _PARTITIONS, _partitions_in)
    if get_args(kinds[0]) == (str, str):
        return _Form({"metavar": "FILE"}, 'JSON, such as {"NAME": "NAME"}: ', _json)
    return _Form({"metavar": "NAME" if Mapping in origins else "PATH"})


def located(path: str, args: argparse.Namespace) -> tuple[str, str | None, Options]:
    """Return the directory or URL of a tag, the tag if ``path`` names one, and the storage options for it."""
    from nxd_ckpt.storage.urls import options_for
    from nxd_ckpt.tag.listing import locate

    options = options_for(path, args.storage_options)
    return *locate(path, None, options), options


def opening(args: argparse.Namespace, options: Options) -> dict[str, Any]:
    """Return the flags' values and the URL's options as keywords of `open_checkpoint`."""
    keywords = options_of(args, OpenOptions) | {"storage_options": options}
    keywords.pop("progress", None)
    return keywords


_NESTED = {
    "storage_options": "storage option for URLs, named as in fsspec and s3fs; repeatable; use a.b for nested keys, for "
    "example client_kwargs.region_name=us-west-2",
    "output_options": "storage option for the output only, instead of every --storage-option",
}
"""Options that are one mapping, nested by the dots in its keys. Values may be secrets: no message shows one."""


def _add_nested(parser: argparse._ActionsContainer, keyword: str) -> None:
    flag = f"--{keyword.removesuffix('s').replace('_', '-')}"
    about = _NESTED[keyword]
    parser.add_argument(flag, dest=keyword, metavar="KEY=VALUE", type=_option, action=_Nest, help=about)


def _add_quiet(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress, and say nothing if all is well")


class _Nest(argparse.Action):
    """Action that puts one more option into the mapping."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        keys, value = values
        whole = getattr(namespace, self.dest) or {}
        inner = whole
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise argparse.ArgumentError(self, f"{'.'.join(keys)}: {key} has a value of its own")
        inner[keys[-1]] = value
        setattr(namespace, self.dest, whole)


def _option(text: str) -> tuple[list[str], Any]:
    key, separator, value = text.partition("=")
    keys = key.split(".")
    if not separator or not all(keys):
        raise argparse.ArgumentTypeError("expected KEY=VALUE")
    return keys, _value(value)


def _value(text: str) -> Any:
    """Parse true, false, null, a number or a quoted string as JSON; return anything else as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, (list, dict)) else value


def _partitions_in(path: str) -> dict[str, Partition]:
    """Read parameters' partitions by name from a JSON file. Raises InvalidArgument if it is malformed."""
    document = _json(path)
    if not isinstance(document, dict) or not all(isinstance(cut, dict) for cut in document.values()):
        raise InvalidArgument(f'{path}: expected {{"name": {{"partition_dim": 0, "num_partitions": 2}}, ...}}')
    partitions = {}
    field_names = [field.name for field in fields(Partition)]
    for name, entry in document.items():
        shape = entry.get("local_shape")
        cut = {field: value for field, value in entry.items() if field != "local_shape"}
        if BLANK in cut.values():
            raise InvalidArgument(
                f"{path}: {name}: partition_dim is still {BLANK!r}: fill in the dimension that is cut, counted from 0"
                f"{'' if shape is None else f' (each rank has the shape {shape})'}, or write {{}} for a parameter that "
                "every rank has whole"
            )
        unknown = [field for field in cut if field not in field_names]
        if unknown:
            raise InvalidArgument(f"{path}: {name}: {listed(unknown, field_names)} is no field of a partition")
        try:
            partitions[name] = Partition.from_json(cut)
        except CheckpointError as error:
            raise InvalidArgument(f"{path}: {name}: {error.__cause__ or error}") from error
    return partitions


def _nested_lists(path: str, depth: int) -> Any:
    """Read lists of names, nested ``depth`` deep, from a JSON file."""

    def fits(value: Any, depth: int) -> bool:
        if depth == 0:
            return isinstance(value, str)
        return isinstance(value, list) and all(fits(item, depth - 1) for item in value)

    document = _json(path)
    if not fits(document, depth):
        raise InvalidArgument(f'{path}: expected names in lists nested {depth} deep, such as {"[" * depth}"name", ...')
    return document


def _json(path: str) -> Any:
    """Read a JSON file; the function that takes its value checks it."""
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read as JSON: {error}") from error


@dataclass(frozen=True)
class Command:
    """A command: its words, its arguments, and the function that runs it.

    Attributes:
        name: the word on the command line.
        example: a command line that it takes.
        summary: a phrase for the list of commands.
        description: whole sentences for its help.
        run: does the work and returns the exit code. It imports what it needs itself, so that ``--help`` does not wait
            for torch. Errors of nxd_ckpt and of the operating system are left to `nxd_ckpt.cli.main.main`.
        operands: name and help of each positional argument; one whose name ends in "?" may be left out, one in "*"
            also repeated.
        switches: flags that only this command has, with their help.
        add_flags: adds its other flags.
        options: the option class of its function: a flag for each field. Without one, there is --storage-option only.
        without: fields of ``options`` without a flag.
        spelling: flags of ``options`` with another name than usual.
        other_names: flags of other programs, or of Python, each with the flag that takes its place.
        quiet: add --quiet.
        code_of_error: the exit code for an error.
    """

    name: str
    example: str
    summary: str
    description: str
    run: Callable[[argparse.Namespace], int]
    operands: Sequence[tuple[str, str]] = ()
    switches: Mapping[str, str] = field(default_factory=dict)
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None
    options: type[Any] | None = None
    without: Collection[str] = ()
    spelling: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    quiet: bool = False
    code_of_error: int = 1

    @property
    def usage(self) -> str:
        """The line that shows the order of its words; the flags are listed below it."""
        operands = (f"[{name.rstrip('?*')}]" if name.endswith(("?", "*")) else name for name, _ in self.operands)
        return " ".join(("%(prog)s [options]", *operands))

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add all arguments of the command to its parser."""
        for operand, about in self.operands:
            name = operand.rstrip("?*")
            parser.add_argument(name.lower(), metavar=name, nargs=operand.removeprefix(name) or None, help=about)
        for flag, about in self.switches.items():
            parser.add_argument(flag, action="store_true", help=about)
        if self.add_flags is not None:
            self.add_flags(parser)
        if self.options is None:
            _add_nested(parser, "storage_options")
        else:
            add_options(parser, self.options, without=self.without, flags=self.spelling)
        if self.quiet:
            _add_quiet(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
        parser.set_defaults(command=self)
