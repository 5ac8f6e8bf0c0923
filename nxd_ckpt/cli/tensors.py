"""Location on disk of the tensors that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import TensorEntry
from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.formats.tensors import Assembly, Path, TensorStub, iter_tensors
from nxd_ckpt.tag.files import MissingTensor
from nxd_ckpt.tag.opened import OpenTag


def tensors(opened: OpenTag, at: Coordinates, pattern: str, problems: list[str]) -> list[dict[str, Any]]:
    """Return the tensors of model and optimizer that the rank at these coordinates holds and whose name matches.

    If none does, ``problems`` says so.

    ``pattern`` is a shell pattern for names such as ``model/embed.weight`` and ``optim/embed.weight/exp_avg``. They are
    read
    from the indexes, without reading a state. For NxD's tags they are read from the files, where optimizer entries have
    numbers as names (``optim/#0/exp_avg``) and the boxes of the global tensor are unknown.
    """
    described = list(_from_files(opened, at) if opened.manifest is None else _from_indexes(opened, at))
    matching = [tensor for tensor in described if fnmatchcase(tensor["name"], pattern)]
    if not matching and pattern != "*":
        names = [tensor["name"] for tensor in described]
        problems.append(f"no tensor of this rank is called {listed([pattern], names)}; there are {first_of(names)}")
    return matching


def _from_indexes(opened: OpenTag, at: Coordinates) -> list[dict[str, Any]]:
    """Return the rank's tensors from the indexes, including those of replicas, which share the writing."""
    topology = opened.topology
    if opened.manifest is not None and opened.manifest.leaders is not None:
        return [_indexed(entry) for entry in opened.index(at).tensors]  # of a mesh job: what this rank wrote
    entries_by_file: dict[str, dict[str, TensorEntry]] = {file: {} for file in _state_files(opened, at)}
    writers = topology.replicas(at) if opened.parts.use_xser else map(topology.rank_of, (topology.writer_of(at), at))
    for rank in dict.fromkeys(writers):
        for entry in opened.index(topology.coordinates_of(rank)).tensors:
            file = entry.file.partition(".tensors/")[0]
            if file in entries_by_file:
                entries_by_file[file][entry.name] = entry
    entries: dict[str, TensorEntry] = {}
    for file_entries in entries_by_file.values():
        entries |= file_entries
    if opened.parts.optimizer == "zero1_dcp":
        entries |= {entry.name: entry for entry in _dcp_entries(opened, at)}
    return [_indexed(entry) for entry in sorted(entries.values(), key=_order(opened))]


def _dcp_entries(opened: OpenTag, at: Coordinates) -> Iterator[TensorEntry]:
    """Yield the optimizer's tensors in a torch DCP directory: shards of the rank, others of its stage."""
    leader = Coordinates(at.pp_rank)
    for writer in dict.fromkeys((leader, at)):
        for entry in opened.index(writer).tensors:
            if entry.name.startswith("optim/") and (writer == at or not entry.shape):
                yield entry


def _state_files(opened: OpenTag, at: Coordinates) -> list[str]:
    """Return the rank files with the rank's state; entries of a later file replace those of earlier ones."""
    topology, kind = opened.topology, opened.parts.optimizer or "plain"
    shared = replace(at, dp_rank=0)  # with xser, ep rank 0's folder has what is not an expert's, and its own experts
    files = [names.model_file(topology, shared), names.model_file(topology, at)]
    places = (shared, at) if kind == "plain" else (at,)
    return [*files, *(names.optimizer_file(topology, place, kind) for place in places)]


def _order(opened: OpenTag) -> Callable[[TensorEntry], tuple[str, int]]:
    """Return a sort key: model before optimizer, parameters in the model's order."""
    specs = () if opened.manifest is None else opened.manifest.parameters
    position = {name: number for number, name in enumerate(specs)}

    def key(entry: TensorEntry) -> tuple[str, int]:
        part, _, name = entry.name.partition("/")
        return part, position.get(name if part == "model" else name.rpartition("/")[0], len(position))

    return key


def _indexed(entry: TensorEntry) -> dict[str, Any]:
    pieces = entry.pieces
    return {
        "name": entry.name,
        "file": entry.file,
        "offset": entry.offset,
        "nbytes": entry.nbytes,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "pieces": None
        if pieces is None
        else [
            {"local": list(piece.local.offset), "offset": list(piece.box.offset), "size": list(piece.box.size)}
            for piece in pieces
        ],
    }


def _from_files(opened: OpenTag, at: Coordinates) -> Iterator[dict[str, Any]]:
    if opened.parts.model:
        for path, leaf in iter_tensors(opened.model_tree(at), _LEAVES):
            yield from _on_disk(f"model/{'.'.join(map(str, path))}", leaf)
    if opened.parts.optimizer:
        names = opened.optimizer_names(at)
        for path, leaf in iter_tensors(opened.optimizer_tree(at), _LEAVES):
            yield from _on_disk(f"optim/{_state_name(path, names)}", leaf)


_LEAVES = (TensorStub, Assembly, MissingTensor)


def _state_name(path: Path, parameter_names: list[str] | None) -> str:
    """Name a state entry as indexes do.

    ``(base_state, 0, exp_avg)`` becomes ``#0/exp_avg`` if the parameter has no name.
    """
    section, *rest = path
    if section not in ("state", "base_state", "sharded_master_weights") or not rest:
        return "/".join(map(str, path))
    index, *state = rest
    names_by_index = dict(enumerate(parameter_names or ()))
    return "/".join([names_by_index.get(index, f"#{index}"), *map(str, state or ["master_weights"])])


def _on_disk(name: str, leaf: TensorStub | Assembly | MissingTensor) -> Iterator[dict[str, Any]]:
    for stub in (fragment.stub for fragment in leaf.fragments) if isinstance(leaf, Assembly) else (leaf,):
        yield _stored(name, stub)


def _stored(name: str, leaf: TensorStub | MissingTensor) -> dict[str, Any]:
    offset, nbytes = (leaf.offset, leaf.nbytes) if isinstance(leaf, TensorStub) else (None, None)
    return {
        "name": name,
        "file": leaf.file,
        "offset": offset,
        "nbytes": nbytes,
        "dtype": leaf.dtype,
        "shape": None if leaf.shape is None else list(leaf.shape),
        "pieces": None,
    }
