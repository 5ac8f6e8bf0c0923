"""A trainer's checkpoint as a tag: its own files, written out of sight, become part of the tag, with digests.

The checkpoint ``run/checkpoint-500`` is the tag ``checkpoint-500`` of the directory ``run``. What the trainer writes
goes to a folder among the job's own files; then a save is given these files, and makes all of it visible at once.

Version 0.1 kept the tags *in* the checkpoint, beside the trainer's files: ``run/checkpoint-500/training_state``, with a
seal (see `nxd_ckpt.tag.digest_lists`). Such checkpoints are read, and replaced.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, NamedTuple

from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.checkpointer import Checkpointer
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.at_exit import open_objects
from nxd_ckpt.coordination.control_files import PINS, STAGING
from nxd_ckpt.coordination.guests import given_entries
from nxd_ckpt.core.names import DONE, HIDDEN, INDEX_DIR, MANIFEST, MARKER, SCHEDULER
from nxd_ckpt.core.option_classes import split_options
from nxd_ckpt.core.parameter_names import canonical
from nxd_ckpt.core.retention_rules import Last
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import IncompatibleState, InvalidArgument, SaveFailed, UnsupportedState, as_checkpoint_errors
from nxd_ckpt.options.checkpointer_options import CheckpointerOptions
from nxd_ckpt.saving.pending import PendingSave
from nxd_ckpt.storage.base import DirEntry
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import is_mount_point
from nxd_ckpt.storage.urls import StrPath, is_url, local_path
from nxd_ckpt.tag.digest_lists import DIGESTS, STATE, read_seal
from nxd_ckpt.tag.directory import find_tag
from nxd_ckpt.tag.identity import Identity, manifest_of, note_damage
from nxd_ckpt.tag.verify import problems_of


class _Saver(Checkpointer):
    """The Checkpointer of one run of a trainer."""


def end_earlier_runs() -> None:
    """Wait for all saves in this process. Failures of a trainer's earlier run were logged, and are not of this run."""
    for saver in open_objects():
        if isinstance(saver, _Saver):
            with suppress(SaveFailed):
                saver.release()
    close_checkpointers()


class TrainerSaves:
    """One trainer's saves to one ``directory``, with the ``options`` of `nxd_ckpt.save_checkpoint`.

    Args:
        numbered: pattern of the names of numbered checkpoints.
        former: glob patterns of the trainer's own checkpoints' files, which go when a tag takes their place.
        hidden: the directory may hold nothing but checkpoints.
    """

    def __init__(
        self,
        agreement: Agreement,
        directory: str,
        options: Mapping[str, Any],
        numbered: str,
        former: Sequence[str],
        hidden: bool,
    ) -> None:
        own = decided_by_rank0(agreement, partial(_own_folder, directory, hidden))
        shared, rest = split_options(CheckpointerOptions, options)
        durable = CheckpointerOptions(**shared).durable
        self.directory = directory
        self._storage = LocalStorage(directory, durable) if own is None else _BesideOwn(directory, own, durable)
        self._checkpointer = _Saver(directory, storage=self._storage, tiers=rest.pop("tiers", None), **shared)
        self._options = rest
        self._numbered = numbered
        self._patterns = (*former, f"{STATE}*", DIGESTS)
        self._limit: int | None = None
        self._best: str | None = None
        self._former: list[str] = []
        """On rank 0, names in the tag's directory, before the save, of files of other forms."""
        self._folder = self._name = ""
        self._saving: PendingSave | None = None

    def begin(self, agreement: Agreement, name: str) -> str:
        """Return the directory to which the trainer is to write the files of its checkpoint ``name``.

        Raises, on all ranks, before anything is touched: DirectoryInUse; InvalidArgument if a file has that name.
        """
        self._checkpointer.hold()
        self._folder = decided_by_rank0(agreement, partial(self._begun, name))
        self._name = name
        return self._staged

    @property
    def _staged(self) -> str:
        return str(self._storage.path(f"{self._folder}/{self._name}"))

    def _begun(self, name: str) -> str:
        storage = self._storage
        folder = f"{STAGING}/{uuid.uuid4().hex[:12]}"
        if storage.is_file(name):
            raise InvalidArgument(
                f"{storage.path(name)} is a file, expected a checkpoint or nothing; choose another name"
            )
        if self._folder:  # of a save that the trainer did not finish
            storage.remove(self._folder)
        storage.make_dir(f"{folder}/{name}")
        names = [entry.name for entry in storage.list(name)]
        self._former = [file for file in names if any(fnmatchcase(file, pattern) for pattern in self._patterns)]
        if self._former and SCHEDULER in names and MARKER not in names:
            storage.write(f"{name}/{MARKER}", b"1")  # says that it is a checkpoint's, and so may be replaced
        return folder

    def save(
        self, agreement: Agreement, *objects: Any, limit: int | None, best: str | None = None, **options: Any
    ) -> None:
        """Save the files that the ranks have written, with model, optimizer, scheduler and user content.

        All ranks call this, each when it has written its own files, and wait for each other. Of all numbered
        checkpoints ``limit`` stay, if that is not None or 0, of which ``best`` is one.
        """
        self._limit = limit
        self._best = best
        if limit:
            options["retain"] = [Last(limit, best)]
        on_all(agreement, lambda: None)  # until then there are temporary files of ranks that still write
        staged = agreement.gather(list(_files_below(self._staged)))
        files = {name: os.path.join(self._staged, name) for names in staged or () for name in names}
        self._saving = self._checkpointer.save(self._name, *objects, files=files, **{**self._options, **options})

    @as_checkpoint_errors
    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is visible; raise its failure, on all ranks."""
        saving = self._saving
        self._saving = None
        if saving is None:
            return
        try:
            saving.wait()
            if self._checkpointer.topology.rank == 0:
                self._remove_former()
        finally:
            if self._checkpointer.topology.rank == 0:
                with suppress(OSError):  # the next job removes what is left of it
                    self._storage.remove(self._folder)

    def _remove_former(self) -> None:
        """Remove files that the tag has replaced, and the oldest checkpoints of other forms, down to the limit.

        A failure does not fail the save, which is complete.
        """
        storage = self._storage
        try:
            given = given_entries(storage, self._name) if self._former else ()
            for file in self._former:
                if file not in given:
                    storage.remove(f"{self._name}/{file}")
            names = oldest_first(self.directory, self._numbered) if self._limit else []
            surplus = [name for name in names[: -(self._limit or 0)] if name not in (self._best, self._name)]
            for name in surplus:
                tag = tag_of(os.path.join(self.directory, name))
                if tag is None or tag.is_sealed:
                    storage.rename(name, f"{self._folder}/{name}")  # it disappears at once
                    storage.sync_dir("")
        except OSError as error:
            logger.warning("%s: not everything older could be removed: %s", storage.path(self._name), error)

    def close(self) -> None:
        """Wait likewise, and give the directory back."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()


class SavesTags:
    """The common part of trainers that save by `TrainerSaves`."""

    async_save: ClassVar[bool] = False
    """Write the tag in the background; the checkpoint appears when that is done."""

    checkpoint_options: ClassVar[Mapping[str, Any]] = {}
    """Keywords of `nxd_ckpt.save_checkpoint`, such as ``durable`` and ``memory_cap``."""

    any_world_size: ClassVar[bool] = False
    """Load also checkpoints of another number of processes. Random states are then those of ranks that both have."""

    _saves: TrainerSaves | None = None
    """Of the last directory that was saved to."""

    def _saves_in(
        self, agreement: Agreement, directory: str, numbered: str, former: Sequence[str], hidden: bool
    ) -> TrainerSaves:
        """Return the saves to the directory. Those to another one are finished first."""
        if self._saves is not None and self._saves.directory != directory:
            self._close()
        if self._saves is None:
            self._saves = TrainerSaves(agreement, directory, self.checkpoint_options, numbered, former, hidden)
        return self._saves

    def _settle(self) -> None:
        """Wait until the unfinished checkpoint is visible. Raises its failure."""
        if self._saves is not None:
            self._saves.wait()

    def _close(self) -> None:
        """Wait likewise, and give the directory back."""
        saves = self._saves
        self._saves = None
        if saves is not None:
            saves.close()


class _BesideOwn(LocalStorage):
    """A directory of tags in which nothing else lies: the job's own files are in the folder ``own``, except pins."""

    def __init__(self, root: str, own: str, durable: bool) -> None:
        super().__init__(root, durable)
        self._of_job = LocalStorage(own, durable)

    def without_links(self) -> LocalStorage:
        return _BesideOwn(str(self.root.resolve()), str(self._of_job.root.resolve()), self.durable)

    def _at(self, key: str) -> str:
        return self._of_job._at(_below_hidden(key)) if _is_of_job(key) else super()._at(key)

    def _own(self, key: str) -> str:
        return self._of_job._own(_below_hidden(key)) if _is_of_job(key) else super()._own(key)


def _is_of_job(key: str) -> bool:
    return key.partition("/")[0] == HIDDEN and not key.startswith(PINS)


def _below_hidden(key: str) -> str:
    return key.partition("/")[2]


def _own_folder(directory: str, hidden: bool) -> str | None:
    """Return where a job's own files lie beside the ``directory`` of its checkpoints; None: they lie in it.

    They lie beside it as long as nothing is in it, so that a kill in the first save leaves it empty: many scripts
    refuse one that has other entries than checkpoints. Then they stay there until the job ends.
    """
    parent, name = os.path.split(directory)
    own = os.path.join(parent, f".{name}{HIDDEN}")
    may = not os.path.islink(directory) and not is_mount_point(directory) and os.access(parent, os.W_OK | os.X_OK)
    return own if os.path.isdir(own) or (may and (hidden or not LocalStorage(directory).list())) else None


def _files_below(folder: str) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        yield from (os.path.relpath(os.path.join(place, name), folder) for name in sorted(names))


class TrainerTag(NamedTuple):
    """A trainer's checkpoint: the tag of a directory. ``is_sealed``: as version 0.1 wrote it, the directory itself."""

    directory: str
    tag: str
    is_sealed: bool = False

    @property
    def is_complete(self) -> bool:
        return os.path.isfile(os.path.join(self.directory, self.tag, DONE))

    @as_checkpoint_errors
    def verify_files(self) -> None:
        """Compare the trainer's files with their digests at the save.

        Raises:
            PartNotFound, DigestMismatch, MalformedFile: a file is gone, or has other bytes; the message names each.
        """
        storage = LocalStorage(self.directory)
        files = read_seal(storage) if self.is_sealed else manifest_of(storage, self.tag).guests
        problems = list(problems_of(storage, "" if self.is_sealed else self.tag, files))
        note_damage(storage, Identity(storage, self.tag), str(problems[0]) if problems else None)
        if problems:
            raise type(problems[0])("; ".join(map(str, problems)))


def tag_of(place: str) -> TrainerTag | None:
    """Return a checkpoint of ours; None if it is none. It is one even if it has lost files, so that opening it raises.
    """
    if any(os.path.exists(os.path.join(place, name)) for name in (DONE, MANIFEST, INDEX_DIR)):
        return TrainerTag(*os.path.split(os.path.abspath(place)))
    return TrainerTag(place, STATE, is_sealed=True) if os.path.isdir(os.path.join(place, STATE)) else None


def oldest_first(directory: str, pattern: str) -> list[str]:
    """Return the names of checkpoints in ``directory`` that match ``pattern`` as a whole, oldest save first.

    The first group of the pattern is their number. Those that another program wrote keep the place that it gives them.
    The others are in the order of their saves: a run that went on from an earlier one has newer ones of lower numbers.
    """
    names = [entry.name for _, entry in sorted(_numbers(directory, pattern)) if entry.is_dir]
    times: dict[str, float] = {}
    for name in names:
        tag = tag_of(os.path.join(directory, name))
        info = None if tag is None else find_tag(LocalStorage(tag.directory), tag.tag)
        if info is not None and info.ours and info.complete:
            times[name] = info.order_time
    by_time = iter(sorted(times, key=times.__getitem__))
    return [next(by_time) if name in times else name for name in names]


def next_number(directory: str, pattern: str) -> int:
    """Return the number after those of all names in ``directory`` that match ``pattern``."""
    return 1 + max((number for number, _ in _numbers(directory, pattern)), default=-1)


def _numbers(directory: str, pattern: str) -> Iterator[tuple[int, DirEntry]]:
    for entry in LocalStorage(directory).list():
        if match := re.fullmatch(pattern, entry.name):
            yield int(match[1]), entry


def directory_of(path: StrPath) -> str:
    """Return the directory that a trainer's checkpoints are written to or read from; ``~`` is expanded.

    Raises InvalidArgument for a URL of a store, for which the trainer would make a directory of that name.
    """
    with suppress(InvalidArgument):  # a URL that lost a slash
        if not is_url(path):
            return local_path(path)
    raise InvalidArgument(
        f"{os.fspath(path)!r} is a URL: this trainer's checkpoints are written to directories and read from them. Pass "
        "a directory that all ranks share; checkpoint_options = {'tiers': [Tier(DIRECTORY), Tier(URL)]} copies them to "
        "the store, and nxd-ckpt cp copies one back to resume from it"
    )


def require_one_writer(agreement: Agreement, writes: bool) -> None:
    """Raise UnsupportedState on all ranks if one that is not rank 0 ``writes`` the files of the whole job."""

    def require() -> None:
        if writes and agreement.rank:
            raise UnsupportedState(
                "save_on_each_node=True writes a checkpoint on the disk of each node: nxd_ckpt saves one for all "
                "ranks, in a directory that all nodes share. Pass False"
            )

    on_all(agreement, require)


WORLD_SIZE = "world size"


def require_same(where: str, saved: Mapping[str, Any], now: Mapping[str, Any], kind: type[IncompatibleState]) -> None:
    """Raise ``kind`` if a setting of this run differs from the run that saved."""
    for what, value in now.items():
        if saved[what] != value:
            raise kind(
                f"{where} was saved with {what} {saved[what]}, and this run has {value}: it would not be the same run. "
                "Use the same, or begin a new run from its model"
            )


def require_same_setting(where: str, saved: Mapping[str, Any], now: Mapping[str, Any], any_world_size: bool) -> None:
    """Raise IncompatibleState for another precision, or another world size unless ``any_world_size``."""
    if not any_world_size and saved[WORLD_SIZE] != now[WORLD_SIZE]:
        raise IncompatibleState(
            f"{where} was saved with world size {saved[WORLD_SIZE]}, and this run has {now[WORLD_SIZE]}: it would not "
            "be the same run, as each rank has random numbers and data of its own. Use the same, or set any_world_size "
            "to True in a subclass to resume anyway"
        )
    require_same(where, saved, {what: value for what, value in now.items() if what != WORLD_SIZE}, IncompatibleState)


def parameter_names(model: Any, optimizer: Any) -> list[list[str]] | None:
    """Return the names of the optimizer's parameters, by param group; None if one is not the model's."""
    live = dict(model.named_parameters())
    names = {id(live[wrapped]): name for name, wrapped in canonical(live, "the model").items()}
    own_groups = getattr(optimizer, "param_groups", [])  # none of an object that is no optimizer of torch
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in own_groups]
    return groups if groups and all(map(all, groups)) else None
