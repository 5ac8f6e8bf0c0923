"""Directories that are no directories of tags: what they are, by the names in them, and what to do with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from fnmatch import filter as matching
from typing import NamedTuple

from nxd_ckpt.core.names import DONE, MANIFEST, MARKER
from nxd_ckpt.layouts import rank_items
from nxd_ckpt.layouts.weight_files import ADAPTERS, has_weights, torch_files
from nxd_ckpt.storage.base import Storage

_DEPTH, _DIRECTORIES = 4, 100
"""Levels, and directories, below the one that was named, in which checkpoints are looked for."""


class _Kind(NamedTuple):
    is_present: Callable[[Set[str]], object]
    """Returns whether a directory of these files is of this kind."""
    text: str
    """The kind in words, with the directory's path or URL as ``{url}``."""


_LOADS = "load_checkpoint({url!r}, model=model) loads it, and nxd-ckpt inspect {url} shows it"
_ONE_FILE = _Kind(lambda files: len(torch_files(files)) == 1, f"it holds one file of torch.save: {_LOADS}")
_KINDS = (
    _Kind(
        lambda files: ".metadata" in files,
        f"it is a torch DCP checkpoint: {_LOADS}",
    ),
    _Kind(
        rank_items.is_present,
        f"it is a checkpoint of torch_checkpointing: {_LOADS}",
    ),
    _Kind(
        lambda files: files & {"trainer_state.json", "training_args.bin"},
        "it is a checkpoint of transformers' Trainer: resume from it with nxd_ckpt.integrations.transformers, whose "
        "own nxd-ckpt verify {url} compares with their digests; load_checkpoint with model= alone and without a tag "
        "loads its weights",
    ),
    _Kind(
        lambda files: matching(files, "random_states_*.pkl"),
        "it is a checkpoint of accelerate: resume from it with nxd_ckpt.integrations.accelerate, whose own nxd-ckpt "
        "verify {url} compares with their digests",
    ),
    _Kind(
        lambda files: matching(files, "*_model_states.pt") or matching(files, "*_optim_states.pt"),
        "it is a checkpoint of DeepSpeed: its zero_to_fp32.py makes weights of it that nxd-ckpt convert takes",
    ),
    _Kind(
        lambda files: not files.isdisjoint(ADAPTERS),
        "it is a PEFT adapter, without its base model: peft loads it onto that",
    ),
    _Kind(
        has_weights,
        f"it is a model in Hugging Face's form: {_LOADS}",
    ),
    _Kind(
        lambda files: matching(files, "*.distcp"),
        "it holds files of torch DCP, but not .metadata, which torch DCP writes last: the save was interrupted",
    ),
    _Kind(
        lambda files: files & {"_CHECKPOINT_METADATA", "manifest.ocdbt"},
        "it is a checkpoint of Orbax, for JAX: restore it there, and save its arrays with safetensors.flax.save_file",
    ),
    _Kind(
        lambda files: "model_optim_rng.pt" in files,
        "it is of one rank of Megatron-LM, whose own converter writes Hugging Face's form",
    ),
    _Kind(
        lambda files: len(matching(files, "*.ckpt")) > 1,
        "it holds checkpoint files of Lightning: pass one of them, or resume with nxd_ckpt.integrations.lightning",
    ),
    _Kind(
        lambda files: len(torch_files(files)) > 1,
        "it holds several files of torch.save: pass one of them",
    ),
    _ONE_FILE,
)


_TAG = _Kind(lambda files: DONE in files and files & {MANIFEST, MARKER}, "it holds tags: nxd-ckpt list {url}")


def described(files: Set[str], url: str) -> str | None:
    """Describe a directory of these files, with the call that reads it; None if it is unknown."""
    kind = _kind_of(files)
    return None if kind is None else kind.text.format(url=url)


def holds_one_file(files: Set[str]) -> bool:
    """Return whether a directory of these files is no more than one file of torch.save."""
    return _kind_of(files) is _ONE_FILE


def described_below(storage: Storage) -> str | None:
    """Describe the directories below that hold tags, or checkpoints of others; None if a few levels have none."""
    found: dict[_Kind, list[str]] = {}
    waiting = deque([""])
    directories = 0
    while waiting and directories < _DIRECTORIES:
        key = waiting.popleft()
        directories += 1
        entries = storage.list(key)
        files = {entry.name for entry in entries if not entry.is_dir}
        kind = _TAG if _TAG.is_present(files) else _kind_of(files)
        if kind is not None:
            place = key.rpartition("/")[0] if kind is _TAG else key
            if place and place not in found.setdefault(kind, []):
                found[kind].append(place)
        elif key.count("/") < _DEPTH:
            folders = (entry.name for entry in entries if entry.is_dir and not entry.name.startswith("."))
            waiting.extend(f"{key}/{name}" if key else name for name in folders)
    texts = []
    for kind, places in sorted(found.items(), key=lambda item: item[0] is not _TAG):
        more = f" (and {len(places) - 1} more like it)" if len(places) > 1 else ""
        text = kind.text.format(url=f"{storage.url.rstrip('/')}/{places[-1]}")
        texts.append(f"{places[-1]!r}{more}: {text}")
    return f"it is none itself, but it holds {'; '.join(texts)}" if texts else None


def _kind_of(files: Set[str]) -> _Kind | None:
    return next((kind for kind in _KINDS if kind.is_present(files)), None)
