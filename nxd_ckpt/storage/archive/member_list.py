"""The list of members at the beginning of a packed archive, which spares readers a request per header.

It is the archive's first member, `NAME`: ``{"format_version": 1, "members": [[name, offset, bytes, time], ...]}`` in
order. An offset is that of the member's bytes, from the end of the list's own member on. Between the bytes of two
members there is one header and nothing else, and after the last one the archive's end: any other list is ignored. Each
member's header is compared with the list.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Iterable
from typing import Any, NamedTuple

from nxd_ckpt.core import document

NAME = ".nxd_ckpt/members.json"
LONGEST_HEADER = 2**20
"""Maximum bytes of a header: names and times need a few hundred, padding to pages up to 4096."""
END = 2 * tarfile.BLOCKSIZE
"""Minimum bytes of zeros at the end of an archive."""
_VERSION = 1


class Member(NamedTuple):
    """A file in the archive: the offset of its bytes, their number, and its time.

    ``header`` is the number of bytes of its header before them, if that was not compared yet; else 0.
    """

    offset: int
    nbytes: int
    time: float
    header: int = 0


def dump(members: Iterable[tuple[str, int, int, float]]) -> bytes:
    """Return the list of (name, offset, bytes, time) in the archive's form."""
    lines = document.array(map(document.plain, map(list, members)))
    return document.members({"format_version": str(_VERSION), "members": lines}).encode()


def load(data: bytes, begin: int, size: int) -> dict[str, Member]:
    """Return the members in a list, of an archive of ``size`` bytes whose list's own member ends at ``begin``.

    Raises ValueError if it is not such a list, or not of this archive.
    """
    members: dict[str, Member] = {}
    end = begin

    def add(line: Any) -> None:
        nonlocal end
        name, member = _member(line, begin, end)
        if name in members:
            raise ValueError(f"{name!r} twice")
        members[name] = member
        end = member.offset + member.nbytes + -member.nbytes % tarfile.BLOCKSIZE

    fields = document.read(data.decode(), {"members": add})
    if fields.get("format_version") != _VERSION or "members" not in fields or not members:
        raise ValueError(f"expected members, in format {_VERSION}")
    if end + END != size:
        raise ValueError(f"the archive has {size} bytes, expected {end + END}")
    return members


def _member(line: Any, begin: int, end: int) -> tuple[str, Member]:
    """Return one line of the list; the member before it ends at ``end``."""
    if type(line) is not list or [type(item) for item in line] != [str, int, int, float]:
        raise ValueError(f"expected [name, offset, bytes, time], found {line!r:.100}")
    name, offset, nbytes, time = line
    header = begin + offset - end
    if nbytes < 0 or header % tarfile.BLOCKSIZE or not 0 < header <= LONGEST_HEADER or not math.isfinite(time):
        raise ValueError(f"{name!r} cannot lie at byte {offset}")
    return name, Member(begin + offset, nbytes, time, header)


def is_header_of(header: bytes, name: str, member: Member) -> bool:
    """Return whether ``header``, the bytes before a member's own, is that of the file ``name``, with the list's length.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(header), mode="r:") as archive:
            info = archive.next()
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError):
        return False
    if info is None or not info.isreg() or info.issparse():
        return False
    actual = (info.name.removeprefix("./"), info.offset_data, info.size, float(info.mtime))
    return actual == (name, len(header), member.nbytes, member.time)
