"""The names of the files of a checkpoint. Pure strings; keys are posix paths relative to the tag.

Source: neuronx_distributed 0.6 to 0.18 (``trainer/checkpoint.py``). Ranks are written ``%02d``, which widens
from 100 on. The dp field is 00 in all names but those of ZeRO-1 optimizer files; the ep field appears for ep
> 1, in model names and in optimizer names without ZeRO-1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from nxd_ckpt.core.topology import Coordinates, Topology

MARKER = "checkpoint"
DONE = "done"
MANIFEST = "manifest.json"
SCHEDULER = "scheduler.pt"
USER_CONTENT = "user_content.pt"
MODEL_DIR = "model"
OPTIMIZER_DIR = "optim"
INDEX_DIR = "index"
RANK_CONTENT_DIR = "rank_content"
DCP_METADATA = f"{OPTIMIZER_DIR}/.metadata"
"""What lies where in the torch DCP directory of a ZeRO-1 optimizer (``use_zero1_dcp``)."""
DCP_NAMES = "dcp_names.json"
"""What torch DCP called what is in a tag that it wrote."""
HIDDEN = ".nxd_ckpt"
NEWEST = "newest"
"""NxD 0.6 only: a file beside the tags that lists them, one a line, the latest last."""

_INFO = ".info.pt"
_RANK_FILE = re.compile(r"dp_rank_(\d{2,})(?:_ep_rank_(\d{2,}))?_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")
_FULL_FILE = re.compile(r"full(?:_ep_rank_(\d{2,}))?_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")


class ParsedName(NamedTuple):
    """The ranks in a file's name. ``ep`` is None where the name has no such field."""

    dp: int
    ep: int | None
    tp: int
    pp: int


def rank_file(dp: int, ep: int | None, tp: int, pp: int) -> str:
    """``dp_rank_00[_ep_rank_01]_tp_rank_01_pp_rank_00.pt``, without a directory."""
    expert = "" if ep is None else f"_ep_rank_{ep:02d}"
    return f"dp_rank_{dp:02d}{expert}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def model_file(topology: Topology, at: Coordinates) -> str:
    """The file with the model state of the rank at these coordinates."""
    return f"{MODEL_DIR}/{rank_file(0, _ep_rank(topology, at), at.tp_rank, at.pp_rank)}"


def optimizer_file(topology: Topology, at: Coordinates, kind: str) -> str:
    """The file with the optimizer state of the rank at these coordinates; ``kind`` as in core.manifest.Parts."""
    if kind == "zero1_full":
        return f"{OPTIMIZER_DIR}/{full_file(_ep_rank(topology, at), at.tp_rank, at.pp_rank)}"
    if kind == "plain":
        return f"{OPTIMIZER_DIR}/{rank_file(0, _ep_rank(topology, at), at.tp_rank, at.pp_rank)}"
    return f"{OPTIMIZER_DIR}/{rank_file(at.dp_rank, None, at.tp_rank, at.pp_rank)}"


def full_file(ep: int | None, tp: int, pp: int) -> str:
    """``full[_ep_rank_01]_tp_rank_01_pp_rank_00.pt``: what NxD's converter writes with ``--convert_to_full``, the
    unsharded ZeRO-1 optimizer of one (tp, pp) rank. The ep field is ours: upstream cannot convert those."""
    expert = "" if ep is None else f"_ep_rank_{ep:02d}"
    return f"full{expert}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def dcp_file(rank: int, number: int) -> str:
    """A file of the global ``rank`` in the torch DCP directory of a ZeRO-1 optimizer; number 0 holds plain values."""
    return f"{OPTIMIZER_DIR}/__{rank}_{number}.distcp"


def index_file(at: Coordinates) -> str:
    return f"{INDEX_DIR}/{rank_file(at.dp_rank, None, at.tp_rank, at.pp_rank)[:-3]}.json"


def rank_content_file(rank: int) -> str:
    return f"{RANK_CONTENT_DIR}/rank_{rank:05d}.pt"


def shard_file(part: str, rank: int) -> str:
    """A mesh job: what the global ``rank`` wrote of ``part``, the model's or the optimizer's directory."""
    return f"{part}/shard_rank_{rank:05d}.pt"


def structure_file(part: str, leader: int) -> str:
    """A mesh job: the state dict of the ranks that ``leader`` is the first of, with references for its tensors."""
    return f"{part}/structure_rank_{leader:05d}.pt"


def info_file(key: str) -> str:
    """xser: the dtypes and shapes of the tensors that the file ``key`` refers to."""
    return f"{key}{_INFO}"


def tensors_dir(key: str) -> str:
    """xser: the directory of the tensors that the file ``key`` refers to."""
    return f"{key}.tensors"


def tensors_dirs(files: Iterable[str]) -> list[str]:
    """xser: the directories of those ``files`` that refer to tensors; their info files show which do.

    NxD makes each, even if it stays empty, and takes a checkpoint that has one for xser.
    """
    return [tensors_dir(file.removesuffix(_INFO)) for file in files if file.endswith(_INFO)]


def tensor_file(key: str, tid: int) -> str:
    """xser: one tensor that the file ``key`` refers to."""
    return f"{tensors_dir(key)}/tensor_{tid}.pt"


def parse(name: str) -> ParsedName | None:
    """The ranks in a rank file's name (without a directory), or None if it is not exactly such a name."""
    match = _RANK_FILE.fullmatch(name)
    if match is None:
        return None
    dp, ep, tp, pp = (None if group is None else int(group) for group in match.groups())
    parsed = ParsedName(dp or 0, ep, tp or 0, pp or 0)
    return parsed if rank_file(*parsed) == name else None


def parse_full(name: str) -> ParsedName | None:
    """The ranks in the name of an unsharded optimizer file (dp is 0), or None if it is not exactly such a name."""
    match = _FULL_FILE.fullmatch(name)
    if match is None:
        return None
    ep, tp, pp = (None if group is None else int(group) for group in match.groups())
    parsed = ParsedName(0, ep, tp or 0, pp or 0)
    return parsed if full_file(*parsed[1:]) == name else None


def _ep_rank(topology: Topology, at: Coordinates) -> int | None:
    return at.dp_rank % topology.ep if topology.ep > 1 else None
