"""The list of members that a packed archive begins with, so that readers need not go from header to header, one request
each.

It is the archive's first member, `NAME`: ``{"format_version": 1, "members": [[name, offset, bytes, time], ...]}``
in order. An offset is that of the member's bytes, from the end of the list's own member on. Between the bytes of one
member and those of the next there is a header and nothing else, and behind the last one the archive's end: a list that
says otherwise is none, and what it says of a member is compared with that member's header.
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
"""Bytes that a header may have: names and times need a few hundred, padding to pages up to 4096."""
END = 2 * tarfile.BLOCKSIZE
"""Bytes of zeros that an archive ends with, at least."""
_VERSION = 1


class Member(NamedTuple):
    """A file in the archive: where its bytes begin, how many there are, and its time.

    ``header`` are the bytes before those that its header takes, if it was not compared yet; else 0.
    """

    offset: int
    nbytes: int
    time: float
    header: int = 0


def dump(members: Iterable[tuple[str, int, int, float]]) -> bytes:
    """The list of (name, offset, bytes, time), as the archive holds it."""
    lines = document.array(map(document.plain, map(list, members)))
    return document.members({"format_version": str(_VERSION), "members": lines}).encode()


def load(data: bytes, begin: int, size: int) -> dict[str, Member]:
    """The members that a list names, of an archive of ``size`` bytes whose list's own member ends at ``begin``.

    Raises ValueError if it is not such a list, or not of this archive.
    """
    found: dict[str, Member] = {}
    end = begin

    def add(line: Any) -> None:
        nonlocal end
        name, member = _member(line, begin, end)
        if name in found:
            raise ValueError(f"{name!r} twice")
        found[name] = member
        end = member.offset + member.nbytes + -member.nbytes % tarfile.BLOCKSIZE

    given = document.read(data.decode(), {"members": add})
    if given.get("format_version") != _VERSION or "members" not in given or not found:
        raise ValueError(f"expected members, in format {_VERSION}")
    if end + END != size:
        raise ValueError(f"the archive has {size} bytes, expected {end + END}")
    return found


def _member(line: Any, begin: int, end: int) -> tuple[str, Member]:
    """One line of the list; what came before it ends at ``end``."""
    if type(line) is not list or [type(item) for item in line] != [str, int, int, float]:
        raise ValueError(f"expected [name, offset, bytes, time], found {line!r:.100}")
    name, offset, nbytes, time = line
    header = begin + offset - end
    if nbytes < 0 or header % tarfile.BLOCKSIZE or not 0 < header <= LONGEST_HEADER or not math.isfinite(time):
        raise ValueError(f"{name!r} cannot lie at byte {offset}")
    return name, Member(begin + offset, nbytes, time, header)


def is_header_of(header: bytes, name: str, member: Member) -> bool:
    """Whether ``header``, the bytes before a member's own, is that of the file ``name``, as long as the list says."""
    try:
        with tarfile.open(fileobj=io.BytesIO(header), mode="r:") as archive:
            info = archive.next()
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError):
        return False
    if info is None or not info.isreg() or info.issparse():
        return False
    found = (info.name.removeprefix("./"), info.offset_data, info.size, float(info.mtime))
    return found == (name, len(header), member.nbytes, member.time)
