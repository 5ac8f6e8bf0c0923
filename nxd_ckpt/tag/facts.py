"""Facts about tags that this process has learned, kept as long as the tags are provably the same.

To list 10,000 tags again, each is only looked at: nothing of it is read. A `Stamping` storage tells by a stamp whether
the names in a tag's directory, its manifest and its markers are those of before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from nxd_ckpt import effects
from nxd_ckpt.core.names import DONE, MANIFEST, MARKER
from nxd_ckpt.storage.base import Stamping, Storage

T = TypeVar("T")

_TAGS = 2**14
"""Maximum number of tags with facts: each takes one to three KiB."""


def recalled(storage: Storage, tag: str, kind: str, learn: Callable[[], T], lasts: Callable[[T], bool]) -> T:
    """Return ``learn()``, or an earlier result of this ``kind``: one that ``lasts``, while the tag is the same.

    Results are shared, and nobody may change them.
    """
    stamp = stamp_of(storage, tag)
    if stamp is None:
        return learn()
    learned = facts.get(storage.url, tag, stamp)
    if kind in learned:
        fact: T = learned[kind]
        return fact
    fact = learn()
    if lasts(fact) and stamp_of(storage, tag) == stamp:
        facts.put(storage.url, tag, stamp, kind, fact)
    return fact


def fact_of(storage: Storage, tag: str, kind: str) -> Any:
    """Return the fact of that kind that was learned of the tag; None if there is none, or the tag is another by now."""
    stamp = stamp_of(storage, tag)
    return None if stamp is None else facts.get(storage.url, tag, stamp).get(kind)


def stamp_of(storage: Storage, tag: str, files: Sequence[str] = (DONE, MANIFEST, MARKER)) -> Hashable | None:
    """Return the stamp of a tag, or of other files of it; None if it is not known."""
    return storage.stamp(tag, files) if tag and isinstance(storage, Stamping) else None


class _Facts:
    """Facts by process and place, with the stamp that they belong to. The oldest places make room for others."""

    def __init__(self) -> None:
        self._lock = effects.Lock()
        self.clear()

    def clear(self) -> None:
        self._places = dict[tuple[int, str, str], tuple[Hashable, dict[str, Any]]]()

    def get(self, url: str, tag: str, stamp: Hashable) -> dict[str, Any]:
        """Return the facts of a tag by their kinds: none, if it has another stamp by now."""
        before, learned = self._places.get((effects.pid(), url, tag), (None, {}))
        return learned if before == stamp else {}

    def put(self, url: str, tag: str, stamp: Hashable, kind: str, fact: Any) -> None:
        with self._lock:
            learned = {**self.get(url, tag, stamp), kind: fact}
            place = effects.pid(), url, tag
            self._places.pop(place, None)
            self._places[place] = stamp, learned
            while len(self._places) > _TAGS:
                del self._places[next(iter(self._places))]


facts = _Facts()
"""Of this process."""
