"""File systems with only so much room left."""

import os
from contextlib import suppress
from pathlib import Path

FULL = "No space left on device"
PAGE = 4096


def pages_left(disk: Path, nbytes: int) -> None:
    """Fill the disk but for so many bytes."""
    free = os.statvfs(disk)
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:  # other processes write there, too
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - nbytes)))


def inodes_left(disk: Path, count: int) -> None:
    """Take all inodes but so many."""
    with suppress(OSError):  # other processes make files there, too
        for number in range(os.statvfs(disk).f_favail - count):
            (disk / f"empty-{number}").touch()
