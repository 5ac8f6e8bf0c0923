"""Notes of a change to a tag that is under way, by which the next process finishes or undoes it: journal and intents.

A new tag is one atomic rename. Replacing a tag takes two steps, so the swap is announced in a journal first: it has the
names. The next process that opens or lists the directory after a crash settles it. Files of others move from the old
tag to the new one before the journal goes, see coordination.guests.

Where the file system can exchange two names, one of the two has the name at every instant. Elsewhere it takes two
renames (the old one out, the new one in). A process that finds them interrupted finishes them:

=====================  ==================================================
names that exist       state, and what `Replacement.settle` does
=====================  ==================================================
target and finished    the old one or the new one is in place: nothing
finished               the old one is out: put the new one in
target                 the new one is in: nothing
neither                the new one is lost: put the old one back
=====================  ==================================================

Without renames a tag is filled, and emptied, one key after the other. So a small file, an *intent*, names the tag
before that begins, and is removed when it is finished: in ``staging`` for a save, in ``trash`` for a removal. A job
that finds a dead job's intent looks for the tag's ``done``. If it is there, and of the attempt that filled the tag, the
tag is complete: the save was committed, or its removal had not begun. If not, everything in the tag is removed, except
files of others in a tag that was being filled. On a file system a directory has the same name, with the files of a
future or former tag; `clear` removes either.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from nxd_ckpt import effects
from nxd_ckpt.coordination import guests
from nxd_ckpt.coordination.control_files import (
    COPIES,
    JOURNAL,
    STAGING,
    TRASH,
    UNFINISHED,
    guests_dir,
    is_trash_of,
    meant_by,
    outcome_file,
    pinned,
    read_note,
    set_aside,
    staging_dir,
    trash_file,
    unfinished_dir,
)
from nxd_ckpt.core.limits import NOTE, checked_name
from nxd_ckpt.core.manifest import load_manifest
from nxd_ckpt.core.names import DONE, HIDDEN, MANIFEST, MARKER
from nxd_ckpt.core.tags import order_text, validate_tag
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import DirectoryInUse, MalformedFile, OutcomeUnknown
from nxd_ckpt.storage.base import Storage


class Replacement:
    """The move of ``finished`` to the name ``target``, whose old content is then called ``aside``. All are keys.

    Nothing here makes names durable: that is for the caller, before it relies on them.
    """

    def __init__(self, storage: Storage, finished: str, target: str, aside: str) -> None:
        self.storage: Storage = storage
        self.finished: str = finished
        self.target: str = target
        self.aside: str = aside
        self._is_made = self._replaces = False

    def make(self, replaces: bool | None = None) -> None:
        """Replace. Raises OSError; then call `restore`.

        ``replaces`` says whether there is something to replace; None looks.
        """
        storage = self.storage
        self._replaces = self.is_there(self.target) if replaces is None else replaces
        if not self._replaces:
            storage.rename(self.finished, self.target)
        elif storage.swap(self.finished, self.target):
            self._is_made = True
            storage.rename(self.finished, self.aside)
        else:
            storage.rename(self.target, self.aside)
            storage.rename(self.finished, self.target)
        self._is_made = True

    def happened(self, error: OSError, is_new: Callable[[], bool | None] | None = None) -> bool:
        """Return whether ``target`` is the new one although `make`, or a later step, raised ``error``.

        A server may have renamed it without an answer. ``is_new`` looks at it; without that, names decide.
        """
        if isinstance(error, (FileNotFoundError, FileExistsError)):
            return False  # it is for the caller: another process may have finished the replacement
        return self._is_made or bool((is_new or self._has_new_name)())

    def _has_new_name(self) -> bool:
        return self.is_there(self.target) and not self.is_there(self.finished)

    def restore(self, is_new: bool) -> None:
        """Restore the state before `make`. ``is_new`` says that ``target`` is the new one. Raises OSError.

        If the old one is gone, the new one stays: another process that took this one for dead has removed it.
        """
        storage = self.storage
        if is_new:
            if self.is_there(self.finished) and storage.swap(self.finished, self.target):
                return
            if not self._replaces or self.is_there(self.aside):
                storage.rename(self.target, self.finished)
        self.put_back()

    def put_back(self) -> None:
        """Give the old content its name again, if it lost it. Raises OSError.

        ``target`` may be the old content even if ``finished`` does not exist: another process that took this one for
        dead may have removed it.
        """
        if self.is_there(self.aside) and not self.is_there(self.target):
            self.storage.rename(self.aside, self.target)

    def settle(self) -> None:
        """Finish an interrupted replacement. Several processes may, at once. Raises OSError."""
        with suppress(FileNotFoundError, FileExistsError):
            if not self.is_there(self.target):
                source = self.finished if self.is_there(self.finished) else self.aside
                self.storage.rename(source, self.target)

    def is_there(self, key: str) -> bool:
        """Return whether a name exists."""
        return self.storage.is_dir(key) or self.storage.is_file(key)


def not_undone(error: OSError, name: str) -> OSError:
    """Return the error of a save that could not be made durable, and whose undoing could not be either."""
    return OSError(
        error.errno,
        f"{error.strerror or error}; its undoing is not durable either: {name} may be there after a power cut. Look at "
        "the disk, then save again",
        error.filename,
    )


_TRIES = 5
"""Times that a name is tried although somebody else makes a directory of that name meanwhile."""


def publish(storage: Storage, attempt: str, tag: str, is_visible: Callable[[], bool | None]) -> None:
    """Rename the complete, synced staging directory of ``attempt`` to ``tag`` and make that durable.

    Raises OSError, and restores the state before: a tag that is not durable must not stay visible, and the tag that it
    was to replace must not stay away. If that fails, too, the message says that a power cut may bring either;
    OutcomeUnknown if the new tag may be visible still. But a tag that another rank counts as saved stays, see
    `decides`.

    ``is_visible`` tells whether the tag is of this attempt; None if the storage does not say. It is asked after an
    error, because a server that did not answer may have renamed it.
    """
    recover(storage)  # an earlier swap of this job may not be finished yet
    replacement = _replacement(storage, attempt, tag)
    try:
        _make(replacement, attempt, tag)
        _sync(storage)
    except OSError as error:
        is_new = replacement.happened(error, is_visible)
        if not is_new or may_undo(storage, attempt):
            if not _restore(replacement, attempt, is_new):
                if is_visible() is False:
                    raise not_undone(error, tag) from error
                raise OutcomeUnknown(
                    f"{storage.url}/{tag} got its name, then {type(error).__name__}: {error}; and that could not be "
                    f"undone. It may be visible or not, also after a power cut: look for {storage.url}/{tag}/{DONE}, "
                    "and save again"
                ) from error
            raise
        logger.warning("%s: %s; another rank made %r durable, and counts it as saved", storage.url, error, tag)
    try:
        if is_open(storage):
            _bring_guests(replacement, attempt)
            _forget(storage)
            discard_trash(storage, attempt.rpartition("-")[0])
    except OSError as error:
        # The new tag is in place and durable: with a journal that stays, the next job moves what is left.
        logger.warning("%s: could not drop %s: %s", storage.url, JOURNAL, error)


def decides(storage: Storage, attempt: str, outcome: bytes) -> bool:
    """Return whether this is the outcome of a published attempt: the one that is noted first, "saved" or "undone".

    Rank 0 may stand still after a sync failed. A rank that hears nothing from it finds the tag, and counts it as saved;
    rank 0 would wake up, and undo it. Raises OSError, MalformedFile.
    """
    return storage.link_new(outcome_file(attempt), outcome) or storage.read(outcome_file(attempt), NOTE) == outcome


def may_undo(storage: Storage, attempt: str) -> bool:
    """Return whether no rank counts the published attempt as saved; True also if the storage does not say."""
    with suppress(OSError, MalformedFile):
        return decides(storage, attempt, b"undone")
    return True


def _replacement(storage: Storage, attempt: str, tag: str) -> Replacement:
    return Replacement(storage, staging_dir(attempt), tag, trash_file(attempt, tag))


def _make(replacement: Replacement, attempt: str, tag: str) -> None:
    """Make the replacement, which is announced if there is something to replace. Raises OSError."""
    storage = replacement.storage
    replaces = False
    for tries_left in reversed(range(_TRIES)):
        if not replaces and storage.is_dir(tag):
            replaces = True
            guests.share(storage, tag, replacement.finished)
            storage.make_dir(TRASH)
            storage.write(JOURNAL, json.dumps({"attempt": attempt, "tag": tag}).encode())
            # Before a job's first save not even the hidden directory need be durable, to which the old tag moves.
            effects.side_by_side(partial(storage.sync_dir, HIDDEN), partial(storage.sync_dir, ""))
        try:
            if replaces and storage.is_dir(replacement.aside):
                _settle(replacement, attempt)  # the old one is out, and somebody made a directory in its place
            else:
                replacement.make(replaces)
            return
        except FileExistsError:  # somebody made it meanwhile, for a file of theirs
            if not tries_left or storage.is_file(f"{tag}/{DONE}") or storage.is_file(tag):
                raise


def _settle(replacement: Replacement, attempt: str) -> None:
    """Give the finished directory, or the old one, its name if it has none. Raises OSError.

    Between the two renames somebody may have made a directory for a file of theirs: it has no ``done``, and gives way.
    """
    storage = replacement.storage
    tag = replacement.target
    if storage.is_dir(tag) and not storage.is_file(f"{tag}/{DONE}"):
        sources = [key for key in (replacement.finished, replacement.aside) if storage.is_file(f"{key}/{DONE}")]
        if sources:
            away = guests_dir(attempt, tag)
            guests.bring(storage, away, sources[0])
            storage.remove(away)
            with suppress(FileNotFoundError):  # another process was faster
                storage.rename(tag, away)
    replacement.settle()


def _bring_guests(replacement: Replacement, attempt: str) -> None:
    """Move the guests of all directories that had the name, or were to have it, to the one that has it."""
    for place in (replacement.finished, replacement.aside, guests_dir(attempt, replacement.target)):
        guests.bring(replacement.storage, place, replacement.target)


def _restore(replacement: Replacement, attempt: str, is_new: bool) -> bool:
    """Undo a failed publication. If this fails, the journal stays, and the next job to open the directory tries again.

    Returns whether the state before is durable.
    """
    storage = replacement.storage
    try:
        replacement.restore(is_new)
        _bring_guests(replacement, attempt)
        _sync(storage)
        _forget(storage)
    except OSError as error:
        logger.error("%s: a failed save of %r could not be undone yet: %s", storage.url, replacement.target, error)
        return False
    return True


def recover(storage: Storage) -> None:
    """Finish or undo a swap that a crash interrupted. Safe to call at any time, by several processes at once.

    A journal that names no swap is set aside, and so is the trash, where the replaced tag may lie. In a store there is
    none.
    """
    if not storage.renames:
        return
    try:
        announced = _announced(storage)
        if announced is None:
            return
        attempt, tag = announced
        replacement = _replacement(storage, attempt, tag)
        _settle(replacement, attempt)
        _bring_guests(replacement, attempt)
    except (MalformedFile, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ELOOP:
            raise
        set_aside(storage, JOURNAL, error)
        if storage.is_dir(TRASH) and storage.list(TRASH):
            set_aside(storage, TRASH, f"a tag that was being replaced may be in it, as {JOURNAL} does not tell")
        return
    _sync(storage)
    _forget(storage)


def is_open(storage: Storage) -> bool:
    """Return whether an announced swap is unfinished; True also for a damaged journal. In a store there is none."""
    if not storage.renames:
        return False
    try:
        storage.size(JOURNAL)
    except FileNotFoundError:
        return False
    except MalformedFile:
        return True
    return True


def _announced(storage: Storage) -> tuple[str, str] | None:
    """Return attempt and tag of the swap in the journal. Raises MalformedFile."""
    fields = read_note(storage, JOURNAL)
    if fields is None:
        return None
    try:
        return checked_name(fields["attempt"]), validate_tag(fields["tag"])
    except (KeyError, ValueError) as error:
        raise MalformedFile(f"{storage.url}/{JOURNAL}: it names no swap ({type(error).__name__}: {error})") from error


def remove_tag(
    storage: Storage,
    tag: str,
    attempt: str,
    is_kept: Callable[[str], bool] = lambda key: False,
    order_time: float = 0.0,
) -> bool:
    """Make a tag invisible with one rename; False if ``is_kept``, then it has its name again.

    ``is_kept`` is called with the tag's key in the trash. If this process ends before it has answered, others see by
    ``order_time`` whether it is the save that was to go.
    """
    key = trash_file(attempt, tag, order_time)
    goes = False
    storage.make_dir(TRASH)
    storage.rename(tag, key)
    try:
        goes = not is_kept(key)
    finally:
        if not goes:
            storage.rename(key, tag)
            storage.sync_dir("")  # else a power cut might take the name away again
    if goes:
        storage.sync_dir("")
    return goes


def discard_trash(storage: Storage, run_id: str, confirm: Callable[[], bool] = lambda: True) -> None:
    """Delete what this run has renamed away.

    Failures are left for the next time, because nothing visible depends on them. Nothing is deleted while there is a
    journal: an old tag may have to be restored.

    In a store the intents there are finished; see `clear` for ``confirm``. Another run's entries are swept when a
    lease is taken: one of a run that stood still until it was taken over may be a tag that is about to get its name
    back. A directory that was no tag yet never does.
    """
    with suppress(OSError):
        if is_open(storage):
            return
        names = [entry.name for entry in storage.list(TRASH)]
        names = [name for name in names if name.rsplit("-", 2)[0] == run_id or name.endswith(UNFINISHED)]
        settle_losses(storage, names)
        for name in names:
            with suppress(OSError, DirectoryInUse):
                discard(storage, name, confirm)


def settle_losses(storage: Storage, names: Collection[object]) -> None:
    """Make durable that tags in the trash have lost their names, before any is deleted. Raises OSError.

    The process that renamed one may have died, or met an error, before that was durable: after a power cut the rest of
    the tag would have its name again.
    """
    if names and storage.renames:
        storage.sync_dir("")
        storage.sync_dir(TRASH)


def discard(storage: Storage, name: str, confirm: Callable[[], bool]) -> None:
    """Delete the entry ``name`` of the trash, see `settle_losses`. Raises OSError.

    A tag that must stay gets its name back instead, see `lost_tags`.
    """
    key = f"{TRASH}/{name}"
    if storage.is_dir(key):  # in a store the entry is an intent
        for tag in _must_stay(storage, name, pinned(storage)):
            _put_back(storage, key, tag)
    clear(storage, key, confirm)


def lost_tags(storage: Storage) -> dict[str, str]:
    """Return the tags in the trash that must stay, each with its key there; of several of a name the newest.

    A live job that moved one away gives it its name back; a dead one does not. They must stay because they are pinned,
    or because another job, which took the directory over, saved them under the name of the tag that was to go.
    """
    newest: dict[str, tuple[float, str]] = {}
    try:
        entries = storage.list(TRASH) if storage.renames else []
        pins = pinned(storage) if entries else set[str]()
    except MalformedFile:  # unreadable pins must not prevent reading tags
        return {}
    for entry in entries:
        for tag in _must_stay(storage, entry.name, pins):
            key = f"{TRASH}/{entry.name}"
            with suppress(FileNotFoundError, MalformedFile):  # half deleted, or no tag
                newest[tag] = max(newest.get(tag, (0.0, "")), (storage.time(f"{key}/{DONE}"), key))
    return {tag: key for tag, (_, key) in newest.items() if not storage.is_dir(tag)}


def put_back_lost(storage: Storage) -> None:
    """Give the `lost_tags` their names back. Safe by several processes, while no job lives. Raises OSError."""
    for tag, key in lost_tags(storage).items():
        with suppress(FileNotFoundError, FileExistsError):  # another process was faster
            _put_back(storage, key, tag)
            logger.warning(
                "%s/%s is back: a job that was about to remove a tag of this name ended before it saw that this one is "
                "pinned, or another save",
                storage.url,
                tag,
            )


def _must_stay(storage: Storage, name: str, pins: Collection[str]) -> set[str]:
    """Return the names that a directory in the trash may have as a tag that must stay."""
    tags = {tag for tag in pins if is_trash_of(name, tag)}
    meant = meant_by(name)
    key = f"{TRASH}/{name}"
    with suppress(FileNotFoundError, MalformedFile):  # half deleted, or of another program
        if meant and storage.is_file(f"{key}/{DONE}"):
            manifest = load_manifest(storage.read(f"{key}/{MANIFEST}"), f"{storage.url}/{key}/{MANIFEST}")
            if is_trash_of(name, manifest.tag) and order_text(manifest.order_time) != meant:
                tags.add(manifest.tag)
    return tags


def _put_back(storage: Storage, key: str, tag: str) -> None:
    Replacement(storage, key, tag, key).put_back()
    _sync(storage)


def _sync(storage: Storage) -> None:
    folders = ["", *(source for source in (STAGING, TRASH) if storage.is_dir(source))]
    effects.side_by_side(*(partial(storage.sync_dir, folder) for folder in folders))


def _forget(storage: Storage) -> None:
    storage.remove(JOURNAL)
    storage.sync_dir(HIDDEN)


def declare(storage: Storage, key: str, tag: str) -> None:
    """Note under ``key`` that ``tag`` is about to be filled or emptied."""
    folder = key.rpartition("/")[0]
    storage.make_dir(folder)
    storage.write(key, json.dumps({"tag": tag}).encode())
    storage.sync_dir(folder)


def saves_of(storage: Storage, tag: str) -> list[str]:
    """Return the attempts whose saves of ``tag`` are under way, or ended without being cleared."""
    return _of(storage, STAGING, tag)


def is_being_removed(storage: Storage, tag: str) -> bool:
    """Return whether the removal of ``tag`` is under way, or ended without being cleared."""
    return bool(_of(storage, TRASH, tag))


def _of(storage: Storage, folder: str, tag: str) -> list[str]:
    names = [entry.name for entry in storage.list(folder) if not entry.is_dir]
    return [name for name in names if _tag(storage, f"{folder}/{name}") == tag]


def clear(storage: Storage, key: str, confirm: Callable[[], bool]) -> None:
    """Finish the change that an intent announced, or remove a directory. Safe to repeat.

    Nobody may be working there any more. ``confirm`` checks that this still holds, once the files of an intent's tag
    are known.
    """
    tag = _tag(storage, key) if not storage.renames or storage.is_file(key) else None
    if tag is not None and not _is_complete(storage, tag):
        of_all = key.startswith(f"{TRASH}/")
        went = storage.remove_if(f"{tag}/{DONE}", confirm)  # before what it would make a tag
        if went and of_all:
            went = storage.remove_if(tag, confirm)
        elif went:
            went = guests.remove_all_but_guests(storage, tag, confirm)
        if not (went and confirm()):
            return
        storage.discard_unfinished(tag)
    if storage.renames and key.rpartition("/")[0] in (STAGING, COPIES) and storage.is_dir(key):
        key = _moved_away(storage, key)
        if storage.is_file(f"{key}/{DONE}"):
            # It was a tag, if only for a moment: its name must be gone for good before its files are.
            storage.sync_dir("")
    storage.remove(key)


def _is_complete(storage: Storage, tag: str) -> bool:
    """Return whether a tag has ``done``, of the attempt that filled it.

    A request of an earlier attempt that was given up may still happen, and bring its ``done`` into the files of a later
    one. In place the marker names the attempt that fills the tag.
    """
    try:
        done = storage.read(f"{tag}/{DONE}", NOTE)
    except FileNotFoundError:
        return False
    try:
        marker = storage.read(f"{tag}/{MARKER}", NOTE)
    except FileNotFoundError:
        return True
    ended, filling = (content.partition(b" ")[2] for content in (done, marker))
    return not ended or not filling or ended == filling


def _moved_away(storage: Storage, key: str) -> str:
    """Move a directory to the trash and return its key there.

    It is moved as a whole: a rank that wakes up in it must find all its files, or none.
    """
    away = unfinished_dir(key)
    storage.remove(away)  # an earlier one
    with suppress(FileNotFoundError):
        storage.rename(key, away)
    return away


def _tag(storage: Storage, key: str) -> str | None:
    """Return the tag that an intent names; None if the intent is gone, or damaged."""
    try:
        fields = read_note(storage, key)
        return None if fields is None else validate_tag(fields["tag"])
    except (MalformedFile, KeyError, ValueError):
        return None
