"""Checkpoints of neuronx_distributed 0.1 to 0.5, which have no tags: the directory itself is the checkpoint.

=========  ====================================================================================
NxD        layout
=========  ====================================================================================
0.1, 0.2   ``DIR/tp_rank_00``, one ``torch.save`` file (or a directory with ``checkpoint.pt``)
0.3-0.5    ``DIR/tp_rank_00_pp_rank_00/checkpoint.pt``; xser: a file of that name and ``.tensors/`` beside it;
           ``..._dp_rank_00`` where each data-parallel rank saved its own
ZeRO-1     ``DIR/optim.dp_rank_00.tp_rank_00``, one ``torch.save`` file a rank
=========  ====================================================================================

A payload is the object that the script passed (see `nxd_ckpt.layouts.payload`); an optimizer's state dict may be in a
directory of its own. Lightning keeps such a directory for each of its ``.ckpt``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.names import ParsedName, describe, spanned
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.payload import Payload, PayloadFile, checked_optimizer, payload_of, reading, refuse_other_counts

_PAYLOAD = re.compile(r"tp_rank_(\d{2,})(?:_pp_rank_(\d{2,})(?:_dp_rank_(\d{2,}))?)?")
_ZERO1 = re.compile(r"optim\.dp_rank_(\d{2,})\.tp_rank_(\d{2,})")
_INNER = "checkpoint.pt"
_RANK_KEYS = ("tp_rank", "pp_rank", "dp_rank")
"""Keys that NxD added to payloads: ranks, not state."""


def parse(name: str) -> ParsedName | None:
    """Return the ranks in a payload's name, or None if it is not exactly such a name."""
    match = _PAYLOAD.fullmatch(name)
    if match is None:
        return None
    tp, pp, dp = (int(group or 0) for group in match.groups())
    return ParsedName(dp, None, tp, pp)


def parse_zero1(name: str) -> ParsedName | None:
    """Return the ranks in the name of a ZeRO-1 optimizer's file, or None if it is not exactly such a name."""
    match = _ZERO1.fullmatch(name)
    return None if match is None else ParsedName(int(match[1]), None, int(match[2]), 0)


def first_of_stages(files: TagFiles) -> list[str]:
    """Return the file of the first tensor-parallel rank of each pipeline stage."""
    names = [(ranks, name) for name in files.names() if (ranks := parse(name)) is not None]
    return [_payload_file(files, name) for ranks, name in sorted(names) if ranks.tp == ranks.dp == 0]


def _payload_file(files: TagFiles, name: str) -> str:
    return f"{name}/{_INNER}" if files.names()[name] else name


class LegacyTag(PayloadFile):
    """Layout (`nxd_ckpt.layouts.nxd_tag.TagLayout`) of one such directory."""

    def __init__(self, files: TagFiles) -> None:
        self.files: TagFiles = files
        self.where: str = files.storage.url
        listing = files.names()
        self._payloads = {ranks: name for name in listing if (ranks := parse(name)) is not None}
        self._zero1 = {ranks: name for name in listing if (ranks := parse_zero1(name)) is not None}
        self._per_dp_rank = any(ranks.dp for ranks in self._payloads)

    @reading
    def topology(self) -> Topology:
        size = spanned([*self._payloads, *self._zero1])
        return Topology(dp=size.dp, tp=size.tp, pp=size.pp)

    @reading
    def parts(self) -> Parts:
        parts = replace(super().parts(), use_xser=any(name.endswith(".tensors") for name in self.files.names()))
        if not self._zero1:
            return parts
        has_masters = "sharded_master_weights" in self.optimizer_tree(Coordinates())
        return replace(parts, optimizer="zero1", master_weights=has_masters)

    @reading
    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        if not self._zero1:
            return super().optimizer_tree(at, param_names)
        file = self._pick(self._zero1, at, dp=at.dp_rank)
        return _without_ranks(checked_optimizer(self.files.tree(file), self.files.where(file)))

    @reading
    def user_content(self) -> Any:
        """Return everything else in the payload of the first rank: step, epoch, arguments."""
        if not self._rest:
            raise PartNotFound(f"{self.where}: the payload holds nothing but model and optimizer")
        return super().user_content()

    def _payload_of(self, at: Coordinates) -> Payload:
        name = self._pick(self._payloads, at, dp=at.dp_rank if self._per_dp_rank else 0)
        first = self._pick(self._payloads, Coordinates(), dp=0)
        payload = self._read_payload(name)
        refuse_other_counts({first: self._payload, name: payload}, self.where)
        return payload

    @cached_property
    def _payload(self) -> Payload:
        if not self._payloads:
            return Payload({})
        return self._read_payload(self._pick(self._payloads, Coordinates(), dp=0))

    def _read_payload(self, name: str) -> Payload:
        payload = payload_of(self.files.joined(_payload_file(self.files, name)), f"{self.where}/{name}")
        return Payload(_without_ranks(payload.content))

    def _pick(self, files: dict[ParsedName, str], at: Coordinates, dp: int) -> str:
        try:
            return files[ParsedName(dp, None, at.tp_rank, at.pp_rank)]
        except KeyError:
            raise PartNotFound(
                f"{self.where}: no file for dp {dp} tp {at.tp_rank} pp {at.pp_rank}; found {describe(files)}"
            ) from None


def _without_ranks(payload: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in payload.items() if key not in _RANK_KEYS}
