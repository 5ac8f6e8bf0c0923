"""Whether live objects are what a tag holds for this rank, bit for bit: what a load of it would change now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nxd_ckpt.core.findings import Finding, problem
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.tensors import Assembly, TensorStub, allocated, byte_view, digest_of, dtype_name, itemsize
from nxd_ckpt.load.attempt import LoadAttempt
from nxd_ckpt.load.options import LoadOptions
from nxd_ckpt.reshard.plain_values import ABSENT, equal_values
from nxd_ckpt.save.capture import capture
from nxd_ckpt.save.options import SaveOptions
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import Leaf, LeafReader


def live_findings(
    opened: OpenTag,
    topology: Topology,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    options: LoadOptions,
    compared: Counter,
) -> Iterator[Finding]:
    """What is otherwise in the live objects. ``compared`` counts the bytes.

    Of a tensor that the tag holds as a whole its digest is compared, and nothing is read. Parts of others, as on other
    sizes than those of the save, are read again.

    Raises as a load of these objects.
    """
    options.validate()
    prepared = LoadAttempt(opened, topology, model, optimizer, scheduler, options.settled(reads_are_cheap=False), None)
    if prepared.filtered:
        prepared.apply_filter()
    prepared.find()
    given = SaveOptions(param_names=options.param_names, partitions=options.partitions)
    live = capture(topology, given, model=model, optimizer=optimizer, scheduler=scheduler)
    with prepared.reader as reader:
        for kind, name, saved, now in prepared.beside(live):
            if isinstance(saved, (TensorStub, Assembly)):
                if not isinstance(now, (torch.Tensor, int, float)):
                    yield problem(kind, name, "the tag holds it, and the live objects do not: it was not loaded")
                    continue
                compared.add(saved.numel * itemsize(saved.dtype))
                if not _same(saved, torch.as_tensor(now), name, reader):
                    yield problem(kind, name, "the live tensor is not the one that was saved")
            elif isinstance(saved, (int, float)) and isinstance(now, torch.Tensor) and now.numel() == 1:
                here = now.detach().cpu().reshape(())
                if not equal_values(torch.as_tensor(saved, dtype=here.dtype), here):
                    yield problem(kind, name, f"expected {saved!r}, as it was saved, found {here.item()!r}")
            elif now is not ABSENT and not equal_values(saved, now):
                yield problem(kind, name, f"expected {saved!r}, as it was saved, found {now!r}")


def _same(saved: Leaf, live: torch.Tensor, name: str, reader: LeafReader) -> bool:
    if tuple(live.shape) != saved.shape:
        return False
    here = live.detach().cpu().contiguous()
    if isinstance(saved, TensorStub) and _is_whole(saved) and saved.dtype == dtype_name(here.dtype):
        return saved.storage.crc32 == crc32(byte_view(here))
    out = allocated(saved.shape, saved.dtype)
    reader.read_into(saved, out, name, compare=True, verified=False)
    reader.finish()
    return equal_values(out.to(here.dtype), here)


def _is_whole(stub: TensorStub) -> bool:
    """Whether its digest is that of the tight tensor."""
    return digest_of(stub) is not None and stub.is_contiguous and stub.nbytes == stub.storage.nbytes
