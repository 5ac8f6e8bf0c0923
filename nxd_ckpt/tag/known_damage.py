"""Damage that this process has found by reading tags: retention, which reads no tensor, does not count these tags.

It is found by any load, verification or drain here, through whatever storage object, so it is kept for the whole
process, by the tag's place. It belongs to one save: another save of that name has another fingerprint.
"""

from __future__ import annotations

from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.identity import Identity

_damage: dict[tuple[str, str], tuple[str, str]] = {}
"""The fingerprint of a damaged save, and a sentence about the damage, by URL and tag."""


def note_damage(storage: Storage, identity: Identity | None, why: str | None) -> None:
    """Record damage of the save with this identity in ``storage``, a sentence; None forgets it: all bytes are right."""
    if identity is None:
        return
    place = storage.url, identity.tag
    if why is None:
        _damage.pop(place, None)
    elif identity.fingerprint is not None:
        _damage[place] = identity.fingerprint, why


def is_noted(storage: Storage, tag: str) -> bool:
    """Return whether damage of any save of that name is recorded."""
    return (storage.url, tag) in _damage


def known_damage(storage: Storage, identity: Identity | None) -> str | None:
    """Return the recorded damage of this very save; None if there is none."""
    if identity is None:
        return None
    fingerprint, why = _damage.get((storage.url, identity.tag), (None, ""))
    return why if fingerprint is not None and fingerprint == identity.fingerprint else None
