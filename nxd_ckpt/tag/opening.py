"""Opening one complete tag: who wrote it, and whether its files are those of its manifest."""

from __future__ import annotations

import logging
from collections.abc import Set

from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import Manifest, load_manifest
from nxd_ckpt.errors import CorruptCheckpoint, TagReplaced
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.identity import Identity
from nxd_ckpt.tag.nxd_tag import open_tag
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.order import file_of_ours, is_written_over

logger = logging.getLogger("nxd_ckpt")


def open_complete_tag(storage: Storage, tag: str, *, trust_pickle: bool = False) -> OpenTag:
    """Open a tag that `nxd_ckpt.tag.choosing` chose.

    Raises:
        CorruptCheckpoint: its manifest is damaged, or only one of manifest and index exists.
        TagReplaced: it was removed since it was chosen, perhaps to be saved again.
    """
    identity = Identity(storage, tag)
    with identity.guarded():
        identity.must_be(identity.fingerprint)
        opened = _open(storage, tag, identity, trust_pickle)
        identity.require()  # else its manifest may be that of the next save
        return opened


def _open(storage: Storage, tag: str, identity: Identity, trust_pickle: bool) -> OpenTag:
    where = f"{storage.url}/{tag}"
    listed = {entry.name for entry in storage.list(tag)}
    if tag and not storage.renames and _is_in_flux(listed):
        # File systems rename whole tags. In a store, one that is being emptied or written must not look foreign.
        raise TagReplaced(f"{where} was removed, or is being replaced, since it was looked up")
    manifest = None
    if names.MANIFEST in listed:
        manifest = _manifest(storage, tag)
        if is_written_over(storage, tag, manifest):
            logger.warning(
                "%s/%s: the files are not those of its manifest, and neither is its %r marker: another program saved "
                "over it. Reading it as a plain neuronx_distributed checkpoint, without its index",
                storage.url,
                tag,
                names.DONE,
            )
            manifest = None
        elif names.INDEX_DIR not in listed:
            raise _part_lost(f"{where}/{names.INDEX_DIR}/", left=names.MANIFEST)
    elif tag and names.INDEX_DIR in listed:
        raise _part_lost(f"{where}/{names.MANIFEST}", left=f"{names.INDEX_DIR}/")
    elif (file := file_of_ours(storage, tag)) is not None:
        logger.warning(
            "%s has neither %s nor %s/, but nxd_ckpt wrote %s: the tag lost them. It is read as a plain "
            "neuronx_distributed checkpoint: whether all its files exist, and belong to one save, is unknown. Restore "
            "the tag from a copy, or load another one",
            where,
            names.MANIFEST,
            names.INDEX_DIR,
            file,
        )
    topology = None if manifest is None else manifest.topology
    layout = open_tag(storage, tag, topology=topology, trust_pickle=trust_pickle)
    return OpenTag(storage, tag, layout, manifest, identity)


def _manifest(storage: Storage, tag: str) -> Manifest:
    key = f"{tag}/{names.MANIFEST}" if tag else names.MANIFEST
    try:
        return load_manifest(storage.read(key), f"{storage.url}/{key}")
    except FileNotFoundError as error:
        raise TagReplaced(f"{storage.url}/{tag} was removed, or is being replaced, while it was read") from error


def _part_lost(where: str, left: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{where} is missing, but {left} exists: the tag lost files, and the others cannot be verified. Restore it "
        f"from a copy. To read it as a plain neuronx_distributed checkpoint, with only the digests inside its files, "
        f"remove {left} too"
    )


def _is_in_flux(listed: Set[str]) -> bool:
    """Return whether a tag in a store is being emptied or written.

    ``done``, the first removed and last written, is gone.

    Tags of neuronx_distributed 0.6 have no ``done``, but no ``checkpoint`` either.
    """
    return names.DONE not in listed and (not listed or bool(listed & {names.MARKER, names.INDEX_DIR, names.MANIFEST}))
