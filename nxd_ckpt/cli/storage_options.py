"""``--storage-option KEY=VALUE``: what a store is opened with. Values may be secrets: no message shows one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

Option = tuple[Sequence[str], Any]


def add_storage_options(parser: argparse.ArgumentParser, *, output: bool = False) -> None:
    """The option itself; with ``output`` also ``--output-option``, for commands that write to another place."""
    parser.add_argument(
        "--storage-option",
        metavar="KEY=VALUE",
        type=_option,
        action="append",
        help="what a URL is opened with, as fsspec and s3fs call it; again for more, dots in KEY for what is nested: "
        "client_kwargs.region_name=us-west-2",
    )
    if output:
        parser.add_argument(
            "--output-option",
            metavar="KEY=VALUE",
            type=_option,
            action="append",
            help="the same for the output alone, in place of all --storage-option",
        )


def nested(options: Sequence[Option] | None) -> dict[str, Any] | None:
    """The options as one mapping, nested as their keys say; None without any.

    Raises argparse.ArgumentTypeError where a key is both a value and a mapping.
    """
    if options is None:
        return None
    whole: dict[str, Any] = {}
    for keys, value in options:
        inner = whole
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise argparse.ArgumentTypeError(f"{'.'.join(keys)}: {key} has a value of its own")
        inner[keys[-1]] = value
    return whole


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
