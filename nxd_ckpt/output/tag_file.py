"""One of a tag's files, for a copy."""

from __future__ import annotations

from dataclasses import dataclass, field

from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.tag.verify import Digested


@dataclass(frozen=True)
class TagFile:
    """One file of a tag.

    ``entry`` is its entry in the tag's indexes, or None. ``inside`` are the digests inside a file of
    neuronx_distributed.
    """

    name: str
    nbytes: int
    entry: FileEntry | None = None
    inside: tuple[Digested, ...] = field(default=(), repr=False)

    @property
    def records(self) -> dict[int, int]:
        """Bytes of each record with a digest, by its offset."""
        return {record.offset: record.nbytes for record in self.inside}
