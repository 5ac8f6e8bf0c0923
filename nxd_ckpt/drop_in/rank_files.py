"""NxD's ``parallel_layers.save`` and ``load``: a file of the caller's dict for each model-parallel rank, and no tag.

The methods of NxD's ``NeuronCheckpointIO``, its strategy's plug-in for Lightning, do the same. The class stays NxD's,
since the strategy takes no other: only its methods are replaced.

The files are NxD's: ``DIR/tp_rank_00_pp_rank_00/checkpoint.pt``, or with ``save_xser`` the file
``DIR/tp_rank_00_pp_rank_00`` with ``.tensors/`` beside it. They are written in a hidden directory first. Once all
ranks' files are there, rank 0 notes that, and moves them into place. If it is killed meanwhile, the next save or load
moves the rest. So what a load finds is one save's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any

import torch

from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.drop_in import functions
from nxd_ckpt.drop_in.functions import plain
from nxd_ckpt.errors import CheckpointNotFound, KeyMismatch, PartLost, as_checkpoint_errors
from nxd_ckpt.formats.tensors import TensorReference, TensorStub, iter_tensors, map_tensors
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.layouts.files import MissingTensor, TagFiles
from nxd_ckpt.live import torch_xla
from nxd_ckpt.live.environment import topology_of
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.output.image_writer import write_images
from nxd_ckpt.saving.planned_file import PlannedFile
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.reading import LeafReader

_NEW = ".nxd_ckpt.new"
"""Hidden directory of files that are not in place yet."""
_READY = f"{_NEW}/ready"
"""Its note that they are complete."""
_OLD = ".nxd_ckpt.old"
"""Hidden directory of what they replace."""

original_load: Callable[..., Any] | None = None
"""NxD's own ``load``, for whole files that it cuts for each rank."""


@as_checkpoint_errors
@takes()
def save(
    checkpoint: Any,
    output_dir: StrPath,
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Save ``checkpoint``, a dict of anything, for each model-parallel rank; every rank calls this.

    Args:
        checkpoint: state dicts, numbers and so on. Values that a load would refuse are left out, with a warning.
        output_dir: the directory; files of other programs in it stay.
        save_serially: of no effect.
        save_xser: write each tensor on an XLA device into a file of its own.
        down_cast_bf16: save float32 tensors as bfloat16.
        master_dp_only: save the dict of the first data-parallel rank, else that of each.

    Raises:
        CheckpointError: on every rank. A load then finds what was there before, or all of what was to be saved.
    """
    if functions.nothing_is_saved(os.fspath(output_dir)):
        return
    if not functions.settings.options.get("trust_pickle"):
        checkpoint = functions.readable(checkpoint, "checkpoint")
    topology = _topology()
    storage = LocalStorage(output_dir, functions.settings.options.get("durable", True))
    agreement = _meet(topology, f"save to {output_dir}")
    decided_by_rank0(agreement, lambda: _begin(storage))
    writes = not master_dp_only or topology.dp_rank == 0
    name = _name(topology, master_dp_only)
    write = partial(_write, storage, name, checkpoint, save_xser, down_cast_bf16)
    on_all(agreement, write if writes else lambda: None)
    decided_by_rank0(agreement, lambda: _publish(storage))


@as_checkpoint_errors
@takes()
def load(
    chkpt_path: StrPath,
    model: Any = None,
    model_or_optimizer: Any = None,
    model_key: str | None = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    weights_only: bool = False,
) -> Any:
    """Load what `save`, or NxD, saved for this rank; every rank calls this.

    Args:
        chkpt_path: the directory.
        model: another name for ``model_or_optimizer``.
        model_or_optimizer: a module or optimizer that ``load_state_dict`` is called on.
        model_key: the key of its state in the dict; None if the whole dict is its state.
        load_xser: of no effect: the files show their form.
        sharded: False for one file of all ranks, which NxD loads.
        strict: whether a module's names must be those of the file.
        master_dp_only: as for `save`.
        weights_only: of no effect: only plain data is loaded, unless ``trust_pickle`` was given to ``install``.

    Returns:
        The rest of the dict, its tensors on the CPU; None if ``model_key`` is.

    Raises:
        CheckpointError: on every rank: no such directory, damage, names that do not match.
    """
    target = model if model is not None else model_or_optimizer
    if not sharded and original_load is not None:
        return original_load(
            chkpt_path, model_or_optimizer=target, model_key=model_key, load_xser=load_xser, sharded=False,
            strict=strict, master_dp_only=master_dp_only, weights_only=weights_only,
        )  # fmt: skip
    topology = _topology()
    storage = LocalStorage(chkpt_path)
    agreement = _meet(topology, f"load of {chkpt_path}")
    decided_by_rank0(agreement, lambda: _finish(storage))
    content = on_all(agreement, lambda: _read(storage, _name(topology, master_dp_only)))
    if target is None:
        return content
    state = on_all(agreement, lambda: content if model_key is None else _taken(content, model_key, storage.url))
    is_optimizer = isinstance(target, torch.optim.Optimizer)
    on_all(agreement, lambda: target.load_state_dict(state, **({} if is_optimizer else {"strict": strict})))
    return None if model_key is None else content


@as_checkpoint_errors
def remove(path: StrPath) -> None:
    """Remove such a directory, which no load finds half removed. An absent one is no error.

    Rank 0's call removes it, and waits for no other: Lightning calls this on the first rank of each host only.
    """
    if _topology().rank != 0:
        return
    folder, _, name = os.path.abspath(path).rpartition("/")
    storage = LocalStorage(folder)
    hidden = f".{name}.removed"
    storage.remove(hidden)
    with suppress(FileNotFoundError):
        storage.rename(name, hidden)
    storage.remove(hidden)


def _topology() -> Topology:
    options = functions.settings.options
    return topology_of(options.get("topology"), options.get("process_group"))


def _meet(topology: Topology, call: str) -> Agreement:
    timeout = functions.settings.options.get("timeout", DEFAULT_TIMEOUT)
    agreement = meet(topology.rank, topology.world_size, timeout, call, topology.members)
    return agreement or SingleProcessAgreement()


def _name(topology: Topology, master_dp_only: bool) -> str:
    name = f"tp_rank_{topology.tp_rank:02d}_pp_rank_{topology.pp_rank:02d}"
    return name if master_dp_only else f"{name}_dp_rank_{topology.dp_rank:02d}"


def _begin(storage: LocalStorage) -> None:
    """Finish an interrupted save, or drop what it left."""
    _finish(storage)
    storage.remove(_NEW)
    storage.make_dir(_NEW)


def _write(storage: LocalStorage, name: str, checkpoint: Any, save_xser: bool, down_cast_bf16: bool) -> None:
    tensors = {id(tensor): tensor for _, tensor in iter_tensors(checkpoint, torch.Tensor)}
    torch_xla.sync(tensors.values())
    on_host = dict(zip(tensors, torch_xla.to_cpu(list(tensors.values())), strict=True))
    files: list[PlannedFile] = []

    def saved(tensor: torch.Tensor) -> torch.Tensor | TensorReference:
        value = on_host[id(tensor)].contiguous()
        if down_cast_bf16 and value.dtype == torch.float32:
            value = value.to(torch.bfloat16)
        if not (save_xser and torch_xla.is_xla(tensor)):
            return value
        files.append(PlannedFile(f"{name}.tensors/tensor_{len(files)}.pt", image_of(value)))
        return TensorReference(len(files) - 1)

    tree = map_tensors(checkpoint, saved, torch.Tensor)
    files.append(PlannedFile(name if save_xser else f"{name}/checkpoint.pt", image_of(tree)))
    if save_xser:
        storage.make_dir(f"{_NEW}/{name}.tensors")
    with closing(LeafReader(TagFiles(storage, _NEW), {})) as nothing_to_read:
        write_images(nothing_to_read, storage, _NEW, [files], lambda nbytes: None)


def _publish(storage: LocalStorage) -> None:
    """Move complete files into place, of all ranks; `_finish` does the same after an interruption."""
    storage.sync_dir(_NEW)
    storage.write(_READY, b"1")
    _finish(storage)


def _finish(storage: LocalStorage) -> None:
    """Move the rest of complete files into place, each behind what it replaces; each step can be made again."""
    if not storage.is_file(_READY):
        return
    storage.make_dir(_OLD)
    for name, _ in storage.list(_NEW):
        new = f"{_NEW}/{name}"
        if new != _READY:
            if storage.is_dir(name) or storage.is_file(name):
                storage.remove(f"{_OLD}/{name}")
                storage.rename(name, f"{_OLD}/{name}")
            storage.rename(new, name)
    storage.sync_dir("")
    storage.remove(_READY)
    storage.remove(_NEW)
    storage.remove(_OLD)


def _read(storage: LocalStorage, name: str) -> Any:
    """Return the content of a rank's file, with the digest of each tensor compared."""
    files = TagFiles(storage, "", trust_pickle=bool(functions.settings.options.get("trust_pickle")))
    file = f"{name}/checkpoint.pt" if storage.is_dir(name) else name
    if not storage.is_file(file):
        present = first_of(entry.name for entry in storage.list())
        raise CheckpointNotFound(f"{storage.url}: no {name}, the file of this rank; found {present or 'nothing'}")
    tree = files.joined(file)
    missing = next(iter_tensors(tree, MissingTensor), None)
    if missing is not None:
        raise PartLost(f"{storage.url}/{missing[1].file} does not exist: the checkpoint is damaged")
    return map_tensors(tree, files.read, TensorStub)


def _taken(content: Any, key: str, url: str) -> Any:
    if not isinstance(content, dict) or key not in content:
        kind = first_of(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise KeyMismatch(f"{url}: expected the state under {key!r} (model_key=), found {kind}")
    return content.pop(key)


def save_checkpoint(
    self: Any,
    checkpoint: Mapping[str, Any],
    path: StrPath,
    storage_options: Any | None = None,
    master_dp_only: bool = True,
) -> None:
    """Save Lightning's dict into the directory ``path``. Raises TypeError for ``storage_options``, as NxD."""
    if storage_options is not None:
        raise TypeError(f"{type(self).__name__} saves to file systems: expected storage_options=None")
    save(plain(checkpoint), path, save_xser=self.save_load_xser, master_dp_only=master_dp_only)


def load_checkpoint(self: Any, checkpoint_path: StrPath, master_dp_only: bool = True) -> Any:
    """Return this rank's dict, its tensors on the CPU."""
    return load(checkpoint_path, master_dp_only=master_dp_only)


def remove_checkpoint(self: Any, path: StrPath) -> None:
    """Remove the directory; rank 0 does it, wherever else this is called."""
    remove(path)
