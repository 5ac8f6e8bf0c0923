"""``--storage-option KEY=VALUE``: what a store is opened with. Values may be secrets: no message shows one."""

from __future__ import annotations

import argparse
import json
from typing import Any

Option = tuple[list[str], Any]


def add_storage_option(parser: argparse._ActionsContainer) -> None:
    """The option itself. Its value is one mapping, nested as the keys say, or None."""
    _add(
        parser,
        "--storage-option",
        "what a URL is opened with, as fsspec and s3fs call it; again for more, dots in KEY for what is nested: "
        "client_kwargs.region_name=us-west-2",
    )


def add_output_option(parser: argparse._ActionsContainer) -> None:
    """The same for an output in another place."""
    _add(parser, "--output-option", "the same for the output alone, in place of all --storage-option")


def _add(parser: argparse._ActionsContainer, flag: str, about: str) -> None:
    keyword = f"{flag[2:].replace('-', '_')}s"
    parser.add_argument(flag, dest=keyword, metavar="KEY=VALUE", type=_option, action=_Nest, help=about)


class _Nest(argparse.Action):
    """Puts one more option into the mapping."""

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


def _option(text: str) -> Option:
    key, found, value = text.partition("=")
    keys = key.split(".")
    if not found or not all(keys):
        raise argparse.ArgumentTypeError("expected KEY=VALUE")
    return keys, _value(value)


def _value(text: str) -> Any:
    """What JSON calls true, false, null, a number, or a string in quotes; anything else is a string as it stands."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, (list, dict)) else value
