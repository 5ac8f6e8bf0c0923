"""The boundary of every parser: each error from a damaged or hostile file becomes one that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nxd_ckpt.errors import CheckpointError, HostExhausted, MalformedFile, UnreadableFormat
from nxd_ckpt.gc_paused import gc_paused

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
