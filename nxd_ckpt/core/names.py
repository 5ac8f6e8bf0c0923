"""Names of the files of a checkpoint, and the grid of ranks that they span.

Pure strings; keys are posix paths relative to the tag.

Source: neuronx_distributed 0.6 to 0.18 (``trainer/checkpoint.py``). Ranks are written as ``%02d``, which widens from
100 on. The dp field is 00 except in names of ZeRO-1 optimizer files. The ep field appears for ep > 1, in names of model
files and of optimizer files without ZeRO-1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from math import prod
from typing import NamedTuple

from nxd_ckpt.core.limits import RANKS
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile

MARKER = "checkpoint"
DONE = "done"
MANIFEST = "manifest.json"
SCHEDULER = "scheduler.pt"
USER_CONTENT = "user_content.pt"
MODEL_DIR = "model"
OPTIMIZER_DIR = "optim"
INDEX_DIR = "index"
RANK_CONTENT_DIR = "rank_content"
RANK_STATE_DIR = "rank_state"
DCP_METADATA = f"{OPTIMIZER_DIR}/.metadata"
"""The metadata of the torch DCP directory of a ZeRO-1 optimizer (``use_zero1_dcp``)."""
DCP_NAMES = "dcp_names.json"
"""The names that torch DCP used, in a tag that it wrote."""
HIDDEN = ".nxd_ckpt"
NEWEST = "newest"
"""The file beside the tags that lists them, one per line, the latest last; NxD 0.6 only."""

_INFO = ".info.pt"
_RANK_FILE = re.compile(r"dp_rank_(\d{2,})(?:_ep_rank_(\d{2,}))?_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")
_FULL_FILE = re.compile(r"full(?:_ep_rank_(\d{2,}))?_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")
_STATE = (
    r"(?:(?:dp_rank_\d+(?:_ep_rank_\d+)?|full(?:_ep_rank_\d+)?)_tp_rank_\d+_pp_rank_\d+"
    r"|(?:shard|structure)_rank_\d+)\.pt"
)
_OWN_FOLDER = re.compile(rf"model|optim|index|rank_content|rank_state|(?:model|optim)/{_STATE}\.tensors")
_OWN = re.compile(
    r"checkpoint|done|manifest\.json|dcp_names\.json|scheduler\.pt|user_content\.pt"
    rf"|(?:model|optim)/{_STATE}(?:\.info\.pt|\.tensors/tensor_\d+\.pt)?"
    r"|optim/(?:\.metadata|__\d+_\d+\.distcp)"
    r"|index/dp_rank_\d+_tp_rank_\d+_pp_rank_\d+\.json|rank_content/rank_\d+\.pt"
    r"|rank_state/rank_\d+_[01]\.pt"
)
_TEMPORARY = re.compile(r"((?:.*/)?)\.(.+)\.[0-9a-f]+")


def is_own_folder(path: str) -> bool:
    """Return whether a save, of ours or NxD's, writes files into a folder of this path in its tag."""
    return _OWN_FOLDER.fullmatch(path) is not None


def is_own(path: str) -> bool:
    """Return whether a save, of ours or NxD's, writes a file of this path in its tag, or its temporary beside it."""
    temporary = _TEMPORARY.fullmatch(path)
    return any(map(_OWN.fullmatch, [path] if temporary is None else [path, temporary[1] + temporary[2]]))


class ParsedName(NamedTuple):
    """The ranks in a file's name. ``ep`` is None if the name has no such field."""

    dp: int
    ep: int | None
    tp: int
    pp: int


def rank_file(dp: int, ep: int | None, tp: int, pp: int) -> str:
    """Return ``dp_rank_00[_ep_rank_01]_tp_rank_01_pp_rank_00.pt``, without a directory."""
    expert = "" if ep is None else f"_ep_rank_{ep:02d}"
    return f"dp_rank_{dp:02d}{expert}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def model_file(topology: Topology, at: Coordinates) -> str:
    """Return the file with the model state of the rank at these coordinates."""
    return f"{MODEL_DIR}/{rank_file(0, _ep_rank(topology, at), at.tp_rank, at.pp_rank)}"


def optimizer_file(topology: Topology, at: Coordinates, kind: str) -> str:
    """Return the file with the optimizer state of the rank at these coordinates.

    ``kind`` is that of `Parts.optimizer`.
    """
    if kind == "zero1_full":
        return f"{OPTIMIZER_DIR}/{full_file(_ep_rank(topology, at), at.tp_rank, at.pp_rank)}"
    if kind == "plain":
        return f"{OPTIMIZER_DIR}/{rank_file(0, _ep_rank(topology, at), at.tp_rank, at.pp_rank)}"
    return f"{OPTIMIZER_DIR}/{rank_file(at.dp_rank, None, at.tp_rank, at.pp_rank)}"


def full_file(ep: int | None, tp: int, pp: int) -> str:
    """Return ``full[_ep_rank_01]_tp_rank_01_pp_rank_00.pt``, the unsharded ZeRO-1 optimizer of one (tp, pp) rank.

    NxD's converter writes it with ``--convert_to_full``. The ep field is ours; NxD cannot convert expert parallelism.
    """
    expert = "" if ep is None else f"_ep_rank_{ep:02d}"
    return f"full{expert}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def dcp_file(rank: int, number: int) -> str:
    """Return a file of the global ``rank`` in the torch DCP directory of a ZeRO-1 optimizer.

    Number 0 holds plain values.
    """
    return f"{OPTIMIZER_DIR}/__{rank}_{number}.distcp"


def index_file(at: Coordinates) -> str:
    return f"{INDEX_DIR}/{rank_file(at.dp_rank, None, at.tp_rank, at.pp_rank)[:-3]}.json"


def rank_content_file(rank: int) -> str:
    return f"{RANK_CONTENT_DIR}/rank_{rank:05d}.pt"


def rank_state_file(rank: int, number: int) -> str:
    """Return a file with the global ``rank``'s own values of what counts as a copy of another rank's.

    Number 0 has those that were known before the save, 1 those that it found.
    """
    return f"{RANK_STATE_DIR}/rank_{rank:05d}_{number}.pt"


def shard_file(part: str, rank: int) -> str:
    """Return the file of the global ``rank`` of a mesh job; ``part`` is the model's or the optimizer's directory."""
    return f"{part}/shard_rank_{rank:05d}.pt"


def structure_file(part: str, leader: int) -> str:
    """Return the file with the state dict of a mesh job's group, with references for tensors.

    ``leader`` is its first rank.
    """
    return f"{part}/structure_rank_{leader:05d}.pt"


def info_file(key: str) -> str:
    """Return the xser file with dtypes and shapes of the tensors that the file ``key`` refers to."""
    return f"{key}{_INFO}"


def tensors_dir(key: str) -> str:
    """Return the xser directory of the tensors that the file ``key`` refers to."""
    return f"{key}.tensors"


def tensors_dirs(files: Iterable[str]) -> list[str]:
    """Return the xser directories of all ``files`` that refer to tensors, which their info files show.

    NxD makes each of them, even if it stays empty, and recognises xser by them.
    """
    return [tensors_dir(file.removesuffix(_INFO)) for file in files if file.endswith(_INFO)]


def folders_of(files: Iterable[str]) -> list[str]:
    """Return every folder that one of the ``files`` lies in or below, inner ones first; the last is "", the root."""
    folders = {""}
    for file in files:
        while file := file.rpartition("/")[0]:
            folders.add(file)
    return sorted(folders, reverse=True)


def tensor_file(key: str, tid: int) -> str:
    """Return the xser file of one tensor that the file ``key`` refers to."""
    return f"{tensors_dir(key)}/tensor_{tid}.pt"


def parse(name: str) -> ParsedName | None:
    """Return the ranks in a rank file's name (without a directory), or None if it is not exactly such a name."""
    match = _RANK_FILE.fullmatch(name)
    if match is None:
        return None
    dp, ep, tp, pp = (None if group is None else int(group) for group in match.groups())
    parsed = ParsedName(dp or 0, ep, tp or 0, pp or 0)
    return parsed if rank_file(*parsed) == name else None


def parse_full(name: str) -> ParsedName | None:
    """Return the ranks in an unsharded optimizer file's name (dp is 0), or None if it is not exactly such a name."""
    match = _FULL_FILE.fullmatch(name)
    if match is None:
        return None
    ep, tp, pp = (None if group is None else int(group) for group in match.groups())
    parsed = ParsedName(0, ep, tp or 0, pp or 0)
    return parsed if full_file(*parsed[1:]) == name else None


def _ep_rank(topology: Topology, at: Coordinates) -> int | None:
    return at.dp_rank % topology.ep if topology.ep > 1 else None


def spanned(files: Iterable[ParsedName]) -> ParsedName:
    """Return the size of every dimension: one more than its highest rank. ``ep`` is None if no name has that field.

    Raises MalformedFile for a grid of more ranks than there can be.
    """
    names = list(files)
    experts = [name.ep for name in names if name.ep is not None]
    size = ParsedName(
        dp=max((name.dp for name in names), default=0) + 1,
        ep=max(experts) + 1 if experts else None,
        tp=max((name.tp for name in names), default=0) + 1,
        pp=max((name.pp for name in names), default=0) + 1,
    )
    if prod(extent or 1 for extent in size) > RANKS:
        raise MalformedFile(f"the files' names are those of {size} ranks; at most {RANKS} are allowed")
    return size


def holes(files: Iterable[ParsedName]) -> list[ParsedName]:
    """Return the names that are missing from the grid that the others span."""
    names = set(files)
    if not names:
        return []
    size = spanned(names)
    experts: Iterable[int | None] = [None] if size.ep is None else range(size.ep)
    cells = product(range(size.dp), experts, range(size.tp), range(size.pp))
    return [cell for place in cells if (cell := ParsedName(*place)) not in names]


def describe(files: Iterable[ParsedName]) -> str:
    """Describe the ranks for errors: ``4 rank files: dp 0-3, tp 0-0, pp 0-0``."""
    names = set(files)
    if not names:
        return "no rank files"
    size = spanned(names)
    fields = {"dp": size.dp, "ep": size.ep, "tp": size.tp, "pp": size.pp}
    ranges = ", ".join(f"{key} 0-{extent - 1}" for key, extent in fields.items() if extent is not None)
    missing = len(holes(names))
    return f"{len(names)} rank files: {ranges}" + (f" with {missing} missing" if missing else "")
