"""Whole tensors read from a tag."""

import torch

from nxd_ckpt.formats.memory import torch_dtype
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.tag.opened import OpenTag


def read(opened: OpenTag, tag: WholeTag, name: str) -> torch.Tensor:
    told, leaf = tag.tensors[name], tag.leaf(name)
    assert (told.shape, told.dtype) == (leaf.shape, leaf.dtype)
    out = torch.empty(leaf.shape, dtype=torch_dtype(leaf.dtype))
    with opened.reader() as reader:
        reader.read_into(leaf, out, name, compare=True, verified=False)
        reader.finish()
    return out
