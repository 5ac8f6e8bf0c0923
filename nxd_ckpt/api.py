"""neuronx_distributed's four functions, with its names, order, defaults and return values.

They keep one :class:`~nxd_ckpt.checkpointer.Checkpointer` per directory for the whole process: the only state that
this package holds globally. :func:`finalize_checkpoint` waits for what is in flight, :func:`close_checkpointers` gives
directories and memory back, and both happen at exit. A process that ends with a save that failed and was never
reported exits with code 1.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Union

from nxd_ckpt.checkpointer import DEFAULT_TIMEOUT, Checkpointer
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import CheckpointError, InvalidArgument, as_checkpoint_errors
from nxd_ckpt.layout.mappings import Given
from nxd_ckpt.runtime.environment import default_topology
from nxd_ckpt.runtime.forks import in_forked_children
from nxd_ckpt.runtime.ignoring import IgnoreKeys
from nxd_ckpt.runtime.load.options import Verify
from nxd_ckpt.runtime.tag.choosing import settled_tags
from nxd_ckpt.storage.urls import is_url, local_path, open_storage

_Key = tuple[str, Topology]
_open: dict[_Key, Checkpointer] = {}
_saving: Counter[_Key] = Counter()
"""How many calls are saving with each of them: it is not to be forgotten under their hands."""
_lock = threading.RLock()  # a signal handler may interrupt its holder, and save itself


def _begin_anew() -> None:
    """In a forked child: what is open is its parent's, one of whose threads may have held the lock."""
    global _lock
    _lock = threading.RLock()
    _open.clear()
    _saving.clear()


in_forked_children(_begin_anew)
Directory = Union[str, "os.PathLike[str]"]


@as_checkpoint_errors()
def save_checkpoint(
    checkpoint_dir_str: Directory | None = None,
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
    path: Directory | None = None,
    rank_content: Any = None,
    topology: Topology | None = None,
    run_id: str | None = None,
    param_names: Sequence[Sequence[str]] | None = None,
    partitions: Mapping[str, Partition] | None = None,
    trust_pickle: bool = False,
    durable: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
    memory_cap: int | None = None,
    overwrite: bool | None = None,
    save_overwrite: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys | None = None,
    tag_values: Mapping[str, Any] | None = None,
) -> None:
    """Save a checkpoint; every rank calls this with the same arguments.

    Positional parameters are neuronx_distributed's. With ``async_save=True`` this returns once the state is copied to
    host memory; the tag becomes visible by itself, and :func:`finalize_checkpoint` waits for it.

    Args:
        checkpoint_dir_str: the directory, created by the first save; or the URL of one in a store (``s3://bucket/run``).
        tag: the checkpoint's name, one directory name such as "step_300"; an int is taken as its digits.
        model: a module, an NxD model (local part), or a state dict; None saves none.
        optimizer: a torch, torch-xla ZeRO-1 or NxD optimizer, or its state dict; None saves none.
        scheduler: anything with ``state_dict()``; None saves none. Rank 0's is saved.
        user_content: plain data of rank 0: numbers, strings, tensors, NumPy arrays, dates, paths, containers of them.
        num_workers: ranks of a host that write at the same time; without effect with ``use_xser``.
        use_xser: a file per tensor, shared out among data-parallel replicas.
        num_kept_ckpts: complete tags to keep, at least 1; older ones are removed. None or -1 keeps all.
        async_save: return once the state is copied, and write in the background.
        zero1_optimizer: the optimizer passed as a dict is a ZeRO-1 shard. Live optimizers are recognised.
        use_zero1_dcp: a ZeRO-1 optimizer becomes a torch DCP directory.
        avoid_saving_lower_precision_weights: leave out model weights that the optimizer's master weights stand for.
        path: another name for ``checkpoint_dir_str``.
        rank_content: plain data of this rank alone; a load on the same sizes gives it back to the same rank.
        topology: this rank's place, in place of NxD's parallel state.
        run_id: joins ranks without a process group: the same on all, new for every launch.
        param_names: the optimizer's parameter names, per param group, where no live model tells them.
        partitions: how parameters are cut over ranks, by name, where their attributes were lost.
        trust_pickle: allow content that only an unsafe load can read back.
        durable: fsync everything before the tag becomes visible.
        timeout: seconds without any progress after which a rank counts as lost.
        memory_cap: bytes of host memory that this rank may use for staging; by default its share of what is free.
        overwrite: whether a tag of this name may be replaced; None does on file systems, and refuses on stores.
        save_overwrite: another name for ``overwrite``, OLMo-core's.
        storage_options: what a URL is opened with, as fsspec and s3fs call it; neither logged nor saved.
        progress: show a bar on rank 0's terminal for what takes longer than two seconds.
        weights_only: save the model and nothing else, whatever else is given.
        ignore_keys: what is left out, as of a load: globs over names, or a function of all names.
        tag_values: what fills a tag such as ``"ep{epoch}-ba{batch}"``; without them braces are plain characters.

    ``topology``, ``run_id``, ``durable``, ``timeout``, ``memory_cap``, ``storage_options`` and ``progress`` count at a
    directory's first save in a process.

    Raises:
        CheckpointError: see :mod:`nxd_ckpt.errors`; on every rank, and nothing became visible.
    """
    directory = _directory(checkpoint_dir_str, path)
    key = (_resolved(directory), topology or default_topology())

    def made() -> Checkpointer:
        return Checkpointer(
            directory,
            topology=key[1],
            run_id=run_id,
            durable=durable,
            timeout=timeout,
            memory_cap=memory_cap,
            storage_options=storage_options,
            progress=progress,
        )

    with _kept(key, made) as checkpointer:
        checkpointer.save(
            "" if tag is None else tag,  # refused there, where the refusal reaches all ranks
            model,
            optimizer,
            scheduler,
            user_content,
            rank_content=rank_content,
            async_save=async_save,
            tag_values=tag_values,
            num_workers=num_workers,
            use_xser=use_xser,
            num_kept_ckpts=num_kept_ckpts,
            zero1_optimizer=zero1_optimizer,
            use_zero1_dcp=use_zero1_dcp,
            avoid_saving_lower_precision_weights=avoid_saving_lower_precision_weights,
            param_names=param_names,
            partitions=partitions,
            trust_pickle=trust_pickle,
            overwrite=_overwrite(overwrite, save_overwrite),
            weights_only=weights_only,
            ignore_keys=ignore_keys,
        )


@as_checkpoint_errors()
def load_checkpoint(
    path: Directory | None = None,
    tag: Tag | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
    *,
    checkpoint_dir_str: Directory | None = None,
    rank_content: dict[Any, Any] | None = None,
    topology: Topology | None = None,
    param_names: Sequence[Sequence[str]] | None = None,
    saved_param_names: Sequence[Sequence[Sequence[str]]] | None = None,
    partitions: Mapping[str, Partition] | None = None,
    verify: Verify | None = None,
    share_reads: bool | None = None,
    pre_download: bool = False,
    work_dir: Directory | None = None,
    trust_pickle: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
    mapping: Given = None,
    kv_size_multiplier: int = 1,
    hardware: str = "trn1",
    key_mapping: Mapping[str, str] | None = None,
    prefix: str = "",
    ignore_keys: IgnoreKeys | None = None,
    load_weights_only: bool = False,
    strict_model_weights: bool | None = None,
) -> Any:
    """Load a checkpoint into live objects and return its user content; every rank calls this with the same arguments.

    Positional parameters are neuronx_distributed's. Only what is not None is loaded, and empty dicts are filled.
    :class:`~nxd_ckpt.runtime.load.options.LoadOptions` says more of the options.

    Args:
        path: the directory or URL; also one of Hugging Face's, from which live models load (``Checkpointer.load``).
        tag: the checkpoint's name, a string or an int; None takes the latest complete one.
        model: a module or NxD model, of any sizes; or a dict.
        optimizer: an optimizer of the same parameters; or a dict.
        scheduler: anything with ``load_state_dict()``; or a dict.
        num_workers: accepted for the sake of existing scripts, without effect.
        strict: names that are missing or unexpected in the model are an error, else skipped with a warning.
        use_zero1_dcp: accepted likewise; the format is detected.
        checkpoint_dir_str: another name for ``path``.
        rank_content: an empty dict, filled with what this rank saved for itself; not on other sizes.
        topology: this rank's place, in place of NxD's parallel state. With it one process without a process group
            loads what that rank would.
        param_names: the optimizer's parameter names, per param group, where no live model tells them.
        saved_param_names: the same as when it was saved, per pipeline stage, for tags that do not say it (NxD's).
        partitions: how live parameters are cut over ranks, by name, where their attributes were lost.
        verify: True verifies all digests before anything changes, "reading" as the bytes arrive, False none; None is
            True on file systems and "reading" on stores.
        share_reads: of data-parallel replicas one reads each tensor and broadcasts it; None measures which is faster.
        pre_download: first download the files that this rank needs to a local disk, and load from there.
        work_dir: the local directory for that.
        trust_pickle: unpickle objects of any class: only for checkpoints that you trust like your own code.
        timeout: seconds without any progress after which a rank counts as lost.
        storage_options: what a URL is opened with, as fsspec and s3fs call it.
        progress: show a bar on rank 0's terminal for what takes longer than two seconds.
        mapping: of a Hugging Face directory: a shipped mapping's name, a JSON file or document; None chooses.
        kv_size_multiplier: how often the live model keeps each key-value head, of a Hugging Face directory.
        hardware: "trn1" or "trn2": the order of those copies.
        key_mapping: live names to names in the checkpoint.
        prefix: what other live names have before them in the checkpoint.
        ignore_keys: globs over names, or a function of all names: what keeps its live value.
        load_weights_only: the model and nothing else, also where the others are given.
        strict_model_weights: ``strict`` for the model's names alone; None is as ``strict``.

    Returns:
        The user content as it was saved, plain data of any type (hence ``Any``), or None if none was.

    Raises:
        CheckpointError: see :mod:`nxd_ckpt.errors`; on every rank, and nothing was changed, unless digests are not
            verified first (see ``verify``): then the error of a load that had begun says so.
        TagReplaced: ``tag`` was removed, or saved anew, while it was read. Without ``tag``, the load goes on with the
            latest one that there is then.
    """
    directory = _directory(path, checkpoint_dir_str)
    # A handle of its own: loading takes no lease and keeps nothing, but waits for what is in flight there.
    where = topology or default_topology()
    with _lock:
        writing = _open.get((_resolved(directory), where))
    checkpointer = writing or Checkpointer(
        directory, topology=where, timeout=timeout, storage_options=storage_options
    )
    return checkpointer.load(
        tag,
        model,
        optimizer,
        scheduler,
        strict=strict,
        num_workers=num_workers,
        use_zero1_dcp=use_zero1_dcp,
        rank_content=rank_content,
        param_names=param_names,
        saved_param_names=saved_param_names,
        partitions=partitions,
        verify=verify,
        share_reads=share_reads,
        pre_download=pre_download,
        work_dir=work_dir,
        trust_pickle=trust_pickle,
        progress=progress,
        mapping=mapping,
        kv_size_multiplier=kv_size_multiplier,
        hardware=hardware,
        key_mapping=key_mapping,
        prefix=prefix,
        ignore_keys=ignore_keys,
        load_weights_only=load_weights_only,
        strict_model_weights=strict_model_weights,
    )


@as_checkpoint_errors()
def has_checkpoint(
    checkpoint_dir_str: Directory | None = None,
    *,
    path: Directory | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the directory holds a complete checkpoint, one that ``load_checkpoint(tag=None)`` would load."""
    storage = open_storage(_directory(checkpoint_dir_str, path), storage_options=storage_options)
    return any(info.complete for info in settled_tags(storage))


def finalize_checkpoint() -> None:
    """Wait for every save in flight in this process; raise what failed and was not raised before."""
    _on_each(Checkpointer.wait)


def close_checkpointers() -> None:
    """Finish what is in flight and give directories and staging memory back; raise what failed."""
    try:
        _on_each(Checkpointer.close)
    finally:
        with _lock:
            for key, checkpointer in list(_open.items()):
                if not (_saving[key] or checkpointer.is_open):  # else another thread saves there
                    del _open[key]


@contextmanager
def _kept(key: _Key, made: Callable[[], Checkpointer]) -> Iterator[Checkpointer]:
    """The one Checkpointer of a directory, which within is not forgotten."""
    with _lock:
        checkpointer = _open.get(key) or _open.setdefault(key, made())
        _saving[key] += 1
    try:
        yield checkpointer
    finally:
        with _lock:
            _saving[key] -= 1
            if not _saving[key]:
                _saving.pop(key, None)  # a handler that has just saved here may have done it


def _on_each(action: Callable[[Checkpointer], None]) -> None:
    """``action`` on every checkpointer, whatever the others raise; the first error is raised at the end."""
    failed: list[CheckpointError] = []
    for checkpointer in _checkpointers():
        try:
            action(checkpointer)
        except CheckpointError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _checkpointers() -> list[Checkpointer]:
    with _lock:
        return list(_open.values())


def _directory(first: Directory | None, other: Directory | None) -> Directory:
    if (first is None) == (other is None):
        raise InvalidArgument("pass the checkpoint directory once: as the first argument or by name")
    directory = first if first is not None else other
    if not isinstance(directory, (str, os.PathLike)):
        raise InvalidArgument(f"the checkpoint directory must be a string or path, found {type(directory).__name__}")
    return directory


def _overwrite(ours: bool | None, other: bool | None) -> bool | None:
    if ours is not None and other is not None:
        raise InvalidArgument("pass overwrite= or save_overwrite=, which is another name for it, not both")
    return ours if ours is not None else other


def _resolved(directory: Directory) -> str:
    """The same for all ways to write a place, as far as that can be told."""
    return os.fspath(directory).rstrip("/") if is_url(directory) else os.path.abspath(local_path(directory))
