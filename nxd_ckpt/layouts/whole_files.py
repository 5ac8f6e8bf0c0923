"""Model and optimizer as whole tensors in files of their own, or in a directory each. Only read.

=============  ======================================================================================================
ours           ``to="files"``: model.pt and optim.pt, or model.safetensors and optim.safetensors with optim.json; or
               directories ``model`` and ``optim``, each with an index.json
ours           ``to="hf"``: optimizer.safetensors with optimizer.json, beside the model
transformers   optimizer.pt and scheduler.pt of its trainer, beside the model; accelerate's end in ``.bin``
ColossalAI     directories ``modeling`` and ``optimizer``, or ``model`` and ``optim``, with an index; ``lr_scheduler``
=============  ======================================================================================================

tests/migrate/sources.md has the sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nxd_ckpt.core import document, names
from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.formats.optimizer_trees import restore_types
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.payload import Payload, PayloadFile, checked_dict, names_of_groups, payload_of
from nxd_ckpt.layouts.weight_files import by_index, find_weights, has_weights

OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_INDEX = f"{OPTIMIZER}.index.json"
OPTIMIZER_DOCUMENT = "optimizer.json"
"""Written beside a model by the form "hf", and no part of it: its readers look for other names."""

_MODEL, _STATE = "model.pt", "state."
_MODELS = ("model", "modeling")
_COLOSSALAI = "pytorch_optim.bin.index.json"
_BESIDE = ("optimizer.pt", "optimizer.bin")
"""Files of an optimizer that show nothing without a model beside them."""
_OF_A_TAG = names.optimizer_file(Topology(), Coordinates(), "plain")
"""The optimizer of a tag whose model is the trainer's file."""
_FURTHER = re.compile(r"optimizer_\d+\.bin")
_SCHEDULERS = ("scheduler.pt", "scheduler.bin", "lr_scheduler", "scheduler")
_CONTENTS = ("trainer_state.json", "running_states.json")

Read = Callable[[], dict[str, Any]]
"""Returns a state dict, with a TensorStub for each tensor."""


def is_present(files: TagFiles) -> bool:
    """Return whether the directory holds such files, and no model in Hugging Face's form."""
    own = {_MODEL, "model/index.json", *_OPTIMIZERS}.difference(_BESIDE, [_OF_A_TAG])
    return not has_weights(files.names()) and any(_has(files, file) for file in own)


def open_files(files: TagFiles) -> PayloadFile:
    """Open the directory of these files.

    Raises:
        PartNotFound: a file that an index names is missing.
        MalformedFile: an index and its files are of two saves.
    """
    with parsing(files.directory, "files of whole tensors"):
        parts = {"optimizer": optimizer_in(files), "scheduler": scheduler_in(files)}
        read = {part: read() for part, read in parts.items() if read is not None}
        return PayloadFile(files, "", Payload({**_model(files), **read, **content_in(files)}))


def optimizer_in(files: TagFiles) -> Read | None:
    """Return the function that reads the optimizer of the directory; None without one."""
    return next((partial(read, files, mark) for mark, read in _OPTIMIZERS.items() if _has(files, mark)), None)


def scheduler_in(files: TagFiles) -> Read | None:
    """Return the function that reads the scheduler's state dict; None without one."""
    file = next(filter(files.has, _SCHEDULERS), None)
    return None if file is None else partial(_tree, files, file)


def content_in(files: TagFiles) -> dict[str, Any]:
    """Return what the trainer kept of the run: steps, epochs and the like."""
    return {file.removesuffix(".json"): _json(files, file) for file in _CONTENTS if files.has(file)}


def _has(files: TagFiles, file: str) -> bool:
    """Return whether the file is there; a directory that is not there is not listed."""
    folder = file.rpartition("/")[0]
    return (not folder or files.names().get(folder) is True) and files.has(file)


def _model(files: TagFiles) -> dict[str, Any]:
    if files.has(_MODEL):
        payload = payload_of(files.tree(_MODEL), files.where(_MODEL))
        return {**payload.rest, "model": payload.model} if payload.model is not None else {"model": payload.content}
    folder = next((each for each in _MODELS if files.names().get(each) is True), None)
    if folder is None:
        return {}
    inner = TagFiles(files.storage, files.key(folder), trust_pickle=files.trust_pickle)

    def read(file: str) -> Mapping[str, Any]:  # a state dict may have values that are no tensors
        return files.safetensors(file) if file.endswith(".safetensors") else _tree(files, file)

    places = find_weights(inner, lambda file: read(f"{folder}/{file}")).places
    return {"model": _placed(files, f"{folder}/", places, read)}


def _placed(
    files: TagFiles, folder: str, places: Mapping[Any, str], read: Callable[[str], Mapping[Any, Any]]
) -> dict[Any, Any]:
    """Return what the files of an index hold, each read by ``read``. Raises MalformedFile if it says otherwise."""
    by_file = {file: read(f"{folder}{file}") for file in dict.fromkeys(places.values())}
    contents = {(key, file) for file, values in by_file.items() for key in values}
    other = sorted({str(key) for key, _ in contents ^ places.items()})
    if other:
        raise MalformedFile(
            f"{files.where(folder)}: its index and its files differ in {first_of(other)}; the directory mixes files of "
            "two saves"
        )
    return {key: value for values in by_file.values() for key, value in values.items()}


def _tree(files: TagFiles, file: str) -> dict[str, Any]:
    tree = files.tree(file)
    if not isinstance(tree, dict):
        raise MalformedFile(f"{files.where(file)}: expected a state dict, found {type(tree).__name__}")
    return tree


def _accelerates(files: TagFiles, file: str) -> dict[str, Any]:
    """Read the only optimizer of accelerate.

    Raises UnsupportedState for several: no file says which parameters are whose.
    """
    others = sorted(name for name in files.names() if _FURTHER.fullmatch(name))
    if others:
        raise UnsupportedState(
            f"{files.directory} has several optimizers, {file} and {first_of(others)}, and nothing says which "
            "parameters each has: load the model alone, or resume with nxd_ckpt.integrations.accelerate"
        )
    return _tree(files, file)


def _json(files: TagFiles, file: str) -> dict[str, Any]:
    return document.small(files.storage.read(files.key(file)), files.where(file))


def _exported(files: TagFiles, mark: str) -> dict[str, Any]:
    """Read the optimizer beside an export: tensors such as ``NAME/exp_avg``."""
    content = _json(files, mark)
    count = content.get("files", files.has(OPTIMIZER))  # exports of before do not say it
    if files.has(OPTIMIZER_INDEX) or count > 1:
        tensors = _placed(files, "", by_index(files, OPTIMIZER_INDEX), files.safetensors)
    else:
        tensors = dict(files.safetensors(OPTIMIZER)) if count else {}
    state = {**content.get("state", {}), **content.get("general", {})}
    return _by_name(content, state, "/", tensors)


def _unsharded(files: TagFiles, mark: str) -> dict[str, Any]:
    """Read an optimizer of the form "files", which ``mark`` is a file of: tensors such as ``state.NAME.exp_avg``."""
    document = "optim.json"
    folder = "optim/"
    if mark == document:
        tensors = dict(files.safetensors("optim.safetensors"))
    else:
        places = by_index(files, mark)
        is_of_torch = not (files.has(document) or any(file.endswith(".safetensors") for file in places.values()))
        if is_of_torch:
            return _of_chunks(files, folder, places)
        tensors = _placed(files, folder, places, files.safetensors)
    content = _json(files, document) if files.has(document) else {}
    by_path = {name.removeprefix(_STATE): stub for name, stub in tensors.items()}
    return _by_name(content, content.get("state", {}), ".", by_path)


def _of_chunks(files: TagFiles, folder: str, places: Mapping[str, str]) -> dict[str, Any]:
    """Return the state dict whose entries, such as ``state.NAME.exp_avg``, are in files that are each a part of it."""

    def parts(file: str) -> dict[str, tuple[list[Any], Any]]:
        tree = _tree(files, file)
        states = checked_dict(tree.get("state", {}), f"{files.where(file)}: state")
        paths = [([key], value) for key, value in tree.items() if key != "state" or not states]
        for name, state in states.items():
            is_parameters = isinstance(state, dict) and f"{_STATE}{name}" not in places
            entries = [([name, key], value) for key, value in state.items()] if is_parameters else [([name], state)]
            paths += [(["state", *path], value) for path, value in entries]
        return {".".join(map(str, path)): (path, value) for path, value in paths}

    whole: dict[str, Any] = {"state": {}}
    for (*above, key), value in _placed(files, folder, places, parts).values():
        entries = whole
        for each in above:
            entries = entries.setdefault(each, {})
        entries[key] = value
    return whole


def _by_name(
    content: Mapping[str, Any], state: Mapping[str, Any], separator: str, tensors: Mapping[str, TensorStub]
) -> dict[str, Any]:
    """Return the state dict of a document, with ``tensors`` by parameter and key; some belong to no parameter."""
    whole = {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}
    groups = content.get("param_groups", [])
    parameters = set(names_of_groups({"param_groups": groups}) or ())
    for path, stub in tensors.items():
        # Names of parameters and keys may both have separators: the longest parameter's is meant.
        cuts = [number for number, letter in enumerate(path) if letter == separator]
        cut = next((number for number in reversed(cuts) if path[:number] in parameters), cuts[-1] if cuts else None)
        if cut is None:
            whole[path] = stub
        else:
            whole.setdefault(path[:cut], {})[path[cut + 1 :]] = stub
    return restore_types({"state": whole, "param_groups": groups})


def _colossalai(files: TagFiles, index: str) -> dict[str, Any]:
    """Read the shards of ``optimizer.state_dict()``: state by number. The groups have a file of their own."""
    folder = index.removesuffix(_COLOSSALAI)
    places = {int(number): file for number, file in by_index(files, index).items()}
    state = _placed(files, folder, places, partial(_tree, files))
    group_file = _json(files, index).get("metadata", {}).get("param_groups")
    if not isinstance(group_file, str) or "/" in group_file:
        raise MalformedFile(f"{files.where(index)}: expected the file of the param groups, found {group_file!r}")
    return {"state": state, "param_groups": files.tree(f"{folder}{group_file}")}


_OPTIMIZERS: Mapping[str, Callable[[TagFiles, str], dict[str, Any]]] = {
    **dict.fromkeys(("optim.pt", "optimizer.pt", _OF_A_TAG), _tree),
    "optimizer.bin": _accelerates,
    OPTIMIZER_DOCUMENT: _exported,
    **dict.fromkeys(("optim/index.json", "optim.json"), _unsharded),
    **dict.fromkeys((f"optimizer/{_COLOSSALAI}", f"optim/{_COLOSSALAI}", _COLOSSALAI), _colossalai),
}
"""How an optimizer is read, by a file that shows it."""
