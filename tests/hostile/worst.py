"""Files that cost a reader as much as their bytes can: one thing of a kind, again and again."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from itertools import count

from nxd_ckpt.core import limits
from tests.core.documents import sealed
from tests.formats.pickles import EMPTY_STORAGE, named, text
from tests.hostile import valid
from tests.hostile.findings import REBUILD, array, number

_Maker = Callable[[int], bytes]
"""Makes a file of so many bytes, or of fewer where that is enough."""
_PRIME = 2**61 - 1
"""Hashes of numbers are taken modulo this."""


def _pickle(unit: bytes, before: bytes = b"") -> _Maker:
    """A list of ``unit``; ``before`` leaves nothing on the stack."""
    begin = b"\x80\x04" + before + b"]("
    return lambda nbytes: begin + unit * ((nbytes - len(begin)) // len(unit)) + b"e."


def _calls(module: str, name: str, *args: bytes) -> _Maker:
    """A list of what a function makes of the same arguments: both are named once."""
    given = b"(" + b"".join(args) + b"tq\x060" if args else b")q\x060"
    return _pickle(b"h\x05h\x06R", named(module, name) + b"q\x050" + given)


def _objects(module: str, name: str) -> _Maker:
    return _pickle(b"h\x05)\x81", named(module, name) + b"q\x050")


def _pair(index: int) -> bytes:
    """A tuple of two numbers, of the same hash as all others: what the second has to be for that is computed."""
    first = index + 1
    prime1, prime2, prime5, full = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64
    lane = (prime5 + first * prime2) % full
    lane = ((lane << 31) | (lane >> 33)) % full * prime1 % full
    second = (-lane) * pow(prime2, -1, full) % full
    return (number(first) + number(second) + b"\x86") if second < _PRIME else b""


def _keys(keys: Callable[[int], bytes], before: bytes = b"}(", each: bytes = b"N", after: bytes = b"u") -> _Maker:
    """Of ``keys(0)``, ``keys(1)`` and so on, those that are not empty."""

    def made(nbytes: int) -> bytes:
        data = bytearray(b"\x80\x04" + before)
        for key in filter(None, map(keys, count())):
            data += key + each
            if len(data) >= nbytes:
                break
        return bytes(data) + after + b"."

    return made


def _number(index: int) -> bytes:
    """A number of the same hash as all others."""
    return number(index * _PRIME)


def _json(begin: str, unit: str, end: str) -> _Maker:
    def made(nbytes: int) -> bytes:
        count = max(1, (nbytes - len(begin) - len(end)) // (len(unit) + 1))
        return (begin + ",".join([unit] * count) + end).encode()

    return made


def _text(begin: str, character: str, end: str) -> _Maker:
    return lambda nbytes: (begin + character * (nbytes - len(begin) - len(end)) + end).encode()


def _archive_of(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for member in members:
            tar.addfile(member)
    return out.getvalue()


def _headers(nbytes: int) -> bytes:
    """An archive of empty files."""
    return _archive_of(*(tarfile.TarInfo(f"one/{index}") for index in range(nbytes // tarfile.BLOCKSIZE - 2)))


def _long_pattern(nbytes: int) -> bytes:
    document = json.loads(valid.MAPPINGS[0])
    document["rules"][0]["nxd"] += "{layer}" * (nbytes // 7)
    return json.dumps(document).encode()


def _zipped(records: Callable[[int], dict[str, bytes]]) -> _Maker:
    """A torch file of these records."""

    def made(nbytes: int) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as file:
            for name, data in records(nbytes).items():
                file.writestr(f"archive/{name}", data)
        return out.getvalue()

    return made


def _zipped_pickle(unit: bytes) -> _Maker:
    return _zipped(lambda nbytes: {"data.pkl": _pickle(unit)(nbytes - 300), "version": b"3\n"})


def _zipped_references(nbytes: int) -> bytes:
    """A file of references that holds one of them again and again."""
    reference = named("torch_xla.utils.serialization", "TensorReference") + b")\x81}" + text("tid") + b"K\x00sbq\x020"
    pickled = _pickle(b"h\x02", reference)
    return _zipped(lambda nbytes: {"data.pkl": pickled(nbytes - 300), "version": b"3\n"})(nbytes)


def _beside_an_array(unit: bytes) -> _Maker:
    """A tree that is copied, since what stands for the array in it has to be replaced."""
    return lambda nbytes: _pickle(unit)(nbytes - 200)[:-2] + array(b"K\x01\x85", bytes(8)) + b"e."


def _at_most(limit: int, made: _Maker) -> _Maker:
    """A file of the size up to which it is read at all."""
    return lambda nbytes: made(min(nbytes, limit))


def _lines(nbytes: int) -> bytes:
    return b"- 1\n" * (nbytes // 4)


def _records(nbytes: int) -> dict[str, bytes]:
    return {"data.pkl": b"\x80\x04].", **{f"data/{index}": b"" for index in range((nbytes - 300) // 130)}}


def _sealed_parameters(nbytes: int) -> bytes:
    document = json.loads(valid.MANIFESTS[0])
    name, spec = next(iter(document["parameters"].items()))
    each = len(json.dumps(spec)) + len(name) + 12
    document["parameters"] = {f"{name}{index}": spec for index in range(nbytes // each)}
    return sealed(document)


def _safetensors(nbytes: int) -> bytes:
    about = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    header = json.dumps({str(index): about for index in range(nbytes // 60)}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


_TEXT = text("1" * 4000)
_LIMITS = {"mapping": limits.MAPPING, "mapping in YAML": limits.MAPPING_YAML}
_DEEP_JSON = '{"format_version":1,"kind":"%s","files":'

WORST: dict[str, tuple[str, _Maker]] = {
    **{
        f"a pickle of {what}": ("pickle", _pickle(unit))
        for what, unit in {
            "lists": b"]",
            "dicts": b"}",
            "sets": b"\x8f",
            "marks": b"(",
            "frozensets": b"(\x91",
            "tuples": b"N\x85",
            "floats": b"G" + bytes(7) + b"\x01",
            "numbers": b"M\xff\xff",
            "texts": b"\x8c\x02ab",
            "memos": b"]\x94",
            "lists in lists": b"]a",
            "persistent ids": b"NQ",
        }.items()
    },
    **{
        f"a pickle of {name}": ("pickle", _calls(module, name))
        for name, module in {
            "defaultdict": "collections",
            "OrderedDict": "collections",
            "Counter": "collections",
            "bytearray": "builtins",
            "set": "builtins",
        }.items()
    },
    "a pickle of dicts of one key": ("pickle", _pickle(b"}h\x05Ns", b"(" + b"N" * 60 + b"tq\x050")),
    "a pickle of sets of one item": ("pickle", _pickle(b"(h\x05\x91", b"(" + b"N" * 60 + b"tq\x050")),
    **{  # as many as a pickle may make, so that more is done with them
        f"a pickle of {what}, and an array": ("pickle", _beside_an_array(unit))
        for what, unit in {
            "lists, and others": b"]NNN",
            "lists of one, and others": b"]Na",
            "tuples, and others": b"N\x85NN",
            "dicts of one, and others": b"}NNs",
            "sets, and others": b"\x8f" + b"N" * 8,
        }.items()
    },
    "a pickle of Namespaces": ("pickle", _objects("argparse", "Namespace")),
    "a pickle of UUIDs": ("pickle", _objects("uuid", "UUID")),
    "a pickle of Decimals": ("pickle", _calls("decimal", "Decimal", _TEXT)),
    "a pickle of Fractions": ("pickle", _calls("fractions", "Fraction", _TEXT)),
    "a pickle of paths": ("pickle", _calls("pathlib", "PosixPath", _TEXT)),
    "a pickle of Sizes": ("pickle", _calls("torch", "Size", b"(" + b"K\x01" * 60 + b"t")),
    "a pickle of dtypes": ("pickle", _calls("numpy", "dtype", text("f8"), b"\x89", b"\x88")),
    "a pickle of tensors": (
        "pickle",
        _pickle(
            b"h\x05h\x06R",
            REBUILD[: -len(EMPTY_STORAGE)] + b"q\x050" + EMPTY_STORAGE + b"K\x00K\x01\x85K\x01\x85\x89Ntq\x060",
        ),
    ),
    "a float of digits": ("pickle", lambda nbytes: b"\x80\x04F" + b"1" * (nbytes - 5) + b"\n."),
    "a dict of numbers of one hash": ("pickle", _keys(_number)),
    "a set of numbers of one hash": ("pickle", _keys(_number, b"\x8f(", b"", b"\x90")),
    "a frozenset of numbers of one hash": ("pickle", _keys(_number, b"(", b"", b"\x91")),
    "a set, called, of numbers of one hash": (
        "pickle",
        _keys(_number, named("builtins", "set") + b"](", b"", b"e\x85R"),
    ),
    "a dict of pairs of one hash": ("pickle", _keys(_pair)),
    **{
        f"{reader}: {what}": (reader, _at_most(_LIMITS.get(reader, limits.DOCUMENT), made))
        for reader in (
            *("index", "manifest", "vote", "verdict", "lease", "journal", "intent"),
            *("config.json", "weight map", "mapping", "mapping in YAML"),
        )
        for what, made in {
            "lists": _json("[", "[]", "]"),
            "objects": _json('{"a":[', '{"a":1}', "]}"),
            "a float of digits": _text('{"x":0.', "1", "}"),
        }.items()
    },
    "index: files": ("index", _json(_DEEP_JSON % "rank_index" + "[", "[0,0]", "]}")),
    "manifest: parameters": ("manifest", _sealed_parameters),
    "newest: lines": ("newest", lambda nbytes: b"a\n" * (nbytes // 2)),
    "done: digits": ("done", lambda nbytes: b"1" * (nbytes - 2) + b" a"),
    "config.json: layers": (
        "config.json",
        lambda nbytes: json.dumps({**json.loads(valid.CONFIGS[0]), "num_hidden_layers": nbytes // 20}).encode(),
    ),
    "safetensors: tensors": ("safetensors", _safetensors),
    "archive: headers": ("archive", _headers),
    "xser info: lists": ("xser info", _zipped_pickle(b"]")),
    "xser references: lists": ("xser references", _zipped_pickle(b"]")),
    "xser references: one reference": ("xser references", _zipped_references),
    "archive: a long name": (
        "archive",
        lambda nbytes: _archive_of(tarfile.TarInfo("x/" * (nbytes // 2 - tarfile.BLOCKSIZE) + "x")),
    ),
    "mapping: a long pattern": ("mapping", _at_most(limits.MAPPING - 20_000, _long_pattern)),
    "mapping in YAML: lines": ("mapping in YAML", _at_most(limits.MAPPING_YAML, _lines)),
    "torch file: records": ("torch file", _zipped(_records)),
    "xser references: records": ("xser references", _zipped(_records)),
    "DCP metadata: lists": ("DCP metadata", _pickle(b"]")),
    "DCP metadata: sets": ("DCP metadata", _pickle(b"\x8f")),
}
"""By name: whose file it is, and what makes it."""
