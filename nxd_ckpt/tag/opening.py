"""Opening of a complete tag: which of the layouts it has, and whether its parts belong together."""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress

from nxd_ckpt.core import names
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CorruptCheckpoint, MalformedFile, TagReplaced
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.nxd_tag import layout_of
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.identity import Identity, is_written_over, manifest_of, recorded_order_time
from nxd_ckpt.tag.opened import OpenTag


def open_complete_tag(storage: Storage, tag: str, *, trust_pickle: bool = False) -> OpenTag:
    """Open a tag that `nxd_ckpt.tag.choosing` chose.

    Raises:
        CorruptCheckpoint: its manifest is damaged, or only one of manifest and index exists.
        TagReplaced: it was removed since it was chosen, perhaps to be saved again.
    """
    identity = Identity(storage, tag)
    with identity.guarded():
        identity.must_be(identity.fingerprint)
        files = TagFiles(storage, tag, trust_pickle=trust_pickle)
        with suppress(FileNotFoundError, MalformedFile):  # which the look at all of the tag explains
            if identity.names_attempt and identity.is_of(manifest := manifest_of(storage, tag)):
                opened = OpenTag(storage, tag, layout_of(files, manifest), manifest, identity)
                opened.is_one_save = True
                return opened
        opened = _open(storage, tag, identity, files)
        identity.require()  # else its manifest may be that of the next save
        return opened


def _open(storage: Storage, tag: str, identity: Identity, files: TagFiles) -> OpenTag:
    where = f"{storage.url}/{tag}"
    listed = files.names().keys()
    if tag and not storage.renames and _is_in_flux(listed):
        # File systems rename whole tags. In a store, one that is being emptied or written must not look foreign.
        raise TagReplaced(f"{where} was removed, or is being replaced, since it was looked up")
    manifest = None
    if names.MANIFEST in listed:
        try:
            manifest = manifest_of(storage, tag)
        except FileNotFoundError as error:
            raise TagReplaced(f"{where} was removed, or is being replaced, while it was read") from error
        if is_written_over(storage, tag, manifest):
            logger.warning(
                "%s/%s: its %r marker is not that of its manifest: another program saved over it. Reading it as a "
                "plain neuronx_distributed checkpoint, without its index",
                storage.url,
                tag,
                names.DONE,
            )
            manifest = None
        elif names.INDEX_DIR not in listed:
            raise _part_lost(f"{where}/{names.INDEX_DIR}/", left=names.MANIFEST)
    elif tag and names.INDEX_DIR in listed:
        raise _part_lost(f"{where}/{names.MANIFEST}", left=f"{names.INDEX_DIR}/")
    elif names.DONE in listed and recorded_order_time(storage, tag) is not None:
        logger.warning(
            "%s has neither %s nor %s/, but nxd_ckpt wrote its %r marker: the tag lost them. It is read as a plain "
            "neuronx_distributed checkpoint: whether all its files exist, and belong to one save, is unknown. Restore "
            "the tag from a copy, or load another one",
            where,
            names.MANIFEST,
            names.INDEX_DIR,
            names.DONE,
        )
    return OpenTag(storage, tag, layout_of(files, manifest), manifest, identity)


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
