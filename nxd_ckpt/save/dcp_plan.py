"""Files that a rank writes of a ZeRO-1 optimizer in the form of NxD's ``use_zero1_dcp`` (see tag.foreign.zero1_dcp).

A tensor that is cut over data-parallel ranks is a chunk on each: in a file of its own, without the padding rows, which
torch DCP does not support; a rank that holds only padding of it has none. State that all ranks have in common, values
and tensors without dimensions, is written once by the first rank of each pipeline stage, the values in one file.

Names are upstream's, which omits param groups and shapes of all stages but one. Here those of the later stages are
stored beside them, with the suffix of their stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nxd_ckpt.core import names
from nxd_ckpt.core.dcp_names import DcpChunk
from nxd_ckpt.core.partition import zero1_shape
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.formats import xser
from nxd_ckpt.formats.tensors import Assembly, Path
from nxd_ckpt.formats.torch_zip_writer import JoinedImage, image_of
from nxd_ckpt.live.parameters import form_of, is_tensor
from nxd_ckpt.live.state import State
from nxd_ckpt.live.zero1 import MASTERS
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile, pieces_of

_BASE_STATE = "base_state"
_SHAPES = "shape_info"
_LEAVE_OUT = "leave use_zero1_dcp out: the plain files load on every rank"


def plan_dcp(part: str, state: State, parameters: Sequence[str] | None, topology: Topology) -> list[PlannedFile]:
    """Plan this rank's files of ``part``, with its ``state``. ``parameters`` are the optimizer's names by index.

    Raises:
        UnsupportedState: unknown names or shapes, experts that are cut over other ranks, or an entry that is not cut
            like
            its parameter.
    """
    if topology.ep > 1:
        raise UnsupportedState(f"use_zero1_dcp=True with expert parallelism ({topology.describe()}): {_LEAVE_OUT}")
    if parameters is None or _SHAPES not in state.tree:
        missing = "the parameters' names are" if parameters is None else f"its {_SHAPES!r} is"
        raise UnsupportedState(
            f"use_zero1_dcp=True keeps the optimizer by name and shape of its parameters, but {missing} not known; "
            f"pass the live model, or param_names=, with a ZeRO-1 optimizer's state; or {_LEAVE_OUT}"
        )
    plan = _Plan(part, state, _Names(tuple(parameters), topology))
    values = [plan.values()] if topology.dp_rank == topology.tp_rank == 0 else []
    return [*values, *plan.tensors()]


class _Leaf(NamedTuple):
    """A leaf of the state dict: its path there and in DCP, and its ``position`` among all."""

    position: int
    path: Path
    at: tuple[str | int, ...]
    value: Any


@dataclass(frozen=True)
class _Names:
    """DCP's names of the leaves of a state dict. Holds no tensor, so that plans can be cached."""

    parameters: tuple[str, ...]
    topology: Topology

    def entries(self, tree: dict[str, Any]) -> list[_Leaf]:
        """Return all leaves."""
        leaves = _leaves((), xser.normalise(tree))
        return [_Leaf(position, path, self._at(path), value) for position, (path, value) in enumerate(leaves)]

    def values(self, tree: dict[str, Any]) -> list[Any]:
        """Return the leaves that are no tensors."""
        return [entry.value for entry in self.entries(tree) if not is_tensor(entry.value)]

    def of_shard(self, at: tuple[str | int, ...]) -> tuple[str | int, ...]:
        """Return the path of a tensor that differs between stages and tensor-parallel ranks."""
        stage = f"|pp-{self.topology.pp_rank:04d}" if self.topology.pp > 1 else ""
        part = f"|tp-{self.topology.tp_rank:04d}" if self.topology.tp > 1 else ""
        return (*at[:-1], f"{at[-1]}{stage}{part}")

    def _at(self, path: Path) -> tuple[str | int, ...]:
        section, *rest = path
        if section in (_BASE_STATE, MASTERS):
            index, *entry = rest
            if type(index) is not int or not 0 <= index < len(self.parameters):
                raise UnsupportedState(f"optimizer: {section!r} has {index!r}, which is no parameter's; {_LEAVE_OUT}")
            return (section, self.parameters[index], *map(_key, entry))
        at = (section, *map(_key, rest))
        later = self.topology.pp_rank > 0
        return (*at[:-1], f"{at[-1]}|pp-{self.topology.pp_rank:04d}") if later else at


class _Plan:
    def __init__(self, part: str, state: State, called: _Names) -> None:
        self._part, self._state, self._called, self._topology = part, state, called, called.topology
        self._shapes = state.tree[_SHAPES]
        self._entries = called.entries(state.tree)

    def values(self) -> PlannedFile:
        """Return the file of everything that is no tensor."""
        entries = [entry for entry in self._entries if not is_tensor(entry.value)]
        file = names.dcp_file(self._topology.rank, 0)
        return PlannedFile(
            file,
            JoinedImage.of(entry.value for entry in entries),
            part=self._part,
            contents=self._called.values,
            chunks=tuple((entry.position, DcpChunk(entry.at, file=_base(file))) for entry in entries),
        )

    def tensors(self) -> Iterator[PlannedFile]:
        """Yield a file for each tensor that this rank writes."""
        number = 0
        for entry in self._entries:
            chunk = self._chunk(entry) if is_tensor(entry.value) else None
            if chunk is not None:
                number += 1
                yield self._file(entry, chunk, names.dcp_file(self._topology.rank, number))

    def _file(self, entry: _Leaf, chunk: DcpChunk, file: str) -> PlannedFile:
        about, (dtype, shape) = self._state.tensors[entry.path], form_of(entry.value)
        image = image_of(Assembly(dtype, chunk.size, ())).holding([entry.value])
        tensor = NamedTensor(about.name, 0, dtype, chunk.size, pieces_of(about, self._topology, shape))
        chunks = ((entry.position, chunk._replace(file=_base(file))),)
        return PlannedFile(file, image, (tensor,), self._part, chunks=chunks)

    def _chunk(self, entry: _Leaf) -> DcpChunk | None:
        """Return this rank's chunk of a tensor; None if it writes none."""
        topology, (dtype, shape) = self._topology, form_of(entry.value)
        if not shape:
            leads = topology.dp_rank == topology.tp_rank == 0
            return DcpChunk(entry.at, dtype) if leads else None
        whole = self._whole(entry, shape)
        start = min(topology.dp_rank * shape[0], whole[0])
        rows = min(shape[0], whole[0] - start)
        if rows == 0 and topology.dp_rank > 0:
            return None
        zeros = (0,) * (len(shape) - 1)
        return DcpChunk(self._called.of_shard(entry.at), dtype, whole, (start, *zeros), (rows, *shape[1:]))

    def _whole(self, entry: _Leaf, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor that this one is a shard of."""
        section, index = entry.path[:2]
        whole = tuple(self._shapes.get(index, ())) if section in (_BASE_STATE, MASTERS) else ()
        expected = zero1_shape(whole, self._topology.dp) if whole else None
        if shape != expected:
            raise UnsupportedState(
                f"optimizer: {'.'.join(map(str, entry.at))} has shape {shape}, expected {expected}, the ZeRO-1 shard "
                f"of a parameter of shape {whole}; use_zero1_dcp=True can keep nothing else. Instead, {_LEAVE_OUT}"
            )
        return whole


class _InList(int):
    """An index in a list, which DCP stores as a number; keys of dicts become text."""


def _key(key: Any) -> str | int:
    return int(key) if isinstance(key, _InList) else str(key)


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield DCP's entries: tensors, and values down to lists that hold only plain values."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves((*path, key), child)
    elif isinstance(value, list) and any(isinstance(child, (dict, list)) or is_tensor(child) for child in value):
        for number, child in enumerate(value):
            yield from _leaves((*path, _InList(number)), child)
    else:
        yield path, value


def _base(file: str) -> str:
    return file.rpartition("/")[2]
