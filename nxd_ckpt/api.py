"""neuronx_distributed's four functions, with its names, order, defaults and return values.

They keep one `nxd_ckpt.checkpointer.Checkpointer` for each of the last few directories that were saved to.
`finalize_checkpoint` waits for saves in flight, `close_checkpointers` releases directories and memory, and both happen
at exit. A process that ends with a failed save that was never reported exits with code 1.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from typing_extensions import Unpack

from nxd_ckpt.checkpointer import Checkpointer
from nxd_ckpt.commit.retention import Removed
from nxd_ckpt.commit.tier import Tier, checked_tiers
from nxd_ckpt.coordination.at_exit import open_objects, settle_unheld
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.core.option_classes import split_options, takes
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.effects import Event, in_forked_children, logger
from nxd_ckpt.errors import CheckpointError, InvalidArgument, as_checkpoint_errors
from nxd_ckpt.keywords import DirectoryKeywords, LoadCheckpointKeywords, SaveCheckpointKeywords
from nxd_ckpt.live.environment import default_topology, require_all_ranks, topology_of
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT, CheckpointerOptions, DirectoryOptions
from nxd_ckpt.saving.options import SaveOptions
from nxd_ckpt.saving.pending import PendingSave
from nxd_ckpt.storage.urls import StorageOptions, StrPath, normalised
from nxd_ckpt.tag.directory import is_tag
from nxd_ckpt.tiers.tiers import Tiers

_Key = tuple[str, Topology]
_open: OrderedDict[_Key, Checkpointer] = OrderedDict()
"""The one that was saved to last is the last."""
_saving: Counter[_Key] = Counter()
"""Number of calls that are saving with each of them; while there are any, it stays in ``_open``."""
_resumed_from: dict[_Key, str | None] = {}
"""The tags that were loaded last, before there is a Checkpointer in ``_open``."""
_OPEN_AT_ONCE = 4
"""Directories of the same ranks that stay open between saves, each with two threads, and one rank's lease."""
_lock = threading.RLock()  # a signal handler may interrupt its holder, and save itself


def _begin_anew() -> None:
    """Reset the state in a forked child: open handles are its parent's, one of whose threads may have held the lock."""
    global _lock
    _lock = threading.RLock()
    _open.clear()
    _saving.clear()
    _resumed_from.clear()


in_forked_children(_begin_anew)


@as_checkpoint_errors
@takes(SaveOptions, CheckpointerOptions)
def save_checkpoint(
    checkpoint_dir_str: StrPath | None = None,
    tag: Tag | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
    *,
    path: StrPath | None = None,
    tiers: Sequence[Tier] | None = None,
    state: Mapping[str, Any] | None = None,
    rank_content: Any = None,
    tag_values: Mapping[str, Any] | None = None,
    save_overwrite: bool | None = None,
    **options: Unpack[SaveCheckpointKeywords],
) -> PendingSave:
    """Save a checkpoint; every rank calls this with the same arguments.

    Positional parameters are neuronx_distributed's; the keywords are the fields of
    `nxd_ckpt.saving.options.SaveOptions` and, at a directory's first save in a process, of
    `nxd_ckpt.options.checkpointer_options.CheckpointerOptions`. The returned future can be awaited.

    Args:
        checkpoint_dir_str: the directory, created by the first save; or the URL of one in a store (``s3://bucket/run``).
        tag: the checkpoint's name, one directory name such as "step_300"; an int is taken as its digits.
        model: a module, an NxD model (local part), or a state dict; None saves none.
        optimizer: a torch, torch-xla ZeRO-1 or NxD optimizer, or its state dict; None saves none.
        scheduler: anything with ``state_dict()``; None saves none. Rank 0's is saved.
        user_content: plain data of rank 0: numbers, strings, tensors, NumPy arrays, dates, paths, containers of them.
        async_save: return once the state is in host memory; `finalize_checkpoint` waits until tags are visible.
        path, save_overwrite: other names for ``checkpoint_dir_str`` and ``overwrite``; the latter is OLMo-core's.
        tiers: the places that checkpoints go to, such as ``[Tier("/mnt/nvme/run7", keep=2), Tier("s3://bucket/run7",
            every=10)]``; the first is ``checkpoint_dir_str``, which may be left out. They count at a directory's first
            save in a process.
        state: several models and optimizers by name, and anything else with ``state_dict()`` and
            ``load_state_dict()``, such as a grad scaler.
        rank_content: plain data of this rank alone; a load on the same sizes returns it to the same rank. Data
            positions in it (`capture_data_position`) are re-split for other sizes.
        tag_values: values for a tag such as ``"ep{epoch}-of{world_size}"``; variables of the job need none.

    Raises:
        CheckpointError: see `nxd_ckpt.errors`; on every rank, and nothing became visible.
    """
    shared, own = split_options(CheckpointerOptions, options)
    own["overwrite"] = _overwrite(options.get("overwrite"), save_overwrite)
    own |= {"num_workers": num_workers, "use_xser": use_xser, "num_kept_ckpts": num_kept_ckpts}
    own |= {"zero1_optimizer": zero1_optimizer, "use_zero1_dcp": use_zero1_dcp}
    own["avoid_saving_lower_precision_weights"] = avoid_saving_lower_precision_weights
    name = str(tag) if isinstance(tag, int) and not isinstance(tag, bool) else tag  # as with neuronx_distributed
    saved: tuple[Any, ...] = (name, model, optimizer, scheduler, user_content)  # no name is refused, on all ranks
    keywords = {"state": state, "rank_content": rank_content, "async_save": async_save, "tag_values": tag_values, **own}
    with _shared_checkpointer(_directory(checkpoint_dir_str, path, tiers), tiers, shared) as checkpointer:
        return checkpointer.save(*saved, **keywords)


@as_checkpoint_errors
@takes(LoadOptions, DirectoryOptions)
def load_checkpoint(
    path: StrPath | None = None,
    tag: Tag | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
    *,
    checkpoint_dir_str: StrPath | None = None,
    state: Mapping[str, Any] | None = None,
    tiers: Sequence[Tier] | None = None,
    **options: Unpack[LoadCheckpointKeywords],
) -> Any:
    """Load a checkpoint into live objects and return its user content; every rank calls this with the same arguments.

    Positional parameters are neuronx_distributed's; the keywords are the fields of
    `nxd_ckpt.loading.options.LoadOptions` and of `nxd_ckpt.options.checkpointer_options.DirectoryOptions`. Objects that
    are None are not loaded, and empty dicts are filled.

    Args:
        path: the directory or URL; also one tag, or a file or directory of another program (``docs/convert.md``).
        tag: the checkpoint's name, or its step, an int; None takes the latest complete one.
        model: a module or NxD model, of any sizes; or a dict.
        optimizer: an optimizer of the same parameters; or a dict.
        scheduler: anything with ``load_state_dict()``; or a dict.
        checkpoint_dir_str: another name for ``path``.
        state: the objects that were saved as ``state``, by the same names.
        tiers: the places of a save; the newest checkpoint is loaded from the nearest place that has it.

    Returns:
        The user content as it was saved, plain data of any type (hence ``Any``), or None if none was.

    Raises:
        CheckpointError: see `nxd_ckpt.errors`; on every rank, and nothing was changed, unless digests are not
            verified first (see ``verify``): then the error of a load that had begun says so.
        TagReplaced: ``tag`` was removed, or saved again, while it was read. Without ``tag``, the load continues with
            the latest one at that time; with several tiers, with the nearest of that name.
    """
    directory = _directory(path, checkpoint_dir_str, tiers)
    # A handle of its own: loading takes no lease and keeps nothing, but waits for saves in flight there.
    shared, own = split_options(DirectoryOptions, options)
    shared["topology"] = topology = _topology(options)
    with _lock:
        writing = _open.get((normalised(directory), topology))
    if writing is not None and tiers is not None and tuple(tiers) != writing.tiers:
        raise InvalidArgument(f"{directory} is saved to with tiers={list(writing.tiers)}: pass the same ones to load")
    if writing is not None:
        _warn_of_others(writing, shared)
    checkpointer = writing or Checkpointer(directory, tiers=tiers, **shared)
    own = {"progress": True, **own, "num_workers": num_workers, "strict": strict, "use_zero1_dcp": use_zero1_dcp}
    loaded = checkpointer.load_objects(tag, (model, optimizer, scheduler, state), own)
    if writing is None:
        _resumed_from[normalised(directory), topology] = loaded.tag
    return loaded.user_content


@as_checkpoint_errors
@takes()
def has_checkpoint(
    checkpoint_dir_str: StrPath | None = None,
    *,
    path: StrPath | None = None,
    storage_options: StorageOptions | None = None,
    tiers: Sequence[Tier] | None = None,
) -> bool:
    """Return whether the directory, or any of the ``tiers``, holds a complete tag, or is one.

    It is the one that ``load_checkpoint(tag=None)`` would load; files of other forms, which that reads too, do not
    count. If the first tier is per host, all ranks call this.

    Raises PartLost, like the load, if every complete one lost files with a host.
    """
    directory = _directory(checkpoint_dir_str, path, tiers)
    places = Tiers(directory, tiers, None, CheckpointerOptions(storage_options=storage_options))
    if not places.per_host:
        return places.have_checkpoint(None) or (places.place is not None and is_tag(places.first))
    topology = default_topology()
    return places.have_checkpoint(meet(topology.rank, topology.world_size, DEFAULT_TIMEOUT, "has_checkpoint"))


@as_checkpoint_errors
@takes(DirectoryOptions)
def remove_checkpoint(
    path: StrPath,
    tag: Sequence[Tag] | Tag,
    *,
    pinned: bool = False,
    dry_run: bool = False,
    **options: Unpack[DirectoryKeywords],
) -> Removed:
    """Remove one tag or several, once no save into the directory is in flight; every rank calls this.

    It removes all of them or, if one is absent, pinned or no checkpoint, none. Tags may be incomplete or damaged. The
    keywords are the fields of `nxd_ckpt.options.checkpointer_options.DirectoryOptions`.

    Args:
        path: the directory or URL.
        tag: the checkpoint's name, or a list of names.
        pinned: remove pinned tags too.
        dry_run: remove nothing, and return what would be removed.

    Returns:
        On rank 0 the names that are gone, or why each other one stays. It is true if tags are gone.

    Raises:
        DirectoryInUse: another live job saves there.
    """
    tags = tag if isinstance(tag, tuple) else [tag]
    topology = options["topology"] = _topology(options)
    with _lock:
        writing = _open.get((normalised(path), topology))
    if writing is not None and writing.is_open:
        return writing.remove(*tags, pinned=pinned, dry_run=dry_run)
    with Checkpointer(path, **options) as checkpointer:
        return checkpointer.remove(*tags, pinned=pinned, dry_run=dry_run)


@as_checkpoint_errors
def remove_later(path: StrPath, tags: Sequence[Tag], topology: Topology | None = None) -> Event | None:
    """Remove tags of a directory that this process saves to as `Checkpointer.remove_later` does; None elsewhere."""
    with _lock:
        writing = _open.get((normalised(path), _topology({"topology": topology})))
    return None if writing is None else writing.remove_later(*tags)


def finalize_checkpoint() -> None:
    """Wait for every save in flight in this process; raise the first failure that was not raised before."""
    _on_each(Checkpointer.wait, _checkpointers())


def close_checkpointers() -> None:
    """Finish saves in flight and release directories and staging memory; raise the first failure.

    Of every Checkpointer of this process, also of those that the caller made. Each may save again: then it takes its
    directory again.
    """
    try:
        settle_unheld(lambda: None)
        made = [each for each in open_objects() if isinstance(each, Checkpointer)]
        _on_each(Checkpointer.release, [*made, *(each for each in _checkpointers() if each not in made)])
    finally:
        _forget_closed()


@contextmanager
def _shared_checkpointer(
    directory: StrPath, tiers: Sequence[Tier] | None, options: dict[str, Any]
) -> Iterator[Checkpointer]:
    """Context in which the one Checkpointer of a directory stays open.

    The first save makes it, with its ``options``. It closes others that were not saved to for long.
    """
    require_all_ranks(default_topology(), options.get("topology"), options.get("process_group"))
    topology = options["topology"] = _topology(options)
    key = normalised(directory), topology
    with _lock:
        checkpointer = _open.get(key) or _open.setdefault(key, Checkpointer(directory, tiers=tiers, **options))
        _open.move_to_end(key)
        checkpointer.resumed_from = _resumed_from.pop(key, None) or checkpointer.resumed_from
        _saving[key] += 1
        surplus = [] if checkpointer.is_open else _idle_longest(topology)
    try:
        _warn_of_others(checkpointer, options)
        for idle in surplus:
            idle.rest()
        _forget_closed()
        yield checkpointer
    finally:
        with _lock:
            _saving[key] -= 1
            if not _saving[key]:
                _saving.pop(key, None)  # a handler that has just saved here may have done it


def _warn_of_others(checkpointer: Checkpointer, options: Mapping[str, Any]) -> None:
    """Warn, on rank 0, of ``options`` other than those that the directory's first save was passed, which count."""
    in_force, asked = checkpointer.options, replace(checkpointer.options, **options)
    changes = {field: (getattr(asked, field.name), getattr(in_force, field.name)) for field in fields(in_force)}
    others = [
        f"{field.name}={value} ({stays} stays)" if field.repr else field.name
        for field, (value, stays) in changes.items()
        if value != stays
    ]
    if others and not checkpointer.topology.rank:
        logger.warning(
            "%s: %s has no effect, since those of the directory's first save count; to change them, call "
            "nxd_ckpt.close_checkpointers() on all ranks before",
            checkpointer.storage.url,
            first_of(others),
        )


def _idle_longest(topology: Topology) -> list[Checkpointer]:
    """Return the open ones that make room for one more; the same on all of their ranks, which make the same calls."""
    idle = [each for key, each in _open.items() if key[1] == topology and each.may_rest and not _saving[key]]
    return idle[: max(len(idle) - (_OPEN_AT_ONCE - 1), 0)]


def _forget_closed() -> None:
    """Forget those that hold nothing, unless a failure is still to be raised or another thread saves with them."""
    with _lock:
        for key, checkpointer in list(_open.items()):
            if not (_saving[key] or checkpointer.is_open or checkpointer.has_unreported):
                del _open[key]


def _on_each(action: Callable[[Checkpointer], None], checkpointers: Sequence[Checkpointer]) -> None:
    """Call ``action`` on every checkpointer, whatever the others raise; raise the first error at the end."""
    failed: list[CheckpointError] = []
    for checkpointer in checkpointers:
        try:
            action(checkpointer)
        except CheckpointError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _checkpointers() -> list[Checkpointer]:
    with _lock:
        return list(_open.values())


def _topology(options: Mapping[str, Any]) -> Topology:
    return topology_of(options.get("topology"), options.get("process_group"))


def _directory(first: StrPath | None, other: StrPath | None = None, tiers: Sequence[Tier] | None = None) -> StrPath:
    if first is None and other is None and tiers is not None:
        return checked_tiers(None, tiers)[0].path
    if first is None and other is None:
        raise InvalidArgument("the checkpoint directory is None: pass a path or a URL")
    if first is not None and other is not None:
        raise InvalidArgument("pass the checkpoint directory once: as the first argument or by name")
    return first if first is not None else other  # type: ignore[return-value]


def _overwrite(ours: bool | None, other: bool | None) -> bool | None:
    if ours is not None and other is not None:
        raise InvalidArgument("pass overwrite= or save_overwrite=, which is another name for it, not both")
    return ours if ours is not None else other
