"""ZeRO-1 optimizers in the form of NxD's ``use_zero1_dcp``: a torch DCP directory, entries by parameter name.

Names are ``base_state.<parameter>.<state>``, followed by ``|pp-NNNN`` and ``|tp-NNNN`` for tensors where those sizes
exceed 1; the data-parallel shards are the chunks of one entry along dimension 0, in order of dp rank. Padding is not
stored: the last chunk may have fewer rows, and ranks that would hold nothing else have none. Plain objects
(``param_groups``, ``shape_info``, an integer ``step``) are stored once for all ranks that agree on their name.

Upstream does not record some facts (source: neuronx_distributed 0.9 to 0.18, ``optimizer/zero_dcp_utils.py``): the
index behind a name is nowhere in the files. It is the position among the names, which are in the order of
the optimizer's state; a caller who has the names by index passes ``param_names``. With pipeline stages
``shape_info`` and ``params`` are those of one stage for all, so there they are derived from the chunks, unless each
later stage has its own, with its suffix, as nxd_ckpt writes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.limits import RANKS, check_count
from nxd_ckpt.core.partition import zero1_rows
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile, OptimizerMismatch, PartNotFound
from nxd_ckpt.formats.optimizer_trees import MASTERS
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub, map_tensors
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.torch_dcp import Chunk, DcpFiles, WholeForm, read_metadata

_NAME = re.compile(r"(?P<path>.+?)(?:\|pp-(?P<pp>\d{4,18}))?(?:\|tp-(?P<tp>\d{4,18}))?", re.DOTALL)
_BY_NAME = ("base_state", MASTERS)
"""Sections of the state dict that are keyed by parameter name in the files, by index in memory."""


class _ParsedEntry(NamedTuple):
    """A parsed name; ``pp`` and ``tp`` are None if the entry is for all ranks.

    ``full`` is the shape of the whole tensor, if the metadata has it.
    """

    path: tuple[str, ...]
    pp: int | None
    tp: int | None
    chunks: tuple[Chunk, ...]
    full: tuple[int, ...] | None = None

    @property
    def is_sharded(self) -> bool:
        return bool(self.chunks[0].offsets)

    def is_of(self, at: Coordinates) -> bool:
        return self.pp in (None, at.pp_rank) and self.tp in (None, at.tp_rank)


class Zero1Dcp:
    """The optimizer in the DCP directory ``directory`` of a tag; ``dp``, ``tp``, ``pp`` are its sizes.

    They are at least those of the entries, which may show less if the last ranks hold only padding.
    """

    def __init__(self, files: TagFiles, directory: str, sizes: Topology | None = None) -> None:
        self._files = files
        self._where = files.key(directory)
        metadata = read_metadata(files, DcpFiles(directory))
        # In the order of the state dict; where that is not recorded, one rank still wrote in that order.
        names = [name for name in {**metadata.paths, **metadata.entries} if name in metadata.entries]
        self._entries = [
            _take_apart(name, metadata.paths.get(name), metadata.entries[name], metadata.forms.get(name))
            for name in names
        ]
        sizes = sizes or Topology()
        self.dp: int = max(sizes.dp, *(len(entry.chunks) for entry in self._entries), 1)
        for entry in self._entries:
            check_count(max(entry.tp or 0, entry.pp or 0), RANKS, f"{self._where}: ranks in a name")
        self.tp: int = max(sizes.tp, *((entry.tp or 0) + 1 for entry in self._entries), 1)
        self.pp: int = max(sizes.pp, *((entry.pp or 0) + 1 for entry in self._entries), 1)

    @property
    def has_master_weights(self) -> bool:
        return any(entry.path[0] == MASTERS for entry in self._entries)

    def names(self, at: Coordinates) -> list[str] | None:
        """Return the parameter behind each index; None if one has no state, and so no name in the files."""
        shapes = self._shapes_by_name(at)
        return list(shapes) if len(shapes) == len(self._shape_info(at, shapes)) else None

    def tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the ZeRO-1 state dict of the rank at these coordinates: NxD's keys, lists in place of tuples.

        ``param_names`` are the parameters by index. A shard with padding is an Assembly.

        Raises:
            PartNotFound: no such rank.
            OptimizerMismatch: the index of a name is ambiguous; pass ``param_names``.
        """
        if at.dp_rank >= self.dp or at.tp_rank >= self.tp or at.pp_rank >= self.pp:
            raise PartNotFound(
                f"{self._where}: no shards for dp {at.dp_rank} tp {at.tp_rank} pp {at.pp_rank}; "
                f"found dp={self.dp} tp={self.tp} pp={self.pp}"
            )
        shapes = self._shapes_by_name(at)
        shape_info = self._shape_info(at, shapes)
        index_of = self._indices(shapes, shape_info, param_names)
        sections: dict[str, dict[int, Any]] = {"base_state": {}}
        for entry in self._entries:
            # A plain object has no ranks in its name: it may be of a parameter of another pipeline stage.
            if entry.path[0] in _BY_NAME and entry.is_of(at) and entry.path[1] in shapes:
                section, name, *state = entry.path
                by_index = sections.setdefault(section, {})
                value = self._load(entry, at.dp_rank)
                if state:
                    by_index.setdefault(index_of[name], {})[state[0]] = value
                else:
                    by_index[index_of[name]] = value
        groups = self._param_groups(at, len(index_of))
        tree = {
            "state": {},
            "param_groups": groups,
            "base_state": sections.pop("base_state"),
            "shape_info": shape_info,
        }
        return tree | sections

    def _param_groups(self, at: Coordinates, count: int) -> list[dict[str, Any]]:
        groups: dict[int, dict[str, Any]] = {}
        entries, are_own = self._of_stage("param_groups", at)
        for entry in entries:
            _, index, *keys, last = entry.path
            node = groups.setdefault(int(index), {})
            for key in keys:
                node = node.setdefault(key, {})
            node[last] = self._load(entry, 0)
        if self.pp > 1 and len(groups) == 1 and not are_own:
            groups[0]["params"] = list(range(count))
        return [groups[index] for index in sorted(groups)]

    def _shape_info(self, at: Coordinates, shapes: dict[str, tuple[int, ...]]) -> dict[int, list[int]]:
        """Return the full shape of each parameter by index."""
        stored, are_own = self._of_stage("shape_info", at)
        if self.pp > 1 and not are_own:
            return {index: list(shape) for index, shape in enumerate(shapes.values())}
        return {int(entry.path[1]): list(self._load(entry, 0)) for entry in stored}

    def _of_stage(self, section: str, at: Coordinates) -> tuple[list[_ParsedEntry], bool]:
        """Return the entries that all ranks of a stage share, and whether they belong to that stage alone."""
        entries = [entry for entry in self._entries if entry.path[0] == section]
        own = [entry for entry in entries if entry.pp == at.pp_rank]
        ours = any(entry.pp is not None for entry in entries)  # then those without a suffix are the first stage's
        return own or [entry for entry in entries if entry.pp is None], bool(own) or (ours and at.pp_rank == 0)

    def _shapes_by_name(self, at: Coordinates) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every parameter with state on this tp and pp rank, in the order of the state."""
        first: dict[str, _ParsedEntry] = {}
        for entry in self._entries:
            if entry.path[0] in _BY_NAME and entry.is_sharded and entry.is_of(at):
                first.setdefault(entry.path[1], entry)
        return {name: self._full_shape(entry) for name, entry in first.items()}

    def _full_shape(self, entry: _ParsedEntry) -> tuple[int, ...]:
        if entry.full is not None:
            return entry.full
        last = self._stub(entry, entry.chunks[-1])
        offsets = entry.chunks[-1].offsets or ()
        return tuple(offset + size for offset, size in zip(offsets, last.shape, strict=True))

    def _indices(
        self,
        shapes: dict[str, tuple[int, ...]],
        shape_info: dict[int, list[int]],
        param_names: Sequence[str] | None,
    ) -> dict[str, int]:
        if param_names is None and len(shapes) < len(shape_info):
            raise OptimizerMismatch(
                f"{self._where}: {len(shapes)} parameters with state, {len(shape_info)} in all; which have none is not "
                "recorded; pass the names by index as param_names"
            )
        index_of = {name: index for index, name in enumerate(shapes if param_names is None else param_names)}
        for name, shape in shapes.items():
            expected = shape_info.get(index_of.get(name, -1))
            if expected != list(shape):
                raise OptimizerMismatch(
                    f"{self._where}: parameter {name!r} of shape {list(shape)} should have index "
                    f"{index_of.get(name)}, whose shape is {expected}; pass the names by index as param_names"
                )
        return index_of

    def _load(self, entry: _ParsedEntry, dp_rank: int) -> Any:
        """Return that dp rank's part of a tensor, or the object itself if all ranks share it."""
        if not entry.is_sharded:
            chunk = entry.chunks[0]
            shared = self._files.tree(chunk.file, chunk.start, chunk.nbytes)
            return shared if chunk.offsets is not None else map_tensors(shared, self._files.read, TensorStub)
        rows = self._rows(entry)
        has_rows = dp_rank < len(entry.chunks)
        stub = self._stub(entry, entry.chunks[dp_rank if has_rows else 0])
        if has_rows and stub.shape[0] == rows:
            return stub
        whole = Box.whole(stub.shape)
        return Assembly(stub.dtype, (rows, *stub.shape[1:]), (Fragment(stub, whole, whole),) if has_rows else ())

    def _rows(self, entry: _ParsedEntry) -> int:
        """Return the rows of each shard. Raises MalformedFile unless the chunks are as many as shards with rows."""
        full = self._full_shape(entry)[0]
        rows = zero1_rows(full, self.dp)
        expected = list(range(0, full, rows)) if full else [0]
        rows_of_chunks = [(chunk.offsets or (0,))[0] for chunk in entry.chunks]
        if rows_of_chunks != expected:
            raise MalformedFile(
                f"{self._where}: {'.'.join(entry.path)} has {full} rows over {self.dp} ranks: expected "
                f"{len(expected)} shards, at rows {expected[:6]}; found {len(rows_of_chunks)}, at {rows_of_chunks[:6]}"
            )
        return rows

    def _stub(self, entry: _ParsedEntry, chunk: Chunk) -> TensorStub:
        stub = self._files.tree(chunk.file, chunk.start, chunk.nbytes)
        if not isinstance(stub, TensorStub) or len(stub.shape) != len(chunk.offsets or ()):
            raise MalformedFile(f"{self._where}/{chunk.file}: expected the tensor {'.'.join(entry.path)}")
        return stub


def _take_apart(
    name: str, keys: tuple[Any, ...] | None, chunks: tuple[Chunk, ...], form: WholeForm | None
) -> _ParsedEntry:
    match = _NAME.fullmatch(name)
    if match is None:
        raise MalformedFile(f"torch DCP entry without a name: {name!r}")
    pp, tp = (None if rank is None else int(rank) for rank in match.group("pp", "tp"))
    section, _, rest = match["path"].partition(".")
    if keys is not None:
        path = (*map(str, keys[:-1]), str(keys[-1]).partition("|")[0])
    elif section == "base_state":  # parameter names have dots, names of states have none
        path = (section, *rest.rsplit(".", 1))
    else:
        path = (section, *rest.split("."))
    return _ParsedEntry(path, pp, tp, chunks, None if form is None else form.shape)
