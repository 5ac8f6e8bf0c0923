"""Content of a checkpoint directory: its tags, which of them are complete, and which may be removed.

A tag is complete if it holds ``done`` (NxD 0.7 and newer, and ours). `nxd_ckpt.tag.identity` defines the order of tags.
NxD 0.6 has no marker: there a tag is complete if the file ``newest`` lists it and no rank's file is missing,
because ``newest`` is written before the data. The layouts of 0.1 to 0.5 have no tags: the directory itself
is the checkpoint, listed as the tag ``""`` (``NO_TAG``), older than any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from nxd_ckpt.coordination.guests import entries_of, guests_of
from nxd_ckpt.core.document import known_by_name
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.manifest import load_manifest
from nxd_ckpt.core.names import (
    DONE,
    INDEX_DIR,
    MANIFEST,
    MARKER,
    MODEL_DIR,
    NEWEST,
    OPTIMIZER_DIR,
    SCHEDULER,
    USER_CONTENT,
    ParsedName,
    holes,
    parse,
    spanned,
)
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import TagInfo
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, MalformedFile
from nxd_ckpt.layouts import legacy, nemo
from nxd_ckpt.layouts.files import meant_instead
from nxd_ckpt.layouts.other_kinds import described, described_below
from nxd_ckpt.storage.base import DirEntry, Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import aliases
from nxd_ckpt.storage.urls import ARCHIVES
from nxd_ckpt.tag.identity import marker_time, order_time_of_ours, recorded_order_time
from nxd_ckpt.tag.range_reader import in_parallel

NO_TAG = ""
_NXD_FILES = {MARKER, DONE, SCHEDULER, USER_CONTENT}
_NXD_DIRS = {MODEL_DIR, OPTIMIZER_DIR}
_OF_TAGS = {MARKER, MANIFEST, USER_CONTENT, *_NXD_DIRS}
"""Names of which a tag has one at least, beside ``done``."""


def tag_around(storage: Storage) -> str | None:
    """Return the tag that this directory is, or on a file system lies in (also by a link or a bind mount).

    Else None.
    """
    if is_tag(storage):
        return storage.url
    paths = [storage.root, *map(Path, aliases(storage.root))] if isinstance(storage, LocalStorage) else []
    above = dict.fromkeys(folder for path in paths for folder in path.parents)
    return next((str(folder) for folder in above if is_tag(LocalStorage(folder))), None)


def is_tag(storage: Storage) -> bool:
    """True if the directory itself is a complete tag: with both of NxD's markers, or with an index and manifest."""
    return storage.is_file(DONE) and _is_begun(storage)


def _is_begun(storage: Storage) -> bool:
    """True if the directory itself is a tag, complete or not."""
    return any(
        storage.is_file(file) and any(map(storage.is_dir, folders))
        for file, folders in ((MANIFEST, (INDEX_DIR,)), (MARKER, (MODEL_DIR, OPTIMIZER_DIR)))
    )


def list_tags(storage: Storage) -> list[TagInfo]:
    """Return the tags in a directory, complete or not, in order of name.

    Hidden names and other directories are skipped, and so are links to a tag that is listed, such as ``latest``: they
    would count as one more. A damaged tag never hides the others.
    """
    tags = list(_tags(storage))
    alike = Counter(info.marked for info in tags)
    # Only what has another's time may be a link to it: of nearly all tags nothing more is asked.
    links = {info.tag for info in tags if alike[info.marked] > 1 and info.tag and storage.is_link(info.tag)}
    times = {info.marked for info in tags if info.tag not in links}
    return [info for info in tags if info.tag not in links or info.marked not in times]


def holds_tags(storage: Storage) -> bool:
    """Return whether there is any tag. Inspects no more of them than needed."""
    return next(_tags(storage), None) is not None


def find_tag(storage: Storage, tag: str) -> TagInfo | None:
    """Return the tag of that name as `list_tags` describes it, or None; inspects no other one."""
    if storage.renames and not storage.is_dir(tag):
        return None
    try:
        return _inspect(storage, tag, lambda: _times_in_newest(storage) if storage.is_file(NEWEST) else {})
    except MalformedFile:  # a store lists first, and finds a file of that name
        return None


def _tags(storage: Storage) -> Iterator[TagInfo]:
    top = storage.list()
    ranks = [name for entry in top if (name := legacy.parse(entry.name)) is not None]
    if ranks and not nemo.saves(storage, ""):
        yield _legacy_tag(storage, ranks)
    newest = _times_in_newest(storage) if DirEntry(NEWEST, False) in top else {}
    folders = [entry.name for entry in top if entry.is_dir and entry.name[0] != "."]

    def inspect(tag: str) -> TagInfo | None:
        return _inspect(storage, tag, lambda: newest)

    yield from filter(None, in_parallel(storage, folders, inspect))


def is_checkpoint_of_ours_or_nxd(storage: Storage, tag: str) -> bool:
    """Return whether retention may remove this tag: it is complete, and holds nothing but a checkpoint's files.

    Either our manifest proves it, or both of NxD's markers are there as NxD writes them (the one character
    ``1``) with only NxD's names beside them. A directory of the user that holds a file named ``checkpoint`` is neither.
    """
    if not tag:
        return False
    entries = {entry.name: entry.is_dir for entry in storage.list(tag)}
    if entries.get(DONE) is not False:
        return False
    if entries.get(MANIFEST) is False:
        return _is_our_manifest(storage, f"{tag}/{MANIFEST}")
    files = {name for name, is_dir in entries.items() if not is_dir}
    only_nxd_names = files <= _NXD_FILES and entries.keys() - files <= _NXD_DIRS
    return (
        only_nxd_names and MARKER in files and all(_has_mark(storage, f"{tag}/{name}", b"1") for name in (MARKER, DONE))
    )


def clash(storage: Storage, tag: str) -> str | None:
    """Return the key of a file or directory that a save would have to replace, and must not; None if there is none.

    A save replaces a checkpoint, or the remains of one, and keeps everything else: see coordination.guests. What has a
    name of a save's files is of a checkpoint if the directory is marked as one, and a marker is if it holds nothing
    else. In a store the mark may be missing: a job that lost its lease may have continued to write after its successor
    removed it.
    """
    if storage.is_file(tag):
        return tag
    entries = list(entries_of(storage, tag))
    if not entries or is_checkpoint_of_ours_or_nxd(storage, tag):
        return None
    files = {entry.path for entry in entries if not entry.is_dir}
    recorded = DONE in files and recorded_order_time(storage, tag) is not None
    marks = {name for name in (MARKER, DONE) if name in files and _has_mark(storage, f"{tag}/{name}", b"1", b"")}
    marks |= {DONE} if recorded else set()
    if MARKER in files:
        marked = MARKER in marks
    else:  # a tag of NxD 0.6 or 0.7 has no mark either
        marked = not storage.renames and (recorded or DONE not in files) and not storage.is_file(NEWEST)
    for entry in entries:
        if entry.clashes or not (entry.is_guest or marked or entry.path in marks):
            return f"{tag}/{entry.path}"
    return None


def may_be_removed(storage: Storage, tag: str) -> bool:
    """Return whether a tag, complete or not, holds nothing but a checkpoint's files, or a manifest of ours proves it.
    """
    if is_checkpoint_of_ours_or_nxd(storage, tag):
        return True
    return clash(storage, tag) is None and not guests_of(storage, tag)


def is_whole_without_marks(storage: Storage, tag: str) -> bool:
    """Return whether a directory has no marker of a save, but the files of all ranks that the names imply.

    NxD's converter writes such directories, with only ``model/``; NxD and we begin a save with a marker. They are not
    listed, because nothing shows when they were finished, but load if they are named.
    """
    names = {entry.name for entry in storage.list(tag)} if tag and storage.is_dir(tag) else set()
    marked = names & {MARKER, DONE, MANIFEST, INDEX_DIR}
    if marked or not names & _NXD_DIRS or not _has_all_ranks(storage, tag):
        return False
    parts = [{entry.name for entry in storage.list(f"{tag}/{part}")} for part in _NXD_DIRS & names]
    sizes = {(size.tp, size.pp) for part in parts if (size := spanned(filter(None, map(parse, part))))}
    # xser: a rank's tensors are written before the file that refers to them.
    return len(sizes) == 1 and all(name.removesuffix(".tensors") in part for part in parts for name in part)


def describe_incomplete(storage: Storage) -> str:
    """Describe a directory without a complete tag for error messages, with the call that reads its content."""
    kind = _describe_other_kind(storage)
    if kind is not None:
        return kind
    tags = {info.tag: info for info in list_tags(storage)}
    below = None if tags else described_below(storage)
    if below is not None:
        return below
    lines = []
    for entry in storage.list():
        if entry.name.startswith("."):
            continue
        info = tags.get(entry.name)
        if info is None and entry.is_dir and is_whole_without_marks(storage, entry.name):
            lines.append(f"{entry.name!r} (without markers: taken only by its name)")
        elif entry.name.endswith(ARCHIVES) and not entry.is_dir:
            lines.append(f"{entry.name!r} (may be an archive of one: pass its own path)")
        elif info is None:
            lines.append(f"{entry.name!r} ({known_by_name(entry.name) or 'not a checkpoint'})")
        elif info.damage is not None:
            lines.append(f"{entry.name!r} (damaged)")
        else:
            lines.append(f"{entry.name!r} ({'complete' if info.complete else 'no done marker: incomplete'})")
    if not lines:
        return "it is empty or absent"
    return f"it holds {first_of(lines)}"


def other_content(storage: Storage) -> str:
    """Return what a directory without tags is itself, or holds further below, to end a warning; "" if neither.

    If it does not exist, and a directory of a similar name does, that may be meant.
    """
    try:
        if not storage.is_dir(""):
            return meant_instead(storage, "")
        kind = _describe_other_kind(storage) or described_below(storage)
    except (OSError, CheckpointError):
        kind = None
    return "" if kind is None else f", but {kind}"


def _describe_other_kind(storage: Storage) -> str | None:
    """Describe a directory that is no directory of tags, with the call that reads it; None if it is unknown."""
    url = storage.url.rstrip("/")
    if is_tag(storage):
        directory = url.rpartition("/")[0]
        return (
            f"it is itself a tag: load_checkpoint({url!r}) loads it, nxd-ckpt inspect {url} shows it, and nxd-ckpt "
            f"list {directory} lists its directory"
        )
    around = tag_around(storage)
    if around is not None:
        return f"it is a part of the tag {around}: name that"
    if _is_begun(storage):
        return f"it is itself a tag, and incomplete: it has no {DONE!r} marker, its save was interrupted"
    return described({entry.name for entry in storage.list() if not entry.is_dir}, url)


def _times_in_newest(storage: Storage) -> dict[str, float]:
    """Return the order time of each line of ``newest``: its modification time, less a second per following line.

    A damaged file lists nothing.
    """
    try:
        data = storage.read(NEWEST)
        written = marker_time(storage, NEWEST)
    except FileNotFoundError:
        return {}
    except MalformedFile as error:
        logger.warning("%s; tags that neuronx_distributed 0.6 wrote are ignored", error)
        return {}
    lines = [line.strip() for line in data.decode(errors="replace").splitlines()]
    tags = [line for line in lines if line]
    return {tag: written - (len(tags) - 1 - position) for position, tag in enumerate(tags)}


def _inspect(storage: Storage, tag: str, newest: Callable[[], dict[str, float]]) -> TagInfo | None:
    """Return a tag's facts; None if there is no tag. ``newest`` returns the times in NxD 0.6's file of that name."""
    try:
        entries = storage.list(tag)
        files = {entry.name for entry in entries if not entry.is_dir}
    except PermissionError as error:
        if error.errno is None:  # a store's, about credentials: no tag may seem to be absent for that
            raise
        return None  # another user's directory, beside the tags
    is_ours = has_manifest = MANIFEST in files
    dated = next((name for name in (DONE, MARKER, MANIFEST) if name in files), None)
    try:
        if DONE not in files and tag in (times := newest()) and (entries or storage.renames):
            return TagInfo(tag, times[tag], complete=_has_all_ranks(storage, tag), ours=has_manifest)
        if dated is None:
            return None
        recorded = recorded_order_time(storage, tag) if dated == DONE else None
        if recorded is None and _OF_TAGS.isdisjoint(entry.name for entry in entries):
            return None  # a file of that name beside another program's
        order_time = marked = marker_time(storage, f"{tag}/{dated}") if recorded is None else recorded
        if recorded is None and has_manifest and dated == DONE:
            own = order_time_of_ours(storage, tag, marked)
            order_time, is_ours = (marked, False) if own is None else (own, True)
    except FileNotFoundError:
        return None  # another process removed the tag since it was listed
    except MalformedFile as error:
        return TagInfo(tag, 0.0, complete=False, ours=has_manifest, damage=str(error))
    # In a store there is a manifest beside a ``done`` of ours, unless a job that was taken over wrote it too late.
    is_complete = dated == DONE and (has_manifest or recorded is None or storage.renames)
    return TagInfo(tag, order_time, complete=is_complete, ours=is_ours, marked=marked)


def _has_all_ranks(storage: Storage, tag: str) -> bool:
    parts = [
        [name for entry in storage.list(f"{tag}/{part}") if (name := parse(entry.name)) is not None]
        for part in sorted(_NXD_DIRS)
    ]
    return any(parts) and not any(holes(part) for part in parts)


def _legacy_tag(storage: Storage, ranks: list[ParsedName]) -> TagInfo:
    """Return the directory itself as a checkpoint of these ranks' files."""
    try:
        return TagInfo(NO_TAG, 0.0, complete=not holes(ranks), ours=False)
    except MalformedFile as error:
        return TagInfo(NO_TAG, 0.0, complete=False, ours=False, damage=f"{storage.url}: {error}")


def _has_mark(storage: Storage, key: str, *marks: bytes) -> bool:
    """Return whether a marker holds one of ``marks`` (in a store the attempt follows)."""
    try:
        return storage.read(key, NOTE).partition(b" ")[0] in marks
    except MalformedFile:
        return False


def _is_our_manifest(storage: Storage, key: str) -> bool:
    try:
        load_manifest(storage.read(key), key)
    except MalformedFile:
        return False
    return True
