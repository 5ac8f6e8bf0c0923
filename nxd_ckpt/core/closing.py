"""Objects that are closed where a ``with`` block ends."""

from __future__ import annotations

from types import TracebackType

from typing_extensions import Self


class Closing:
    """To be closed, or used as a context manager."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
