"""The boundary of every parser: whatever a damaged or hostile file provokes comes out as an error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nxd_ckpt.errors import CheckpointError, HostExhausted, MalformedFile
from nxd_ckpt.gc_paused import gc_paused

_LONGEST = 300


@contextmanager
def parsing(where: str, what: str) -> Iterator[None]:
    """Around everything that reads ``where``, which should be ``what`` ("a torch file").

    Garbage is left where it is until the end: what parsers make is kept, and there may be much of it.
    Our own errors pass, and so do those of the storage (OSError, EOFError): they are not about what the bytes say.

    Raises:
        MalformedFile: whatever else was raised, nesting too deep for Python included.
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
        # Parsers are fed with anything: a list of what they may raise would never be complete.
        found = f"{type(error).__name__}: {error}"[:_LONGEST]
        raise MalformedFile(f"{where}: not {what} ({found}). Restore the file, or load another one") from error
