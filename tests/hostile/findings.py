"""What once took the time, the memory or more of a reader, or could have: small files that ask for much.

Those that are made by a rule are here; those that a run of the fuzz tests found are files below ``corpus``.
"""

import json
import struct
import tarfile
from pathlib import Path
from typing import Any

from tests.formats.pickles import EMPTY_STORAGE, called, named, text
from tests.hostile.damage import with_checksum

_CORPUS = Path(__file__).parent / "corpus"


def found(target: str) -> list[bytes]:
    """The files that a run found, for one of the readers of :mod:`.targets`."""
    return [path.read_bytes() for path in sorted((_CORPUS / target).glob("*"))]


def keep(target: str, name: str, data: bytes) -> Path:
    """Put a file that a run found among the others."""
    path = _CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def number(value: int) -> bytes:
    """LONG4"""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(raw)) + raw


def doubled(times: int, pair: bytes) -> bytes:
    """A value that holds itself twice, ``times`` levels deep; ``pair`` makes one of two on the stack."""
    return b"(l" + b"".join(b"q\x00h\x00" + pair for _ in range(times))


PAIR = b"\x86"
LIST_PAIR = b"q\x01q\x02(h\x01h\x02l"
LONG = text("x" * 1000) + b"q\x07"
REBUILD = named("torch._utils", "_rebuild_tensor_v2") + EMPTY_STORAGE


def tensor(shape: bytes, stride: bytes, offset: bytes = b"K\x00") -> bytes:
    return REBUILD + offset + shape + stride + b"\x89NtR"


def array(shape: bytes, raw: bytes = b"") -> bytes:
    made = called(named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), b"K\x00\x85", text("b"))
    dtype = called(named("numpy", "dtype"), text("f8"), b"K\x00", b"K\x01") + b"(K\x03" + text("<") + b"NNNtb"
    content = called(named("_codecs", "encode"), text(raw.decode("latin1")), text("latin1"))
    return made + b"(K\x01" + shape + dtype + b"\x89" + content + b"tb"


def many(function: bytes, argument: bytes, times: int = 30_000) -> bytes:
    """A list of ``function(argument)``, named once each and called again and again."""
    again = b"h\x05h\x06\x85R"
    return function + b"q\x050" + argument + b"q\x060" + b"](" + again * times + b"e"


HOSTILE = {
    "a fraction with an exponent": called(named("fractions", "Fraction"), text("1e999999999")),
    "a fraction of digits": called(named("fractions", "Fraction"), text("1" * 10**6)),
    "a fraction of a decimal": called(
        named("fractions", "Fraction"), called(named("decimal", "Decimal"), text("1e999999"))
    ),
    "an int of a decimal": called(named("builtins", "int"), called(named("decimal", "Decimal"), text("1e999999999"))),
    "an int of digits": called(named("builtins", "int"), text("9" * 10**6)),
    "a decimal of digits": called(named("decimal", "Decimal"), text("9" * 10**6)),
    "a set of a range": called(named("builtins", "set"), called(named("builtins", "range"), b"J\xff\xff\xff\x0b")),
    "a list of a range": called(named("builtins", "list"), called(named("builtins", "range"), b"J\xff\xff\xff\x7f")),
    "a tuple of a range": called(named("builtins", "tuple"), called(named("builtins", "range"), b"J\xff\xff\xff\x7f")),
    "a frozenset of a range, by NEWOBJ": named("builtins", "frozenset")
    + called(named("builtins", "range"), b"J\xff\xff\xff\x0b")
    + b"\x85\x81",
    "a dict of a range": called(named("builtins", "dict"), called(named("builtins", "range"), b"J\xff\xff\xff\x7f")),
    "a Counter of a range": called(
        named("collections", "Counter"), called(named("builtins", "range"), b"J\xff\xff\xff\x0b")
    ),
    "an OrderedDict of a range": called(
        named("collections", "OrderedDict"), called(named("builtins", "range"), b"J\xff\xff\xff\x0b")
    ),
    "a Size of a range": called(named("torch", "Size"), called(named("builtins", "range"), b"J\xff\xff\xff\x0b")),
    "a Size of huge numbers": called(named("torch", "Size"), number(2**70) + b"\x85"),
    "bytes of a number": called(named("builtins", "bytes"), number(10**12)),
    "a bytearray of a number": called(named("builtins", "bytearray"), number(10**12)),
    "a complex of text": called(named("builtins", "complex"), text("1")),
    "text of a list": called(named("builtins", "str"), doubled(60, LIST_PAIR)),
    "a date of a list": called(named("datetime", "datetime"), doubled(60, LIST_PAIR)),
    "a long time": called(named("datetime", "timedelta"), number(10**400)),
    "a device by number": called(named("torch", "device"), b"K\x00"),
    "a lazy module of torch": called(named("torch.serialization", "_get_layout"), text("torch._inductor")),
    "a path of a long text": called(named("pathlib", "PosixPath"), *[b"h\x07"] * 200).replace(b"h\x07", LONG, 1),
    "bytes longer than the file": b"\x8e" + struct.pack("<Q", 10**12) + b"x",
    "text longer than the file": b"\x8d" + struct.pack("<Q", 10**12) + b"x",
    "a bytearray longer than the file": b"\x96" + struct.pack("<Q", 10**12) + b"x",
    "a negative number's length": b"\x8b" + struct.pack("<i", -5),
    "a memo slot far away, read": b"j\xff\xff\xff\x7f",
    "deep lists": b"]" * 100_000 + b"a" * 99_999,
    "deep tuples": b"N" + b"\x85" * 300_000,
    "a key of deep tuples": b"}N" + b"\x85" * 300_000 + b"Ns",
    "a set of deep tuples": b"\x8f(N" + b"\x85" * 300_000 + b"\x90",
    "a key that holds itself twice": b"}" + doubled(60, PAIR).replace(b"(l", b")", 1) + b"Ns",
    "a frozenset that holds itself twice": b"(" + doubled(60, PAIR).replace(b"(l", b")", 1) + b"\x91",
    "a dict whose key holds itself twice": b"(" + doubled(60, PAIR).replace(b"(l", b")", 1) + b"Nd",
    "an OrderedDict of such a key": called(
        named("collections", "OrderedDict"), b"](" + doubled(60, PAIR).replace(b"(l", b")", 1) + b"N\x86e"
    ),
    "a list that holds itself twice": doubled(60, LIST_PAIR),
    "lists of each other": b"".join(b"]q%c0" % n for n in range(20))
    + b"".join(b"h%c(" % n + b"".join(b"h%c" % k for k in range(20)) + b"e0" for n in range(20))
    + b"h\x00",
    "a persistent id that holds itself twice": doubled(60, LIST_PAIR) + b"Q",
    "a persistent id of deep tuples": b"(" + text("storage") + named("torch", "FloatStorage") + b"N"
    + b"\x85" * 300_000 + text("cpu") + b"K\x01tQ",
    "copies of a list": many(named("builtins", "set"), b"](" + b"K\x01" * 10_000 + b"e"),
    "copies of text": many(named("torch.torch_version", "TorchVersion"), text("x" * 10_000)),
    "copies of a dict": many(
        named("collections", "Counter"), b"}(" + b"".join(text(str(k)) + b"N" for k in range(1_000)) + b"u"
    ),
    "a tensor of stride 0": tensor(number(2**40) + b"\x85", b"K\x00\x85"),
    "a tensor larger than memory can be": tensor(b"K\x00" + number(2**70) + b"\x86", b"K\x01K\x01\x86"),
    "a tensor whose sizes overflow": tensor(b"K\x00" + number(2**62) * 2 + b"\x87", b"K\x01K\x01K\x01\x87"),
    "a tensor of huge strides": tensor(b"K\x00\x85", number(2**70) + b"\x85"),
    "a tensor far away": tensor(b"K\x01\x85", b"K\x01\x85", number(2**80)),
    "a tensor of many dimensions": tensor(b"(" + b"K\x01" * 1000 + b"t", b"(" + b"K\x01" * 1000 + b"t"),
    "tensors of stride 0": b"](" + tensor(number(2**27) + b"\x85", b"K\x00\x85") * 8 + b"e",
    "an array of a huge shape": array(b"K\x00" + number(2**70) + b"\x86"),
    "an array of many dimensions": array(b"(" + b"K\x01" * 1000 + b"t", bytes(8)),
    "an array of a number": array(b"K\x05"),
    "a namespace of no names": named("argparse", "Namespace") + b")\x81}K\x01Nsb",
    "a path whose attributes are set": called(named("pathlib", "PosixPath"), text("x")) + b"N}"
    + text("_raw_paths") + b"Ns\x86b",
    "a fraction whose denominator is set": called(named("fractions", "Fraction"), b"K\x01", b"K\x02")
    + b"N}" + text("_denominator") + b"K\x00s\x86b",
}


def safetensors(header: Any, nbytes: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(nbytes)


def about(shape: Any, offsets: Any = (0, 0), dtype: Any = "F32") -> Any:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


SAFETENSORS = {
    "a header of 10**12 bytes": struct.pack("<Q", 10**12) + b"{}",
    "sizes of which one is 0": safetensors(about([0, 2**70])),
    "sizes that overflow": safetensors(about([0, 2**62, 2**62])),
    "many dimensions": safetensors(about([1] * 100_000, [0, 4]), 4),
    "a huge number": safetensors(b'{"x": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b"]}}"),
    "offsets that are no numbers": safetensors(about([1], ["a", None])),
    "three offsets": safetensors(about([1], [0, 4, 4]), 4),
    "a dtype that is a list": safetensors(about([1], [0, 4], ["F32"]), 4),
    "deep JSON": safetensors(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a name twice, of many": safetensors(
        b"{" + b",".join(b'"%d":1' % index for index in range(50_000)) + b',"49999":1}'
    ),
    "no object": safetensors(b"{}")[:8] + b"[]",
    "metadata that is a list": safetensors({"__metadata__": [1]}),
    "no UTF-8": safetensors(b'{"\xff": 1}'),
}


def _sparse_file_cut_off() -> bytes:
    """A sparse file whose list of pieces goes on in a block that is not there."""
    header = bytearray(tarfile.TarInfo("one/x").tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[482] = tarfile.GNUTYPE_SPARSE, 1
    return with_checksum(bytes(header))


def _negative(name: str, nbytes: int) -> bytes:
    """A member of fewer than no bytes: the next header is before it."""
    info = tarfile.TarInfo(name)
    info.size = nbytes
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


ARCHIVES = {
    "a sparse file that is cut off": _sparse_file_cut_off(),
    "a header before the archive": _negative("one/x", -(2**70)),
}
