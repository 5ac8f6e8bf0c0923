"""Parts of tensors that are verified as they are read: the right elements, no block read twice, none unverified."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box, boxes_of_run
from nxd_ckpt.core.manifest import CRC_BLOCK, TensorEntry
from nxd_ckpt.errors import DigestMismatch
from nxd_ckpt.formats import assembly, crc32
from nxd_ckpt.formats.assembly import blocks_of
from nxd_ckpt.formats.memory import byte_view
from nxd_ckpt.formats.tensors import Assembly, StorageSpan, TensorStub
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.output.image_writer import read_run
from nxd_ckpt.storage.base import HOLE
from nxd_ckpt.tag import reading
from nxd_ckpt.tag.reading import LeafReader
from nxd_ckpt.tag.verification import Entries
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation
from tests.formats.assemblies import Files, cases, index

BLOCK = 32
Case = tuple[Files, Assembly, torch.Tensor, int]


@contextmanager
def blocks_of_32_bytes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (assembly, reading):
            patch.setattr(module, "CRC_BLOCK", BLOCK)
        yield


def entries_of(leaf: Assembly, files: Files) -> Entries:
    """What an index says of the files of ``leaf``."""
    found: Entries = {}
    for fragment in leaf.fragments:
        stub, span = fragment.stub, fragment.stub.storage
        raw = files.contents[stub.file][span.offset :]
        crcs = tuple(crc32.crc32(raw[at : at + BLOCK]) for at in range(0, len(raw), BLOCK))
        entry = TensorEntry(stub.file, stub.file, span.offset, span.nbytes, stub.dtype, stub.shape, crcs)
        found[stub.file, span.offset] = entry
    return found


def reader_of(contents: dict[str, bytes], entries: Entries, log: list[Operation]) -> LeafReader:
    storage = MemoryStorage()
    for key, data in contents.items():
        storage.link_new(key, data)
    return LeafReader(TagFiles(HookedStorage(storage, log.append), ""), entries)


def with_digest(stub: TensorStub, files: Files) -> TensorStub:
    """As it is read of a file that says what its bytes are."""
    raw = files.contents[stub.file][stub.storage.offset :]
    return replace(stub, storage=stub.storage._replace(crc32=crc32.crc32(raw)))


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    sizes = [draw(st.integers(1, size)) for size in shape]
    return Box(tuple(draw(st.integers(0, a - b)) for a, b in zip(shape, sizes, strict=True)), tuple(sizes))


def touched(leaf: Assembly) -> list[tuple[str, int]]:
    """The blocks that the leaf's bytes lie in, by file and number."""
    return [(fragment.stub.file, block) for fragment in leaf.fragments for block in blocks_of(fragment)]


def looked_at(reader: LeafReader, leaf: Assembly) -> None:
    reader.visit(leaf, "w", lambda number, values: None)
    reader.finish()


@given(cases(), st.data())
def test_parts_are_verified_in_one_read(case: Case, data: st.DataObject) -> None:
    """Of any boxes, cast and transposed: the blocks that they lie in are read, once, and nothing else."""
    files, leaf, expected, _ = case
    order = tuple(data.draw(st.permutations(range(expected.dim()))))
    expected = expected.permute(order).contiguous()
    leaf = Assembly(leaf.dtype, tuple(expected.shape), tuple(fragment.permuted(order) for fragment in leaf.fragments))
    log: list[Operation] = []
    out = torch.full_like(expected, -1.0)
    with blocks_of_32_bytes(), reader_of(files.contents, entries := entries_of(leaf, files), log) as reader:
        reader.read_into(leaf, out, "w", compare=True, verified=False)
        reader.finish()
        sizes = {file: entry.nbytes for (file, _), entry in entries.items()}
        needed = sum(min(BLOCK, sizes[file] - block * BLOCK) for file, block in touched(leaf))
    assert torch.equal(expected, out)
    assert needed == sum(operation.nbytes for operation in log)


@given(cases(), st.data())
def test_all_elements_are_shown_once(case: Case, data: st.DataObject) -> None:
    """Of any boxes, cast and transposed, in parts with numbers of their own: from one read of each block, verified."""
    files, leaf, expected, _ = case
    order = tuple(data.draw(st.permutations(range(expected.dim()))))
    shape = tuple(leaf.shape[dim] for dim in order)
    leaf = Assembly(leaf.dtype, shape, tuple(fragment.permuted(order) for fragment in leaf.fragments))
    log: list[Operation] = []
    shown: dict[int, torch.Tensor] = {}

    def look(number: int, values: list[torch.Tensor]) -> None:
        assert number not in shown
        assert {(expected.dtype, 1)} == {(one.dtype, one.dim()) for one in values}
        shown[number] = torch.cat(values)  # a copy: the memory is used again

    with blocks_of_32_bytes(), reader_of(files.contents, entries := entries_of(leaf, files), log) as reader:
        reader.visit(leaf, "w", look)
        reader.finish()
        sizes = {file: entry.nbytes for (file, _), entry in entries.items()}
        needed = sum(min(BLOCK, sizes[file] - block * BLOCK) for file, block in set(touched(leaf)))
    assert list(range(len(shown))) == sorted(shown)
    assert sorted(expected.flatten().tolist()) == sorted(torch.cat(list(shown.values())).tolist() if shown else [])
    assert needed == sum(operation.nbytes for operation in log)


@given(cases(), st.data())
def test_what_is_asked_for_together_is_read_once(case: Case, data: st.DataObject) -> None:
    """Any runs of elements and any boxes, overlapping or not: each block of theirs is read once for all of them."""
    files, leaf, expected, _ = case
    log: list[Operation] = []
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    with blocks_of_32_bytes(), reader_of(files.contents, entries := entries_of(leaf, files), log) as reader:
        wanted = set()
        for box in data.draw(st.lists(boxes_in(leaf.shape), min_size=1, max_size=4)):
            out = torch.full(box.size, -1.0, dtype=expected.dtype)
            found.append((expected[index(box)], out))
            wanted.update(touched(leaf.within(box)))
            reader.read_into(leaf.within(box), out, "w", compare=True, verified=False)
        start = data.draw(st.integers(0, leaf.numel))
        memory = torch.full((data.draw(st.integers(start, leaf.numel)) - start,), -1.0, dtype=expected.dtype)
        if memory.numel():
            found.append((expected.flatten()[start : start + len(memory)], memory))
            for box in boxes_of_run(start, start + len(memory), leaf.shape):
                wanted.update(touched(leaf.within(box)))
            deque(read_run(reader, leaf, start * memory.itemsize, byte_view(memory), "w"), 0)
        reader.finish()
        sizes = {file: entry.nbytes for (file, _), entry in entries.items()}
        needed = sum(min(BLOCK, sizes[file] - block * BLOCK) for file, block in wanted)
    assert all(torch.equal(one, other) for one, other in found)
    assert needed == sum(operation.nbytes for operation in log)


@given(cases(), st.data())
def test_one_digest_for_a_tensor_is_compared_when_all_of_it_was_read(case: Case, data: st.DataObject) -> None:
    """Without an index: windows are there one by one, every byte is read, and one that changed is found at the end."""
    files, leaf, expected, _ = case
    fragments = (replace(fragment, stub=with_digest(fragment.stub, files)) for fragment in leaf.fragments)
    leaf = replace(leaf, fragments=tuple(fragments))
    changed = dict(files.contents)
    damaged = data.draw(st.sampled_from([None, *sorted(changed)]))
    if damaged is not None:
        at = data.draw(st.integers(24, len(changed[damaged]) - 1))
        changed[damaged] = changed[damaged][:at] + bytes([changed[damaged][at] ^ 4]) + changed[damaged][at + 1 :]
    log: list[Operation] = []
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    with blocks_of_32_bytes(), reader_of(changed, {}, log) as reader:
        try:
            for box in data.draw(st.lists(boxes_in(leaf.shape), min_size=1, max_size=3)):
                out = torch.full(box.size, -1.0, dtype=expected.dtype)
                found.append((expected[index(box)], out))
                reader.read_into(leaf.within(box), out, "w", compare=True, verified=False)
                reader.wait()
            reader.finish()
            problem = ""
        except DigestMismatch as error:
            problem = str(error)
    assert (damaged in {operation.key for operation in log if operation.nbytes}) == ("tensor 'w'" in problem)
    assert problem or all(torch.equal(one, other) for one, other in found)


@given(cases(), st.data())
def test_damage_is_found_in_every_block_that_is_read(case: Case, data: st.DataObject) -> None:
    """One changed byte: an error that names the tensor if a part lies in its block, else the right elements."""
    files, leaf, expected, _ = case
    file = data.draw(st.sampled_from(sorted(files.contents)))
    [span] = {fragment.stub.storage for fragment in leaf.fragments if fragment.stub.file == file}
    at = data.draw(st.integers(0, span.nbytes - 1))
    changed = bytearray(files.contents[file])
    changed[span.offset + at] ^= 4
    out = torch.empty_like(expected)
    entries = entries_of(leaf, files)
    with blocks_of_32_bytes(), reader_of({**files.contents, file: bytes(changed)}, entries, []) as reader:
        reader.read_into(leaf, out, "w", compare=True, verified=False)
        if (file, at // BLOCK) in touched(leaf):
            with pytest.raises(DigestMismatch, match="tensor 'w'"):
                reader.finish()
        else:
            reader.finish()
            assert torch.equal(expected, out)
    with blocks_of_32_bytes(), reader_of({**files.contents, file: bytes(changed)}, entries, []) as reader:
        if (file, at // BLOCK) in touched(leaf):
            with pytest.raises(DigestMismatch, match="tensor 'w'"):
                looked_at(reader, leaf)


@pytest.mark.parametrize("is_read", [True, False])
def test_how_long_reads_are(is_read: bool) -> None:
    """As the storage likes them, of what lies together and has memory; what is only verified goes block by block."""
    storage, gap = MemoryStorage(), 2 * HOLE
    tensors = {"a": 2 * CRC_BLOCK, "b": 2 * CRC_BLOCK, "c": CRC_BLOCK}
    places = {"a": 0, "b": 2 * CRC_BLOCK + 64, "c": 4 * CRC_BLOCK + gap}
    data = bytes(range(256)) * ((5 * CRC_BLOCK + gap) // 256)
    storage.link_new("file", data)
    log: list[Operation] = []
    with LeafReader(TagFiles(HookedStorage(storage, log.append), ""), {}) as reader:
        outs = {name: torch.zeros(nbytes, dtype=torch.uint8) for name, nbytes in tensors.items()}
        for name, nbytes in tensors.items():
            at = places[name]
            span = StorageSpan(name, at, nbytes, crc32.crc32(data[at : at + nbytes]))
            stub = TensorStub("file", at, "uint8", (nbytes,), (1,), span)
            if is_read:
                reader.read_into(stub, outs[name], name, compare=True)
            else:
                reader.verify(stub, name)
        reader.finish()
    assert not is_read or all(bytes(out.numpy()) == data[places[name] :][: len(out)] for name, out in outs.items())
    blocks = [3, 1, 1] if is_read else [1] * 5  # MemoryStorage likes three
    assert [count * CRC_BLOCK for count in blocks] == sorted((one.nbytes for one in log if one.nbytes), reverse=True)
