"""Opening one complete tag: whose it is, and whether its files are those that its manifest names."""

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
    """Open a tag that was chosen (:mod:`nxd_ckpt.tag.choosing`).

    Raises:
        CorruptCheckpoint: its manifest is damaged, or of manifest and index one is there and the other is not.
        TagReplaced: it was removed since it was chosen, perhaps to be saved anew.
    """
    identity = Identity(storage, tag)
    with identity.kept():
        identity.must_be(identity.word)
        opened = _open(storage, tag, identity, trust_pickle)
        identity.require()  # else its manifest may be that of the next save
        return opened


def _open(storage: Storage, tag: str, identity: Identity, trust_pickle: bool) -> OpenTag:
    where = f"{storage.url}/{tag}"
    listed = {entry.name for entry in storage.list(tag)}
    if tag and not storage.renames and _is_in_flux(listed):
        # Elsewhere a tag goes as a whole. Here one that is emptied or written anew must not pass for a foreign one.
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
            raise _lost(f"{where}/{names.INDEX_DIR}/", left=names.MANIFEST)
    elif tag and names.INDEX_DIR in listed:
        raise _lost(f"{where}/{names.MANIFEST}", left=f"{names.INDEX_DIR}/")
    elif (file := file_of_ours(storage, tag)) is not None:
        logger.warning(
            "%s has neither %s nor %s/, but %s is of a save of ours: the tag lost them. It is read as what "
            "neuronx_distributed writes: nothing tells whether all its files are there, and of one save. Restore the "
            "tag from a copy, or load another one",
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


def _lost(where: str, left: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{where} is missing, though there is {left}: the tag lost files, and nothing verifies the others. Restore it "
        f"from a copy; or, to read it as what neuronx_distributed writes, with only the digests inside its files, "
        f"remove {left} too"
    )


def _is_in_flux(listed: Set[str]) -> bool:
    """Whether a tag in a store is being emptied or written: ``done``, which begins the one and ends the other, is gone.

    Tags of neuronx_distributed 0.6 have no ``done``, but no ``checkpoint`` either.
    """
    return names.DONE not in listed and (not listed or bool(listed & {names.MARKER, names.INDEX_DIR, names.MANIFEST}))

