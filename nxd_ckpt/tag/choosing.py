"""Choosing and opening the tag to read, in a directory that others may be saving to, or what a path itself names.

That is one tag, a file, or what another program wrote into a directory of its own.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.coordination import journal, lease
from nxd_ckpt.coordination.control_files import HEARTBEAT, JOURNAL
from nxd_ckpt.coordination.waiting import Backoff
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.core.tags import Tag, TagInfo, latest, names_that_fit, step_of, undated, undecided, validate_tag
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, InvalidTag, MalformedFile, TagReplaced
from nxd_ckpt.layouts import nemo
from nxd_ckpt.layouts.dcp_directory import NO_KEYS
from nxd_ckpt.layouts.files import TagFiles, require_directory
from nxd_ckpt.layouts.hugging_face_directory import WeightsLayout, open_weights
from nxd_ckpt.layouts.nxd_tag import layout_of
from nxd_ckpt.layouts.payload import PayloadFile
from nxd_ckpt.layouts.torch_dcp import holds_ranks, is_of_rank
from nxd_ckpt.layouts.weight_files import has_weights
from nxd_ckpt.storage.archive_storage import ArchiveStorage
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.storage.urls import (
    StorageOptions,
    StrPath,
    absolute,
    directory_and_name,
    open_storage,
)
from nxd_ckpt.tag.digest_lists import DIGESTS, STATE
from nxd_ckpt.tag.directory import (
    describe_incomplete,
    find_tag,
    is_whole_without_marks,
    list_tags,
)
from nxd_ckpt.tag.identity import Identity, is_written_over, manifest_of, recorded_order_time
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.recognise import Program, open_as, recognise
from nxd_ckpt.tag.verification import verify_file

_SWAP_TAKES = 10.0
"""Seconds that a live job may need to replace a tag (two renames and their syncs) before a reader intervenes."""

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

_SKEW = 2.0
"""Seconds by which the clocks of hosts and of a file server may differ."""

_LOOKS = 3
"""Number of lookups after which a tag counts as absent."""


def choose_tag(storage: Storage, tag: Tag | None) -> str:
    """Return the name of the tag that `choose` selects."""
    return choose(storage, tag).tag


def choose(storage: Storage, tag: Tag | None, without: Collection[str] = ()) -> TagInfo:
    """Return the tag to load: ``tag`` if it is complete, else the latest complete one that is not in ``without``.

    A named tag may lack every marker, like those of NxD's converter; a warning says so. A name with fields, such as
    "ep{epoch}-ba{batch}", is the newest complete tag with numbers in their places, unless a tag has that very name.

    Raises:
        CheckpointNotFound: no directory, no complete tag, or no such tag; the message lists the directory's content.
        CorruptCheckpoint: its marker is not a file.
    """
    if tag is not None:
        validate_tag(tag)
    if storage.renames:  # a store is asked only if nothing is found: it takes a request
        require_directory(storage)
    return _latest(storage, without) if tag is None else _find_named(storage, _searched(storage, tag))


def name_of(storage: Storage, tag: Tag) -> str:
    """Return the name that is meant by ``tag``: an int is a tag's name if there is one, else the newest tag's step.

    Raises InvalidTag for what is neither a tag nor a step.
    """
    digits = validate_tag(tag)
    if not isinstance(tag, int):
        return digits
    return _newest_of(storage, (digits, f"step_{digits}"), lambda name: step_of(name) == tag)


def _searched(storage: Storage, tag: Tag) -> str:
    """Return the name that is meant by ``tag``, which may be a template."""
    pattern = names_that_fit(tag) if isinstance(tag, str) else None
    return name_of(storage, tag) if pattern is None else _newest_of(storage, (str(tag),), pattern.fullmatch)


def _newest_of(storage: Storage, names: Sequence[str], fits: Callable[[str], object]) -> str:
    """Return the first of ``names`` that is a complete tag, else the newest that ``fits``, else the first of them."""
    # A look at each, since a directory may hold many tags.
    for name in names:
        info = find_tag(storage, name)
        if info is not None and info.complete:
            return name
    newest = latest(info for info in settled_tags(storage) if fits(info.tag))
    return names[0] if newest is None else newest.tag


def tag_meant(storage: Storage, name: str) -> str:
    """Return the tag that a user calls ``name``: one of that name, else the only one of that step, else ``name``.

    Raises CheckpointNotFound if several tags are of that step.
    """
    if not (name.isascii() and name.isdecimal()) or storage.is_dir(name) or storage.is_file(name):
        return name
    tags = [info.tag for info in settled_tags(storage, only_look=True) if step_of(info.tag) == int(name)]
    if len(tags) > 1:
        raise CheckpointNotFound(f"{storage.url}: {first_of(map(repr, tags))} are of step {name}: name one of them")
    return tags[0] if tags else name


def _latest(storage: Storage, without: Collection[str]) -> TagInfo:
    tags = settled_tags(storage)
    newest = latest(info for info in tags if info.tag not in without)
    for damage in filter(None, (info.damage for info in tags)):
        logger.warning("%s: this tag is skipped", damage)
    if newest is None:
        require_directory(storage)
        raise CheckpointNotFound(f"{storage.url}: no complete checkpoint; {describe_incomplete(storage)}")
    _refuse_guess(storage, tags, newest)
    _warn_of_clock(storage, tags, newest)
    return newest


def _with_nearest(tag: str, tags: Sequence[str]) -> str:
    """Return the name with those that may have been meant: the same step in other words, or the nearest steps."""
    step = step_of(tag)
    steps = {other: number for other in tags if (number := step_of(other)) is not None}
    if step is None or step in steps.values():
        return listed([tag], [other for other in tags if steps.get(other) == step])
    nearest = sorted(steps, key=lambda other: abs(steps[other] - step))[:2]
    return repr(tag) + (f" (the nearest: {', '.join(map(repr, nearest))})" if nearest else "")


def _find_named(storage: Storage, tag: str) -> TagInfo:
    """Return the named tag. Inspects no other tags: they may be many, and each costs several requests to a store."""
    info = next(iter(_settled(storage, lambda: list(filter(None, [find_tag(storage, tag)])))), None)
    if info is None and is_whole_without_marks(storage, tag):
        logger.warning(
            "%s/%s has no %r marker, nor any other sign of a save. It is read as the output of a converter: the files "
            "of all ranks that the names imply exist",
            storage.url,
            tag,
            names.DONE,
        )
        return TagInfo(tag, 0.0, complete=True, ours=False)
    if info is None:
        require_directory(storage)
        tags = [other.tag for other in list_tags(storage)]
        raise CheckpointNotFound(
            f"{storage.url}: no tag {_with_nearest(tag, tags)}; {describe_incomplete(storage)}. Without a tag the "
            "latest is read"
        )
    if info.damage is not None:
        raise CorruptCheckpoint(f"{info.damage}; restore the tag from a copy, or remove it")
    if not info.complete:
        raise CheckpointNotFound(
            f"{storage.url}/{tag} is incomplete: it has no {names.DONE!r} marker, its save was interrupted; "
            f"{describe_incomplete(storage)}"
        )
    return info


def _refuse_guess(storage: Storage, tags: Sequence[TagInfo], newest: TagInfo) -> None:
    """Raise CheckpointNotFound if the latest tag cannot be determined; warn if it is only likely."""
    if newest.tag.startswith(f"{STATE}_") and storage.is_file(DIGESTS):
        raise CheckpointNotFound(
            f"{storage.url} is one checkpoint of several models, each a tag: name one of "
            f"{first_of(info.tag for info in tags)}"
        )
    without = undated(tags)
    if without:
        logger.warning(
            "%s: the time of %s is unknown. %s is assumed to be the latest; if that is wrong, name another one",
            storage.url,
            first_of(info.tag for info in without),
            newest.tag,
        )
    group = next((group for group in undecided(tags) if newest in group), None)
    if group is None:
        return
    same = first_of(info.tag for info in group)
    if newest.order_time == 0.0:
        raise CheckpointNotFound(
            f"{storage.url} does not report when files were written, so it is not known which is the latest of "
            f"{same}: name one"
        )
    logger.warning(
        "%s: %s were saved at the same time, and their names do not tell which is the latest. %s is taken; if that is "
        "wrong, name another one",
        storage.url,
        same,
        newest.tag,
    )


def _warn_of_clock(storage: Storage, tags: Sequence[TagInfo], newest: TagInfo) -> None:
    """Where the latest tag is dated after now, what another program saved later has an earlier time. Ours has not."""
    ahead = newest.order_time - effects.time()
    other = latest(info for info in tags if not info.ours and info.tag and info.tag != newest.tag)
    if ahead > _SKEW and other is not None:
        logger.warning(
            "%s: %s is taken for the latest, though it is dated %.0f s after the clock of this host. %s, which another "
            "program saved, has an earlier time, but may be newer. If it is, load it by its name. Set the "
            "clock right, or the time of %s/%s",
            storage.url,
            newest.tag,
            ahead,
            other.tag,
            newest.tag,
            names.DONE,
        )


def settled_tags(storage: Storage, *, only_look: bool = False) -> list[TagInfo]:
    """Return the tags in a directory while others save there.

    With ``only_look`` a dead job's replacement is left as it is.
    """
    return _settled(storage, partial(list_tags, storage), only_look=only_look)


def _settled(storage: Storage, look: Callable[[], list[TagInfo]], *, only_look: bool = False) -> list[TagInfo]:
    """Return the result of ``look``, once it has a complete tag.

    A tag that is being replaced is absent for a moment. One that is published while the directory is listed may be
    missed, as may the one that is removed for it. So missing tags are looked up again.
    """
    tags: list[TagInfo] = []
    for _ in range(_LOOKS):
        settle_swap(storage, only_look=only_look)
        tags = look()
        if any(info.complete for info in tags):
            break
    return tags


def settle_swap(storage: Storage, *, only_look: bool = False) -> None:
    """Let a live job finish the replacement of a tag; finish or undo that of a dead job.

    With ``only_look`` a dead job's swap stays. Tags that a dead job must not have moved away get their names back too.
    """
    if not journal.is_open(storage):
        if not only_look:
            _put_back_lost(storage)
        return
    deadline = effects.monotonic() + _SWAP_TAKES
    backoff = Backoff(storage)
    while journal.is_open(storage) and effects.monotonic() < deadline:
        holder = lease.read(storage)
        if holder is None or holder.holder_runs_here() is False or _stays_open(storage):
            break
        backoff.pause()
    if not only_look and journal.is_open(storage) and not lease.job_lives(storage, patience=_SWAP_TAKES):
        try:
            journal.recover(storage)
        except OSError as error:  # a read-only view shows what is there
            if error.errno not in _READ_ONLY:
                raise


def _stays_open(storage: Storage) -> bool:
    """Return whether the job has beaten for longer than a swap takes since it was announced.

    It could neither finish nor undo it, and tries again at its next save. Both times are of the same file system.
    """
    try:
        return storage.time(HEARTBEAT) - storage.time(JOURNAL) > _SWAP_TAKES
    except (FileNotFoundError, MalformedFile):
        return False


def _put_back_lost(storage: Storage) -> None:
    away = journal.lost_tags(storage)
    if not away or lease.job_lives(storage, patience=_SWAP_TAKES):
        return
    try:
        journal.put_back_lost(storage)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        for tag, key in away.items():
            logger.warning(
                "%s/%s is in %s: a job that was removing a tag of this name ended before it saw that this one is "
                "pinned, or another save. The next process that may write here restores its name (%s)",
                storage.url,
                tag,
                key,
                error,
            )


_INDEX = ".index.json"


class ByPath(NamedTuple):
    """The checkpoint ``key`` of the storage, by ``writer``, a value of `Program`: plain data, for other ranks."""

    key: str
    writer: str

    @property
    def is_weights(self) -> bool:
        """True if it is a model in Hugging Face's form, and no more."""
        return self.writer == Program.HUGGING_FACE.value

    def open(
        self,
        storage: Storage,
        key: str,
        *,
        trust_pickle: bool = False,
        tells: bool = True,
        part_keys: Mapping[str, str] = NO_KEYS,
    ) -> OpenTag:
        """Open it as ``key`` of the storage; ``part_keys`` as for `open_as`. Raises the errors of opening its layout.

        With ``tells`` a warning says which keys of a script's own dict were taken for model and optimizer, and which
        files of weights are not read.
        """
        if self.is_weights:
            directory = open_weights(storage, key)
            if tells and directory.strays is not None:
                logger.warning("%s", directory.strays)
            return OpenTag(storage, key, WeightsLayout(directory), None)
        writer = Program(self.writer)
        layout = None if writer.writes_tags else open_as(writer, storage, key, trust_pickle, part_keys)
        if layout is None:
            return open_complete_tag(storage, key, trust_pickle=trust_pickle)
        if tells and writer is Program.TORCH_XLA and isinstance(layout, PayloadFile) and layout.taken:
            logger.warning("%s: taken as a script's own dict: %s", layout.where, layout.taken)
        return OpenTag(storage, key, layout, None)


Place = tuple[StrPath, StorageOptions | None]
"""A path or URL, with the options for opening it."""

Opens = Callable[..., OpenTag]
"""`open_complete_tag`, or `ByPath.open`."""


def own_place(path: StrPath, opens: Callable[[str], Storage]) -> tuple[str, str]:
    """Return the directory or URL, which ``opens`` opens, and the key in it, by which a path names a checkpoint itself.

    An index stands for the directory that it is in, an archive of one directory for that, one rank's path for that of
    all ranks, and a number that is no tag for the only tag of that step.

    Raises CheckpointNotFound for the step of several tags.
    """
    whole = absolute(path)
    storage = opens(whole)
    if isinstance(storage, ArchiveStorage):
        entries = [entry for entry in storage.list() if entry.name[0] != "."]
        return whole, entries[0].name if len(entries) == 1 and entries[0].is_dir else ""
    directory, name = directory_and_name(whole)
    if name.endswith(_INDEX):
        directory, name = directory_and_name(directory)
    above, rank = directory_and_name(directory)
    of_all = f"{rank}/{name}"
    if nemo.is_of_rank(of_all) or (holds_ranks(rank) and is_of_rank(opens(above), of_all)):
        return above, of_all
    return directory, tag_meant(opens(directory), name)


def around(storage: Storage, tag: Tag | None, place: Place | None) -> tuple[Storage, str]:
    """Return where `find_by_path` is to look: for a named tag in ``storage``, else beside its own ``place``."""
    if tag is not None or place is None:
        return storage, "" if tag is None else str(tag)
    path, options = place
    opens = partial(open_storage, storage_options=options)
    directory, name = own_place(path, opens)
    return opens(directory), name


def choose_anything(storage: Storage, tag: Tag | None, place: Place | None) -> tuple[Storage, ByPath]:
    """Return the tag that `choose` takes, or else what the path itself names. Raises the errors of both."""
    try:
        return storage, _of_tag(choose(storage, tag))
    except CheckpointNotFound:
        inside, key = around(storage, tag, place)
        named = find_by_path(inside, key)
        if named is None:
            raise
        return inside, named


def _of_tag(info: TagInfo) -> ByPath:
    return ByPath(info.tag, Program.of_tag(info).value)


def find_by_path(storage: Storage, key: str) -> ByPath | None:
    """Return the checkpoint that is ``key`` itself; None if there is none of a layout that is known.

    Raises:
        CheckpointNotFound: it is a directory of several checkpoints, or a tag whose save was interrupted.
        MalformedFile: it has two layouts at once.
        UnsupportedState: it is a file with a part of a model, or another program's.
    """
    try:
        info = find_tag(storage, key) if key else None
        if info is not None and info.complete:  # without a look into it
            return _of_tag(info)
        what = recognise(storage, key)
        if what is None:
            return None
        return _of_tag(choose(storage, what.tag)) if what.writer.writes_tags else ByPath(what.tag, what.writer.value)
    except (InvalidTag, FileNotFoundError):
        return None


def with_given_model(opened: OpenTag, verifies: bool) -> OpenTag:
    """Return a tag whose model is among the files that its save was given, as one with that model; others unchanged.

    A trainer's tag holds optimizer and scheduler, and the weights as the trainer writes them. If it ``verifies``, their
    files are compared with the manifest, since they have no digests of their own. Raises PartNotFound, MalformedFile
    and DigestMismatch for such files.
    """
    manifest = opened.manifest
    if manifest is None or manifest.parts.model:
        return opened
    weights = [file for file in manifest.guests if has_weights([file])]
    if not weights:
        return opened
    storage = opened.storage
    tag = opened.tag
    if verifies:
        memory = memoryview(bytearray(CRC_BLOCK))
        for file in weights:
            verify_file(storage, f"{tag}/{file}", manifest.guests[file], memory, Counter())
    return OpenTag(storage, tag, WeightsLayout(open_weights(storage, tag)), None, opened.identity)


def open_complete_tag(storage: Storage, tag: str, *, trust_pickle: bool = False) -> OpenTag:
    """Open a tag that `choose` chose.

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
