"""One of the files that a tag consists of, as a copy sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.tag.verify import Digested


@dataclass(frozen=True)
class TagFile:
    """One file of a tag. ``entry`` is what the tag's indexes say of it; None where they say nothing.

    ``inside`` are the digests that a file of neuronx_distributed's carries itself.
    """

    name: str
    nbytes: int
    entry: FileEntry | None = None
    inside: tuple[Digested, ...] = field(default=(), repr=False)

    @property
    def records(self) -> dict[int, int]:
        """The bytes of each record that has a digest, by its offset."""
        return {record.offset: record.nbytes for record in self.inside}
