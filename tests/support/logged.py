"""What a rank logs, in a process that pytest's ``caplog`` does not reach."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Within, messages of the package from this level on are appended to the list."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nxd_ckpt").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("nxd_ckpt").removeHandler(handler)
