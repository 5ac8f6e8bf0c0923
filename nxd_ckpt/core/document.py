"""Parsing of what comes from disk: JSON in which nothing means two things, and the boundary of every parser."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nxd_ckpt.core.limits import shown
from nxd_ckpt.core.other_files import instead_of_json
from nxd_ckpt.errors import CheckpointError, HostExhausted, MalformedFile, UnreadableFormat
from nxd_ckpt.gc_paused import gc_paused

plain: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=dict).encode
"""Return any plain value as JSON; a mapping of any kind counts as a dict.

Raises ValueError for NaN and infinity, which JSON does not have.
"""


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
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} is there twice")
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


_LONGEST = 300


@contextmanager
def parsing(where: str, what: str) -> Iterator[None]:
    """Wrap the parsing of ``where``, which should be ``what`` ("a torch file").

    Garbage collection pauses: parsers keep what they make, and it may be much. Errors of this package, and of the
    storage (OSError, EOFError), pass: they are not about the contents.

    Raises:
        MalformedFile: any other error, also nesting that is too deep for Python.
        HostExhausted: there was no memory left.
    """
    try:
        with gc_paused():
            yield
    except (CheckpointError, OSError, EOFError):
        raise
    except MemoryError as error:
        raise HostExhausted(
            f"{where}: the host has no memory left to read it; free some, or raise the limit (ulimit -v)"
        ) from error
    except Exception as error:
        # Hostile input can make parsers raise anything; a list of exceptions would never be complete.
        cause = f"{type(error).__name__}: {error}"[:_LONGEST]
        raise MalformedFile(f"{where}: not {what} ({cause}). Restore the file, or load another one") from error


@contextmanager
def as_written() -> Iterator[None]:
    """Context of parsing bytes that are those that were written, by their digest: what is refused is not damage."""
    try:
        yield
    except UnreadableFormat:
        raise
    except MalformedFile as error:
        raise UnreadableFormat(
            f"{error}. It cannot be read by this version of nxd_ckpt, but its bytes are those that were written"
        ) from error
