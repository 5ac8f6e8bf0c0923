"""Files that cost a reader as much as their bytes can: one thing of a kind, again and again."""

import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from itertools import count

from nxd_ckpt.core import limits
from tests.core.documents import as_before, sealed
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


def _twice(nbytes: int) -> bytes:
    names = [*(f"{index}" for index in range(nbytes // 12)), "x", "x"]
    return ("{" + ",".join(f'"{name}":0' for name in names) + "}").encode()


def _archive_of(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for member in members:
            tar.addfile(member)
    return out.getvalue()


def _headers(nbytes: int) -> bytes:
    """An archive of empty files."""
    return _archive_of(*(tarfile.TarInfo(f"one/{index}") for index in range(nbytes // tarfile.BLOCKSIZE - 2)))


def _long_name(nbytes: int) -> bytes:
    return _archive_of(tarfile.TarInfo("x/" * (nbytes // 2 - tarfile.BLOCKSIZE) + "x"))


def _layers(nbytes: int) -> bytes:
    return json.dumps({**json.loads(valid.CONFIGS[0]), "num_hidden_layers": nbytes // 20}).encode()


def _long_pattern(nbytes: int) -> bytes:
    document = json.loads(valid.MAPPINGS[0])
    document["rules"][0]["nxd"] += "{layer}" * (min(nbytes, limits.MAPPING - 20_000) // 7)
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


def _zipped_pickle(pickled: _Maker) -> _Maker:
    return _zipped(lambda nbytes: {"data.pkl": pickled(nbytes - 300), "version": b"3\n"})


_REFERENCE = named("torch_xla.utils.serialization", "TensorReference") + b")\x81}" + text("tid") + b"K\x00sbq\x020"


def _beside_an_array(unit: bytes) -> _Maker:
    """A tree with an array in it, for which no tree may be copied."""
    return lambda nbytes: _pickle(unit)(nbytes - 200)[:-2] + array(b"K\x01\x85", bytes(8)) + b"e."


def _at_most(limit: int, makers: dict[str, _Maker]) -> dict[str, _Maker]:
    """Files of the size up to which they are read at all."""

    def capped(made: _Maker) -> _Maker:
        return lambda nbytes: made(min(nbytes, limit))

    return {what: capped(made) for what, made in makers.items()}


def _records(nbytes: int) -> dict[str, bytes]:
    return {"data.pkl": b"\x80\x04].", **{f"data/{index}": b"" for index in range((nbytes - 300) // 130)}}


def _sealed_parameters(nbytes: int) -> bytes:
    document = json.loads(valid.MANIFESTS[0])
    return sealed({**document, "parameters": {f"{index}": 0 for index in range(nbytes // 13)}})


def _sealed_specifications(nbytes: int) -> bytes:
    document = json.loads(valid.MANIFESTS[0])
    spec = document["specifications"][0]
    return sealed({**document, "specifications": [spec] * (nbytes // len(json.dumps(spec)))})


def _older_parameters(nbytes: int) -> bytes:
    document = as_before(json.loads(valid.MANIFESTS[0]))
    name, spec = next(iter(document["parameters"].items()))
    each = len(json.dumps(spec)) + len(name) + 12
    return sealed({**document, "parameters": {f"{name}{index}": spec for index in range(nbytes // each)}})


def _forms(nbytes: int) -> bytes:
    document = json.loads(valid.INDEXES[0])
    form = document["tensors"]["forms"][0]
    document["tensors"]["forms"] = [form] * (nbytes // len(json.dumps(form)))
    return json.dumps(document).encode()


def _safetensors(nbytes: int) -> bytes:
    about = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    header = json.dumps({str(index): about for index in range(nbytes // 60)}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


_TEXT = text("1" * 4000)
_SIXTY = b"(" + b"N" * 60 + b"tq\x050"
_PICKLES: dict[str, _Maker] = {
    "lists": _pickle(b"]"),
    "dicts": _pickle(b"}"),
    "sets": _pickle(b"\x8f"),
    "marks": _pickle(b"("),
    "frozensets": _pickle(b"(\x91"),
    "tuples": _pickle(b"N\x85"),
    "floats": _pickle(b"G" + bytes(7) + b"\x01"),
    "numbers": _pickle(b"M\xff\xff"),
    "texts": _pickle(b"\x8c\x02ab"),
    "memos": _pickle(b"]\x94"),
    "lists in lists": _pickle(b"]a"),
    "persistent ids": _pickle(b"NQ"),
    "dicts of one key": _pickle(b"}h\x05Ns", _SIXTY),
    "sets of one item": _pickle(b"(h\x05\x91", _SIXTY),
    # As many as a pickle may make, so that more is done with them.
    "lists, and others": _beside_an_array(b"]NNN"),
    "lists of one, and others": _beside_an_array(b"]Na"),
    "lists of an empty tuple": _beside_an_array(b"])a"),
    "tuples, and others": _beside_an_array(b"N\x85NN"),
    "tuples of an empty one": _beside_an_array(b")N\x86"),
    "dicts of one, and others": _beside_an_array(b"}NNs"),
    "sets, and others": _beside_an_array(b"\x8f" + b"N" * 8),
    "calls of defaultdict": _calls("collections", "defaultdict"),
    "calls of OrderedDict": _calls("collections", "OrderedDict"),
    "calls of Counter": _calls("collections", "Counter"),
    "calls of bytearray": _calls("builtins", "bytearray"),
    "calls of set": _calls("builtins", "set"),
    "Namespaces": _objects("argparse", "Namespace"),
    "UUIDs": _objects("uuid", "UUID"),
    "Decimals": _calls("decimal", "Decimal", _TEXT),
    "Fractions": _calls("fractions", "Fraction", _TEXT),
    "paths": _calls("pathlib", "PosixPath", _TEXT),
    "Sizes": _calls("torch", "Size", b"(" + b"K\x01" * 60 + b"t"),
    "dtypes": _calls("numpy", "dtype", text("f8"), b"\x89", b"\x88"),
    "tensors": _pickle(
        b"h\x05h\x06R",
        REBUILD[: -len(EMPTY_STORAGE)] + b"q\x050" + EMPTY_STORAGE + b"K\x00K\x01\x85K\x01\x85\x89Ntq\x060",
    ),
    "a float of digits": lambda nbytes: b"\x80\x04F" + b"1" * (nbytes - 5) + b"\n.",
    "a dict of numbers of one hash": _keys(_number),
    "a set of numbers of one hash": _keys(_number, b"\x8f(", b"", b"\x90"),
    "a frozenset of numbers of one hash": _keys(_number, b"(", b"", b"\x91"),
    "a set, called, of numbers of one hash": _keys(_number, named("builtins", "set") + b"](", b"", b"e\x85R"),
    "a dict of pairs of one hash": _keys(_pair),
}
_DOCUMENTS: dict[str, _Maker] = {
    "lists": _json("[", "[]", "]"),
    "objects": _json('{"a":[', '{"a":1}', "]}"),
    "a float of digits": _text('{"x":0.', "1", "}"),
    "a name twice, after many": _twice,
}

_BY_READER: dict[str, dict[str, _Maker]] = {
    "pickle": _PICKLES,
    "index": {
        **_DOCUMENTS,
        "files": _json('{"format_version":1,"kind":"rank_index","files":[', "[0,0]", "]}"),
        "forms": _forms,
    },
    "manifest": {
        **_DOCUMENTS,
        "parameters": _sealed_parameters,
        "specifications": _sealed_specifications,
        "older parameters": _older_parameters,
    },
    **dict.fromkeys(("vote", "verdict", "lease", "journal", "intent", "weight map", "digests"), _DOCUMENTS),
    "config.json": {**_DOCUMENTS, "layers": _layers},
    "mapping": _at_most(limits.MAPPING, {**_DOCUMENTS, "a long pattern": _long_pattern}),
    "newest": {"lines": lambda nbytes: b"a\n" * (nbytes // 2)},
    "done": {"digits": lambda nbytes: b"1" * (nbytes - 2) + b" a"},
    "safetensors": {"tensors": _safetensors},
    "archive": {"headers": _headers, "a long name": _long_name},
    "torch file": {"records": _zipped(_records)},
    "xser info": {"lists": _zipped_pickle(_pickle(b"]"))},
    "xser references": {
        "lists": _zipped_pickle(_pickle(b"]")),
        "one reference": _zipped_pickle(_pickle(b"h\x02", _REFERENCE)),
        "records": _zipped(_records),
    },
    "DCP metadata": {"lists": _pickle(b"]"), "sets": _pickle(b"\x8f")},
}
WORST: dict[str, tuple[str, _Maker]] = {
    f"{reader}: {what}": (reader, made) for reader, makers in _BY_READER.items() for what, made in makers.items()
}
"""By name: whose file it is, and what makes it."""
