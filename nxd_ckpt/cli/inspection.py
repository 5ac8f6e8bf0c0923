"""The JSON document behind ``nxd-ckpt inspect``, and short forms of values.

These may be large, nested, or crafted to confuse a terminal.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nxd_ckpt.cli.text import group_names
from nxd_ckpt.core import names
from nxd_ckpt.core.findings import collect_problems
from nxd_ckpt.core.manifest import Manifest, TensorEntry
from nxd_ckpt.core.mesh import Layout
from nxd_ckpt.core.partition import Partition, Piece
from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.core.tags import TagInfo, latest
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import InvalidArgument, TagReplaced, UnsafePickle
from nxd_ckpt.formats.optimizer_trees import OPTIMIZER_NAME
from nxd_ckpt.formats.tensors import Assembly, TensorStub, dtype_name, iter_tensors
from nxd_ckpt.layouts.files import MissingTensor, TagFiles
from nxd_ckpt.reshard.resharded_state import names_template, partitions_of_tag, partitions_template, recorded_parameters
from nxd_ckpt.reshard.whole_tag import GlobalTensor, WholeTag
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.choosing import choose_anything, find_by_path
from nxd_ckpt.tag.directory import find_tag, list_tags
from nxd_ckpt.tag.identity import of_latest
from nxd_ckpt.tag.listing import locate, summary
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import entry_name, own_tensors
from nxd_ckpt.tag.recognise import recognise
from nxd_ckpt.tag.verify import files_of

if TYPE_CHECKING:
    import torch

class _Short(reprlib.Repr):
    """``repr`` of bounded length and depth; tensors and arrays by dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = 4
        self.maxlist = 6
        self.maxtuple = 6
        self.maxstring = self.maxother = 60

    def repr_Tensor(self, tensor: torch.Tensor, _: int) -> str:
        return f"tensor {dtype_name(tensor.dtype)} {list(tensor.shape)}"

    def repr_TensorStub(self, stub: TensorStub | Assembly, _: int) -> str:
        return f"tensor {stub.dtype} {list(stub.shape)}"

    repr_Assembly = repr_TensorStub

    def repr_ndarray(self, array: Any, _: int) -> str:
        return f"array {array.dtype} {list(array.shape)}"

    def repr_Namespace(self, namespace: Any, level: int) -> str:
        return f"Namespace of {self.repr_dict(vars(namespace), level)}"


_SHORT = _Short()


def short(value: Any) -> str:
    """Return one line, of at most a few hundred characters, for any plain data."""
    return _SHORT.repr(value)


def plain(value: Any) -> Any:
    """Return ``value`` itself if JSON can express it, else its `short` form."""
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else short(value)


def content_document(content: Any) -> dict[str, Any]:
    """Describe user content: its type, and an entry for each key; a single entry without key if it is no dict."""
    items = content.items() if isinstance(content, dict) else [(None, content)]
    return {
        "type": type(content).__name__,
        "entries": [
            {
                "key": None if key is None else key if isinstance(key, str) else short(key),
                "type": "Tensor" if isinstance(value, (TensorStub, Assembly)) else type(value).__name__,
                "value": short(value),
            }
            for key, value in items
        ],
    }


_Answer = TypeVar("_Answer")

_PART_OF = {
    names.MODEL_DIR: "model",
    names.OPTIMIZER_DIR: "optimizer",
    names.SCHEDULER: "scheduler",
    names.USER_CONTENT: "user_content",
    names.RANK_CONTENT_DIR: "rank_content",
    names.RANK_STATE_DIR: "rank_state",
    names.INDEX_DIR: "index",
    names.MANIFEST: "index",
}


_UNMARKED = TagInfo("", math.inf, complete=True, ours=False)
"""A checkpoint of which no marker tells when it was written."""


class View(NamedTuple):
    """The choice of contents.

    ``rank`` is the rank whose contents are shown; ``pattern`` lists its tensors. With ``by_prefix`` the global tensors
    are shown, those whose names differ only in numbers as one. ``partitions`` are cuts that the tag does not record, by
    name.
    """

    rank: int = 0
    pattern: str | None = None
    by_prefix: bool = False
    partitions: Mapping[str, Partition] | None = None


def inspection(path: str, tag: str | None, view: View, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe one complete tag, by default the latest of the directory ``path``, which may also be the tag itself.

    Parts that cannot be read are None, and ``problems`` says why.

    Raises:
        CheckpointNotFound: no such tag, or it is incomplete.
        MalformedFile: its manifest is damaged.
        InvalidArgument: no such rank.

    What another program wrote is described as a tag of its ranks.
    """
    directory, tag = locate(path, tag, options)
    storage = open_storage(directory, storage_options=options)

    def read(opened: OpenTag) -> dict[str, Any]:
        document = _document(opened, _info(opened), view)
        if document["problems"]:
            opened.require_unchanged()
        return document

    return _of_tag(storage, tag, read)


def template(path: str, tag: str | None, kind: str, options: Mapping[str, Any] | None) -> str:
    """Return the JSON of a template of "partitions" or "saved-param-names", with an entry in each line.

    Raises InvalidArgument if the tag records all of it.
    """
    directory, tag = locate(path, tag, options)
    storage = open_storage(directory, storage_options=options)

    def read(opened: OpenTag) -> str:
        facts = partitions_template(opened) if kind == "partitions" else names_template(opened)
        if not facts:
            raise InvalidArgument(f"{opened.where} records all that --{kind} could say, or has no such part")
        if isinstance(facts, dict):
            return _by_line(facts)
        return json.dumps(facts, indent=1)

    return _of_tag(storage, tag, read)


def _by_line(entries: Mapping[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    return f"{{\n{lines}\n}}"


def _of_tag(storage: Storage, tag: str | None, read: Callable[[OpenTag], _Answer]) -> _Answer:
    def opened() -> _Answer:
        inside, chosen = choose_anything(storage, tag, None)
        tag_read = chosen.open(inside, chosen.key)
        with tag_read.guarded():
            return read(tag_read)

    return of_latest(tag is None, opened)


def _info(opened: OpenTag) -> TagInfo:
    """Return the entry of the tag in its directory."""
    tags = [find_tag(opened.storage, opened.tag)] if opened.tag else list_tags(opened.storage)
    info = next((info for info in tags if info is not None and info.tag == opened.tag), None)
    if info is None and find_by_path(opened.storage, opened.tag) is not None:
        info = replace(_UNMARKED, tag=opened.tag)
    if info is None:
        raise TagReplaced(f"{opened.where} was removed while it was read")
    return info


def _document(opened: OpenTag, info: TagInfo, view: View) -> dict[str, Any]:
    at = opened.topology.coordinates_of(view.rank)
    cuts = partitions_of_tag(opened, view.partitions)
    problems: list[str] = []
    document: dict[str, Any] = {
        "directory": opened.storage.url,
        **summary(opened, info),
        **_place_fields(opened, info),
        **_manifest_fields(opened),
        "sizes": _sizes(opened),
        "meshes": None,
        "per_rank": list(opened.per_rank),
        "parameters": None,
        "optimizer": None,
        "user_content": None,
        "rank": view.rank,
        "tensors": None,
        "prefixes": None,
        "problems": problems,
    }
    with collect_problems(problems):
        document["meshes"] = _meshes(opened)
    with collect_problems(problems):
        document["parameters"] = _parameters(opened, view.rank, cuts)
    with collect_problems(problems):
        document["optimizer"] = _optimizer(opened, at)
    with collect_problems(problems):
        document["user_content"] = _user_content(opened)
    if view.pattern is not None:
        with collect_problems(problems):
            document["tensors"] = _tensors(opened, at, view.pattern, problems)
    if view.by_prefix:
        with collect_problems(problems):
            document["prefixes"] = _prefixes(opened, cuts)
    return document


def _place_fields(opened: OpenTag, info: TagInfo) -> dict[str, Any]:
    """Return whether it is the latest tag of its directory; for what is no tag, who wrote it."""
    if info.order_time < math.inf:
        return {"latest": info == latest(list_tags(opened.storage))}
    checkpoint = recognise(opened.storage, opened.tag)
    return {"latest": False, "written_by": None if checkpoint is None else checkpoint.writer.value}


def _manifest_fields(opened: OpenTag) -> dict[str, Any]:
    """Return the facts that only a manifest records; tags without one have the same keys."""
    manifest = opened.manifest
    if manifest is None:
        return {"attempt": None, "world_size": None, "standard_rank_order": None, "versions": {}, "timings": {}}
    return {
        "attempt": manifest.attempt,
        "world_size": opened.topology.world_size,
        "standard_rank_order": opened.topology.rank_map is None,
        "versions": dict(manifest.versions),
        "timings": dict(manifest.timings),
    }


def _meshes(opened: OpenTag) -> list[dict[str, Any]] | None:
    """Return the device meshes of a mesh job, with the number of each form: stages and replicas may have their own."""
    if opened.mesh is None:
        return None
    counts: Counter[tuple[Any, Any]] = Counter()
    for mesh in opened.mesh.meshes():
        count, *shape = mesh.shape
        counts[mesh.names[1:], tuple(shape)] += count
    return [{"names": list(names), "shape": list(shape), "count": n} for (names, shape), n in counts.items()]


def _sizes(opened: OpenTag) -> dict[str, dict[str, int]]:
    """Return files and bytes of each part; ``other`` is unknown, or from an older layout."""
    sizes: dict[str, dict[str, int]] = {}
    files = TagFiles(opened.storage, opened.tag)
    for file in files_of(files):
        part = sizes.setdefault(_PART_OF.get(file.partition("/")[0], "other"), {"files": 0, "nbytes": 0})
        part["files"] += 1
        part["nbytes"] += opened.storage.size(files.key(file))
    return sizes


def _user_content(opened: OpenTag) -> dict[str, Any] | None:
    if not opened.parts.user_content:
        return None
    try:
        return {**content_document(opened.user_content()), "refused": None}
    except UnsafePickle as error:  # it was saved with trust_pickle=True
        return {"type": None, "entries": [], "refused": str(error)}


def _optimizer(opened: OpenTag, at: Coordinates) -> dict[str, Any] | None:
    """Return kind, groups, and state entries of a tag's optimizer as one rank sees it; None if none was saved."""
    kind = opened.parts.optimizer
    if kind is None:
        return None
    opened, tree = _seen_from(opened, "optimizer", at)
    state = _dict(tree.get("base_state")) or _dict(tree.get("state"))
    groups = [group for group in _list(tree.get("param_groups")) if isinstance(group, dict)]
    return {
        "kind": kind,
        "rank": opened.topology.rank_of(at),
        "parameters": sum(len(_list(group.get("params"))) for group in groups),
        "parameters_with_state": len(state),
        "entries": list(dict.fromkeys(str(name) for entries in state.values() for name in _dict(entries))),
        "master_weights": opened.parts.master_weights,
        "names_known": opened.optimizer_names(at) is not None,
        "param_groups": [
            {
                "parameters": len(_list(group.get("params"))),
                "optimizer": group.get(OPTIMIZER_NAME),
                "options": {str(key): plain(value) for key, value in group.items() if key not in _NO_OPTIONS},
            }
            for group in groups
        ],
    }


_NO_OPTIONS = ("params", OPTIMIZER_NAME)


def _dict(value: Any) -> dict[Any, Any]:
    """Return ``value`` if it is a dict, else an empty one, so that a malformed file can be shown."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _prefixes(opened: OpenTag, partitions: Mapping[str, Partition]) -> list[dict[str, Any]]:
    """Describe the global tensors; names that differ only in numbers and have one form are one group."""
    tensors = WholeTag(opened, partitions=partitions).tensors
    forms = (
        (name, (tensor.dtype, tensor.shape, tensor.local_shape if tensor.shape is None else None, tensor.partition))
        for name, tensor in tensors.items()
    )
    return [
        _group_fields(GlobalTensor(name, *form), count, opened.topology) for name, count, form in group_names(forms)
    ]


def _group_fields(tensor: GlobalTensor, count: int, topology: Topology) -> dict[str, Any]:
    """Describe so many tensors of one form; of those of unknown shape, what a rank has."""
    local_nbytes = None if tensor.shape is not None else replace(tensor, shape=tensor.local_shape).nbytes
    return {
        "prefix": tensor.name,
        "tensors": count,
        "dtype": tensor.dtype,
        "shape": None if tensor.shape is None else list(tensor.shape),
        "local_shape": None if tensor.local_shape is None else list(tensor.local_shape),
        "nbytes": None if tensor.nbytes is None else count * tensor.nbytes,
        "local_nbytes": None if local_nbytes is None else count * local_nbytes,
        "cut": None if tensor.partition is None else _describe(tensor.partition, topology),
    }


def _parameters(opened: OpenTag, rank: int, partitions: Mapping[str, Partition]) -> list[dict[str, Any]]:
    """Describe every parameter and buffer, of all pipeline stages; of a mesh job, what ``rank`` held of each.

    Facts that neither a tag nor ``partitions`` tell are None. NxD's files hold local tensors without their partition:
    what ranks hold alike is whole.
    """
    if not opened.parts.model:
        return []
    manifest = opened.manifest
    topology = opened.topology
    knows = manifest is not None and _knows_trained(manifest)
    layouts = {} if opened.mesh is None else opened.mesh.layouts("model/")
    parameters = []
    for name, spec in recorded_parameters(opened, partitions).items():
        cut = spec.partition
        whole = cut.global_shape(spec.shape, topology.ep) if cut.known else None
        parameter = {
            "name": name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "global_shape": None if whole is None else list(whole),
            "partition": None if manifest is None and not cut.known else cut.to_json(),
            "cut": _describe(cut, topology),
            "trainable": spec.trainable if knows else None,
        }
        parameters.append(parameter | _on_mesh(layouts.get(name), spec.shape, rank, topology.world_size))
    return parameters


def _knows_trained(manifest: Manifest) -> bool:
    """Return whether the save told parameters that are trained from others.

    A state dict does not: all of its tensors count as untrained. A conversion takes it over, or counts all as trained.
    """
    kinds = {spec.trainable for spec in manifest.parameters.values()}
    return len(kinds) == 2 or (kinds == {True} and not manifest.is_converted)


def _on_mesh(layout: Layout | None, shape: tuple[int, ...], rank: int, world_size: int) -> dict[str, Any]:
    """Return the shape that a rank of a mesh held, and how the tensor was placed; nothing if it was whole there.

    A dimension of a mesh without names is called "all ranks", or by its number.
    """
    if layout is None:
        return {}
    coordinate = layout.mesh.coordinate_of(rank)
    if coordinate is None:
        return {"shape": None, "cut": f"not on rank {rank}"}
    dimensions = enumerate(zip(layout.mesh.names, layout.mesh.shape, layout.placements, strict=True))
    cuts = []
    for number, (name, size, placement) in dimensions:
        if placement is not None:  # the first dimension counts meshes
            ranks = name or ("all ranks" if size == world_size else f"mesh dimension {number - 1}")
            cuts.append(f"dim {placement.dim} in {size} ({ranks})")
    return {"shape": list(layout.local_shape(shape, coordinate)), "cut": ", ".join(cuts) or "whole"}


def _describe(partition: Partition, topology: Topology) -> str:
    """Return the partition as text: ``whole``, ``dim 0 in 4``, ``dim 0 over 2 ep ranks, dim 1 in 4``."""
    if not partition.known:
        return "unknown"
    cuts = []
    if partition.expert:
        cuts.append(f"dim 0 over {topology.ep} ep ranks")
    if partition.fused:
        sections = " + ".join(f"{section.size} in {section.num_partitions}" for section in partition.fused)
        cuts.append(f"dim {partition.partition_dim} of {sections}")
    elif not partition.replicated_over_tp:
        cuts.append(_plain_cut(partition, topology.tp))
    return ", ".join(cuts) or "whole"


def _plain_cut(partition: Partition, tp: int) -> str:
    cut = f"dim {partition.partition_dim} in {partition.num_partitions}"
    if partition.partition_stride > 1:
        cut += f", {partition.partition_stride} blocks each"
    if partition.num_partitions < tp:
        cut += f", each on {tp // partition.num_partitions} ranks"
    if partition.rank_ordering is not None:
        cut += f", by rank {' '.join(map(str, partition.rank_ordering))}"
    return cut


def _tensors(opened: OpenTag, at: Coordinates, pattern: str, problems: list[str]) -> list[dict[str, Any]]:
    """Return the tensors of model and optimizer that the rank at these coordinates holds and whose name matches.

    If none does, ``problems`` says so. Of a mesh job it is what the rank wrote.

    ``pattern`` is a shell pattern for names such as ``model/embed.weight`` and ``optim/embed.weight/exp_avg``. In NxD's
    tags optimizer entries have numbers as names (``optim/#0/exp_avg``), and the boxes of the global tensor are unknown.
    """
    if opened.mesh is not None:
        entries = [one for one in opened.index(at).tensors if not one.file.startswith(f"{names.RANK_STATE_DIR}/")]
        described = [_row(entry.name, entry, entry.pieces) for entry in entries]
        for name, leaf in own_tensors(opened, opened.topology.rank_of(at)):
            described += _stored_rows(opened, name, leaf)
    else:
        described = list(_state_rows(opened, at))
    matching = [tensor for tensor in described if fnmatchcase(tensor["name"], pattern)]
    if not matching and pattern != "*":
        there = [tensor["name"] for tensor in described]
        problems.append(f"no tensor of this rank is called {listed([pattern], there)}; there are {first_of(there)}")
    return matching


def _state_rows(opened: OpenTag, at: Coordinates) -> Iterator[dict[str, Any]]:
    """Yield a row for each tensor on disk of the model and the optimizer of the rank at these coordinates."""
    if opened.parts.model:
        seen, tree = _seen_from(opened, "model", at)
        for path, leaf in iter_tensors(tree, _LEAVES):
            yield from _stored_rows(seen, f"model/{'.'.join(map(str, path))}", leaf)
    if opened.parts.optimizer:
        seen, tree = _seen_from(opened, "optimizer", at)
        parameters = dict(enumerate(seen.optimizer_names(at) or ()))
        for path, leaf in iter_tensors(tree, _LEAVES):
            yield from _stored_rows(seen, f"optim/{entry_name(path, parameters)}", leaf)


def _seen_from(opened: OpenTag, part: str, at: Coordinates) -> tuple[OpenTag, dict[str, Any]]:
    """Return the tag as the rank at these coordinates saw it, and its tree of a part."""
    if not opened.per_rank:  # which needs no torch
        return opened, opened.model_tree(at) if part == "model" else opened.optimizer_tree(at)
    from nxd_ckpt.loading.rank_state import tree_of_rank

    return tree_of_rank(opened, part, opened.topology.rank_of(at))


_LEAVES = (TensorStub, Assembly, MissingTensor)


def _stored_rows(opened: OpenTag, name: str, leaf: TensorStub | Assembly | MissingTensor) -> Iterator[dict[str, Any]]:
    for stub in (fragment.stub for fragment in leaf.fragments) if isinstance(leaf, Assembly) else (leaf,):
        entry = opened.entries.get((stub.file, getattr(stub, "offset", 0)))
        # An empty tensor lies where the next one does.
        yield _row(name, stub, None if entry is None or entry.shape != stub.shape else entry.pieces)


def _row(name: str, place: TensorStub | MissingTensor | TensorEntry, pieces: Sequence[Piece] | None) -> dict[str, Any]:
    return {
        "name": name,
        "file": place.file,
        "offset": getattr(place, "offset", None),
        "nbytes": getattr(place, "nbytes", None),
        "dtype": place.dtype,
        "shape": None if place.shape is None else list(place.shape),
        "pieces": None
        if pieces is None
        else [
            {"local": list(piece.local.offset), "offset": list(piece.box.offset), "size": list(piece.box.size)}
            for piece in pieces
        ],
    }
