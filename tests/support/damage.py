"""Damage to files."""

from __future__ import annotations

from pathlib import Path


def flip(file: Path, offset: int) -> None:
    """Change one bit, counted from the end of the file if the offset is negative."""
    with file.open("r+b") as opened:
        opened.seek(offset, 0 if offset >= 0 else 2)
        [byte] = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 4]))
