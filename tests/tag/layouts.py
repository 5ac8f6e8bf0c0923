"""The layout of a tag, in one call."""

from dataclasses import replace

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.nxd_tag import TagLayout, layout_of
from tests.core.documents import MANIFEST


def open_tag(
    storage: Storage, tag: str = "", *, topology: Topology | None = None, trust_pickle: bool = False
) -> TagLayout:
    """The layout of ``tag``, or of the storage's root itself for ``""``; with a ``topology`` as of a manifest's."""
    manifest = None if topology is None else replace(MANIFEST, topology=topology)
    return layout_of(TagFiles(storage, tag, trust_pickle=trust_pickle), manifest)
