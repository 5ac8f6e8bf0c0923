"""Damage to files."""

from pathlib import Path


def flip(file: Path, offset: int | None = None) -> None:
    """Change one bit: in the middle of the file, or at the offset, counted from its end if that is negative."""
    if offset is None:
        offset = file.stat().st_size // 2
    with file.open("r+b") as opened:
        opened.seek(offset, 0 if offset >= 0 else 2)
        [byte] = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 4]))
