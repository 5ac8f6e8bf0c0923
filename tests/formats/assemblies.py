"""Tensors put together from parts of saved ones, at random, and files in memory that count what is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box
from nxd_ckpt.formats.assembly import ReadRanges, as_stored, clear_padding, read_part, slabs_of
from nxd_ckpt.formats.memory import allocated, torch_dtype
from nxd_ckpt.formats.tensors import Assembly, Fragment, StorageSpan, TensorStub, contiguous_stride, itemsize

BEFORE = 24
"""Bytes in each file before its tensor."""


def read_leaf(leaf: TensorStub | Assembly, read: ReadRanges) -> torch.Tensor:
    """The tensor, slab by slab, without any comparison of digests."""
    out = allocated(leaf.shape, leaf.dtype)
    whole = Assembly.of(leaf)
    clear_padding(whole, out)
    for fragment in whole.fragments:
        if fragment.source.numel:
            stored, target = as_stored(fragment, out)
            for slab in slabs_of(stored):
                read_part(slab, target, read)
    return out


@dataclass
class Files:
    """Tensors in files of their own, how many bytes of them were read, and how many at once at most."""

    contents: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0
    most: int = 0

    def put(self, name: str, tensor: torch.Tensor) -> TensorStub:
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()
        self.contents[name] = bytes(BEFORE) + raw
        shape = tuple(tensor.shape)
        span = StorageSpan("data/0", BEFORE, len(raw), None)
        return TensorStub(name, BEFORE, "float32", shape, contiguous_stride(shape), span)

    def read(self, file: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.most = max(self.most, sum(len(memory) for _, memory in ranges))
        for offset, memory in ranges:
            memory[:] = self.contents[file][offset : offset + len(memory)]
            self.nbytes += len(memory)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Files, Assembly, torch.Tensor, int]:
    """An assembly of boxes of two tensors, what it should be by indexing, and the bytes that it needs."""
    dims = draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(["float32", "float64", "bfloat16"]))
    files, parts, needed = Files(), [], 0
    shape = [draw(st.integers(1, 5)) for _ in range(dims)]
    rows: list[int] = []
    for number in range(2 if dims else 1):  # side by side along dimension 0
        saved = tuple(size + draw(st.integers(0, 3)) for size in shape)
        tensor = torch.arange(1.0, 1.0 + torch.Size(saved).numel()).reshape(saved) * (number + 1)
        size = (draw(st.integers(1, shape[0])), *shape[1:]) if dims else ()
        source = Box(tuple(draw(st.integers(0, a - b)) for a, b in zip(saved, size, strict=True)), size)
        target = Box((sum(rows), *(0 for _ in shape[1:])) if dims else (), size)
        parts.append((files.put(f"file{number}", tensor), source, target, tensor))
        rows.append(size[0] if dims else 0)
        needed += source.numel * itemsize("float32")
    whole = (sum(rows) + draw(st.integers(0, 2)), *shape[1:]) if dims else ()
    expected = torch.zeros(whole, dtype=torch_dtype(dtype))
    for _, source, target, tensor in parts:
        expected[index(target)] = tensor[index(source)].to(expected.dtype)
    leaf = Assembly(dtype, tuple(whole), tuple(Fragment(stub, source, target) for stub, source, target, _ in parts))
    return files, leaf, expected, needed
