"""Damage to files: seeded, at random places, and such as lets what is right around it stay right."""

import io
import json
import pickletools
import random
import struct
import zipfile
from contextlib import suppress
from functools import lru_cache
from itertools import islice, pairwise
from tarfile import BLOCKSIZE
from typing import Any

from tests.core.documents import sealed

EXTREMES = [0, 1, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
OPCODES = b"(.012FIJKLMNRSTUVXabcdeghijlopqrstu}]\x81\x82\x85\x86\x87\x88\x89\x8a\x8b\x8e\x8f\x90\x91\x93\x94\x96"
VALUES: list[Any] = [None, -1, 0, 2**70, 1.5, "", "x", "../x", [], {}, [[]], True, "\ud800", "\0", 10**400]


def damaged(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """``data`` with one to three changes; ``other`` is another file's."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed)) if changed else 0
        length = rng.choice([1, 2, 4, 8, 64, 1000])
        kind = rng.randrange(8)
        if kind == 0 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + 1] = bytes([rng.choice(OPCODES)])
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            del changed[at : at + length]
        elif kind == 4:
            changed[at:at] = changed[at : at + length] * rng.choice([1, 2, 100])
        elif kind == 5:
            start = rng.randrange(len(other) + 1)
            changed[at : at + length] = other[start : start + length]
        elif kind == 6:
            width = rng.choice([2, 4, 8])
            changed[at : at + width] = struct.pack("<Q", rng.choice(EXTREMES))[:width]
        else:
            changed[at : at + length] = bytes(min(length, len(changed) - at))
    return bytes(changed)


def damaged_json(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A document with one value replaced, left out or repeated, anywhere; what is no document is damaged as bytes."""
    try:
        node = document = json.loads(data)
    except (ValueError, RecursionError):
        return damaged(rng, data, other)
    while isinstance(node, (dict, list)) and node:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        below = node[key]
        if not isinstance(below, (dict, list)) or not below or rng.random() < 0.3:
            _change(rng, node, key)
            break
        node = below
    return json.dumps(document).encode()


def _change(rng: random.Random, node: Any, key: Any) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, list):
        node[key:key] = [node[key]] * rng.choice([1, 2, 100])
    elif kind == 2 and isinstance(node, dict):
        node[rng.choice(["", "x", "\0", "x" * 300])] = node.pop(key)
    elif kind == 3:
        node[key] = rng.choice([list(node.values()) if isinstance(node, dict) else list(node), {"x": node[key]}])
    else:
        node[key] = rng.choice(VALUES)


def damaged_manifest(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A damaged document whose digest is right."""
    changed = damaged_json(rng, data, other)
    try:
        return sealed(json.loads(changed))
    except (ValueError, RecursionError, AttributeError):
        return changed


def damaged_safetensors(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A file with a damaged header of the right length."""
    (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\0"))
    if length > len(data):
        return damaged(rng, data, other)
    header = damaged_json(rng, data[8 : 8 + length], other)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def damaged_pickle(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A pickle some of whose opcodes are left out, repeated, moved or those of another one."""
    mine, theirs = [*_opcodes(data)], _opcodes(other) or [bytes([opcode]) for opcode in OPCODES]
    if len(mine) < 3:
        return damaged(rng, data, other)
    for _ in range(rng.randint(1, 3)):
        if len(mine) < 2:
            break
        at, length = rng.randrange(1, len(mine)), rng.choice([1, 1, 2, 5, 20])
        kind = rng.randrange(5)
        if kind == 0:
            del mine[at : at + length]
        elif kind == 1:
            mine[at:at] = mine[at : at + length] * rng.choice([1, 2, 100])
        elif kind == 2:
            start = rng.randrange(len(theirs))
            mine[at:at] = theirs[start : start + length]
        elif kind == 3:
            mine[at : at + 1] = [bytes([rng.choice(OPCODES)])]
        else:
            start = rng.randrange(1, len(mine) + 1)
            mine[at:at] = mine[start : start + length]
    return b"".join(mine)


@lru_cache(maxsize=256)
def _opcodes(data: bytes) -> tuple[bytes, ...]:
    """A pickle, opcode by opcode with its arguments, as far as it is one."""
    places: list[int] = []
    with suppress(Exception):
        for _, _, at in islice(pickletools.genops(data), 1000):
            places.append(at or 0)
    return tuple(data[begin:end] for begin, end in pairwise([*places, len(data)]))


def damaged_inside(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A torch file whose pickle is damaged, and whose digests are right."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            contents = {name: old.read(name) for name in old.namelist()}
    except Exception:
        return damaged(rng, data, other)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as new:
        for name, content in contents.items():
            pickled = name.endswith("data.pkl")
            new.writestr(name, rng.choice([damaged_pickle, damaged])(rng, content, other) if pickled else content)
    return made.getvalue()


def damaged_tar(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """An archive with one damaged header, whose checksum is right."""
    headers = [at for at in range(0, len(data), BLOCKSIZE) if data[at + 257 : at + 262] == b"ustar"]
    if not headers:
        return damaged(rng, data, other)
    at = rng.choice(headers)
    header = damaged(rng, data[at : at + BLOCKSIZE], other)[:BLOCKSIZE].ljust(BLOCKSIZE, b"\0")
    return data[:at] + with_checksum(header) + data[at + BLOCKSIZE :]


def with_checksum(header: bytes) -> bytes:
    """A header of an archive's member, with the sum that belongs to it."""
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    return header[:148] + b"%06o\0 " % total + header[156:]
