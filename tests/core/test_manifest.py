"""The JSON of manifests and indexes: what is written is read back; anything else is an error that names the file."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import (
    FileEntry,
    Manifest,
    ParameterSpec,
    RankIndex,
    dump_index,
    dump_manifest,
    load_index,
    load_manifest,
    load_parameters,
)
from nxd_ckpt.core.partition import Partition, Piece
from nxd_ckpt.errors import MalformedFile
from tests.core.documents import INDEX, LEADERS_INDEX, MANIFEST, MESH_MANIFEST, METRICS, SPECS, STEP, as_before, sealed


@pytest.mark.parametrize("index", [INDEX, LEADERS_INDEX])
def test_an_index_is_read_back(index: RankIndex) -> None:
    """Every field of it: pieces and digests, and what a leader of a mesh job says of its group. So is an older one: in
    versions 1 and 2 each tensor and parameter was an object."""
    data = dump_index(index)
    for text in (data, json.dumps(as_before(json.loads(data))).encode()):
        assert index == load_index(text, "index")
        assert SPECS == load_parameters(text, "index")


@pytest.mark.parametrize(
    "manifest",
    [
        *(MANIFEST, MESH_MANIFEST, replace(MANIFEST, metrics=METRICS), replace(MESH_MANIFEST, metrics=METRICS)),
        replace(MANIFEST, metrics=METRICS, per_rank=("model/a",), guests={"sub/config.json": FileEntry(2, 7)}),
    ],
    ids=["plain", "mesh", "metrics", "mesh with metrics", "guests"],
)
def test_a_manifest_is_read_back(manifest: Manifest) -> None:
    """Every field: the map of a cluster whose ranks are in an order of their own, and the leaders of a mesh job."""
    assert manifest == load_manifest(dump_manifest(manifest), "manifest.json")
    before = as_before(json.loads(dump_manifest(manifest)))  # up to version 6 each parameter was an object
    assert manifest == load_manifest(sealed(before), "manifest.json")


def test_what_tensors_have_in_common_is_there_once() -> None:
    """Whoever made the objects: in an index forms and files are as many as differ, and specifications too."""
    own = [STEP._replace(name=f"{number}", pieces=(Piece(Box((0,), (0,)), Box((0,), (0,))),)) for number in range(3)]
    specs = {entry.name: ParameterSpec("float32", (2,), Partition()) for entry in own}
    index = json.loads(dump_index(replace(INDEX, tensors=tuple(own), parameters=specs)))
    counts = len(index["tensors"]["files"]), len(index["tensors"]["forms"]), len(index["specifications"])
    assert (1, 1, 1) == counts
    assert 1 == len(json.loads(dump_manifest(replace(MANIFEST, parameters=specs)))["specifications"])


def test_a_document_may_be_laid_out_in_another_way() -> None:
    """Other implementers' JSON has white space, and keys in an order of its own."""
    fields = dict(reversed(json.loads(dump_index(INDEX)).items()))
    assert INDEX == load_index(json.dumps(fields, indent=2).encode(), "index")


def test_a_manifest_vouches_for_itself() -> None:
    """No other file has its digest: any changed byte is noticed, valid JSON or not."""
    data = dump_manifest(MANIFEST)
    for position in range(len(data)):
        changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        with pytest.raises(MalformedFile, match=r"manifest\.json"):
            load_manifest(changed, "manifest.json")


@pytest.mark.parametrize("load", [load_index, load_manifest])
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"kind":"other"}', b"[" * 100_000])
def test_what_is_no_document_is_refused(load: Callable[[bytes, str], object], data: bytes) -> None:
    """Cut off, damaged or of another kind: the error names the file."""
    with pytest.raises(MalformedFile, match=r"^dir/file\.json: "):
        load(data, "dir/file.json")
    with pytest.raises(MalformedFile, match=r"^index: expected a JSON object of kind 'rank_index'"):
        load_parameters(dump_manifest(MANIFEST), "index")


def test_a_newer_format_says_so() -> None:
    """A file of a later version is not damaged: the error says what to use."""
    document = {**json.loads(dump_index(INDEX)), "format_version": 4}
    with pytest.raises(MalformedFile, match="format_version 4, this nxd_ckpt reads 1, 2, 3;"):
        load_index(json.dumps(document).encode(), "index")
    with pytest.raises(MalformedFile, match="format_version 8, this nxd_ckpt reads 1, 2, 3, 4, 5, 6, 7;"):
        load_manifest(sealed({**json.loads(dump_manifest(MANIFEST)), "format_version": 8}), "manifest.json")


JUNK: st.SearchStrategy[Any] = st.sampled_from([None, True, -1, 1.5, "x", [], {}, [-1], [[0]], {"x": 1}, 2**70])


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a JSON document something could be replaced."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*path, key) for key, _ in children] + [
        deeper for key, child in children for deeper in paths_of(child, (*path, key))
    ]


def with_other(document: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """The document with another value at a path."""
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = junk
    return copy


def read_or_refused(load: Callable[[bytes, str], Any], data: bytes) -> Any:
    """Return the document that ``load`` makes of the data; None where it raises an error that names the file."""
    try:
        return load(data, "the file")
    except MalformedFile as error:
        named = re.match("the file: ", str(error))
    assert named
    return None


@given(data=st.data(), junk=JUNK)
def test_an_index_with_another_value_is_read_or_refused_by_name(data: st.DataObject, junk: Any) -> None:
    """Whatever stands in the place of a value, it is read as it is or refused by name: no other error escapes."""
    document = json.loads(dump_index(data.draw(st.sampled_from([INDEX, LEADERS_INDEX]))))
    document = data.draw(st.sampled_from([document, as_before(document)]))
    changed = with_other(document, data.draw(st.sampled_from(paths_of(document))), junk)
    index = read_or_refused(load_index, json.dumps(changed).encode())
    if index is not None:
        assert all(type(value) is int for value in vars(index.coordinates).values())
        assert all(Box.whole(entry.shape).contains(p.local) for entry in index.tensors for p in entry.pieces or ())


@given(data=st.data(), junk=JUNK)
def test_a_manifest_with_another_value_is_read_or_refused_by_name(data: st.DataObject, junk: Any) -> None:
    document = json.loads(dump_manifest(data.draw(st.sampled_from([MANIFEST, MESH_MANIFEST]))))
    document = data.draw(st.sampled_from([document, as_before(document)]))
    changed = with_other(document, data.draw(st.sampled_from(paths_of(document))), junk)
    manifest = read_or_refused(load_manifest, sealed(changed))
    if manifest is not None:
        assert manifest == load_manifest(dump_manifest(manifest), "manifest.json")


DOCUMENT = json.loads(dump_index(INDEX))
OLDER = as_before(DOCUMENT)
KEYS = [
    *((DOCUMENT, path) for path in paths_of(DOCUMENT) if path[0] not in ("files", "parameters")),
    *((OLDER, path) for path in paths_of(OLDER) if path[0] == "tensors"),
]


@pytest.mark.parametrize(("document", "path"), [each for each in KEYS if isinstance(each[1][-1], str)])
def test_an_index_without_one_of_its_keys(document: Any, path: tuple[Any, ...]) -> None:
    """Every key is needed; only that of a partition may be missing, which has a default."""
    if path[-2:-1] == ("partition",):
        path = path[:-1]
    parent = document = json.loads(json.dumps(document))
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    with pytest.raises(MalformedFile, match=r"^index: "):
        load_index(json.dumps(document).encode(), "index")


COLUMNS = {key: DOCUMENT["tensors"][key] for key in ("name", "file", "form", "offset", "crc32")}


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        # Of different lengths it would be open which digest is whose.
        *((("tensors", key), [column[:-1], [*column, column[0]]], r"\(Value") for key, column in COLUMNS.items()),
        # None is counted from the end, and nothing but integers counts.
        (("tensors", "file", 0), [-1, 2, True, 1.0, "1", None], ""),
        (("tensors", "form", 0), [-1, 2, True, 1.0, "1", None], ""),
        (("parameters", "tokens"), [-1, 2, True, 1.0, "1", None], ""),
        # A slice read there would give the bytes of another tensor.
        (("tensors", "forms", 0, 3, 0, 0), [[2, 0]], r".*a piece at \[2:4, 0:3\] is not inside shape \(3, 3\)"),
        (("tensors", "crc32", 0), [[7]], ".*4194308 bytes with 1 digests"),
        (("optimizer_names",), [[1, 2], "embed", {"embed": 1}, [None], ["\ud800"]], ""),
    ],
    ids=str,
)
def test_what_an_index_cannot_say(path: tuple[Any, ...], values: list[Any], message: str) -> None:
    """Columns of different lengths, numbers without an item, pieces and digests that do not fit the tensor."""
    for value in values:
        with pytest.raises(MalformedFile, match=f"^index: malformed {message}"):
            load_index(json.dumps(with_other(DOCUMENT, path, value)).encode(), "index")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ranks", [], "0 ranks, expected the 4 of dp=2 tp=2"),
        ("topology", {"dp": 1, "tp": 10**9, "pp": 1, "ep": 1, "rank_map": None}, "expected the 1000000000 of"),
        ("tag", "../../outside", "not a path"),
        ("attempt", "..", "name of a file or directory"),
        ("order_time", float("inf"), "number from 0"),
        ("order_time", 1e300, "number from 0"),
        ("parts", {"model": 1}, "expected a bool"),
        ("parts", {"optimizer": "other"}, "expected an optimizer of plain"),
        ("timings", {"bytes": "many"}, "number from 0"),
        ("versions", {"torch": 2}, "expected a string"),
        ("parameters", {"\ud800": {}}, r"'\\ud800' holds half a character|malformed"),
        *(("metrics", values, "") for values in ({"loss": "low"}, {"loss": True}, {"loss": [1]}, [2.0])),
        *(("metrics", {"loss": number}, "") for number in (10**400, float("nan"))),
    ],
)
def test_what_a_manifest_cannot_say(key: str, value: Any, message: str) -> None:
    """Sizes that its ranks contradict, names that lead elsewhere, values of another type: refused."""
    document = {**json.loads(dump_manifest(MANIFEST)), key: value}
    with pytest.raises(MalformedFile, match=f"^dir/manifest.json: .*({message})"):
        dict(load_manifest(sealed(document), "dir/manifest.json").parameters)
