"""The global tensors of a tag by prefix: how many, of which dtypes and shapes, how large, and how they are cut."""

from __future__ import annotations

import re
from typing import Any

from nxd_ckpt.cli.name_patterns import alike
from nxd_ckpt.cli.parameters import in_words
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.reshard.whole_tag import GlobalTensor, WholeTag
from nxd_ckpt.tag.opened import OpenTag

_PART = re.compile(r"[^./]+[./]?")


def prefixes(opened: OpenTag, depth: int) -> list[dict[str, Any]]:
    """A document for the tensors that share the first ``depth`` parts of their names; parts end with a dot or slash.

    With 0, for those that differ in numbers alone and are of one form: the prefix is then their whole name.
    """
    if depth < 0:
        raise InvalidArgument(f"--by-prefix must be a number of parts, from 0 on, found {depth}")
    tensors = WholeTag(opened).tensors
    groups: dict[str, list[GlobalTensor]] = {}
    if depth > 0:
        for name, tensor in tensors.items():
            groups.setdefault("".join(_PART.findall(name)[:depth]), []).append(tensor)
        return [_of_group(prefix, members, opened.topology) for prefix, members in groups.items()]
    forms = ((name, (told.dtype, told.shape, told.partition)) for name, told in tensors.items())
    return [
        _of_group(name, [GlobalTensor(name, form[0], form[1], None, form[2])] * count, opened.topology)
        for name, count, form in alike(forms)
    ]


def _of_group(prefix: str, members: list[GlobalTensor], topology: Topology) -> dict[str, Any]:
    shapes = dict.fromkeys(member.shape for member in members)
    sizes = [member.nbytes for member in members]
    known = [nbytes for nbytes in sizes if nbytes is not None]
    first = members[0].shape
    return {
        "prefix": prefix,
        "tensors": len(members),
        "dtypes": list(dict.fromkeys(member.dtype for member in members)),
        "shapes": len(shapes),
        "shape": None if len(shapes) > 1 or first is None else list(first),
        "nbytes": sum(known) if len(known) == len(sizes) else None,
        "cuts": list(
            dict.fromkeys(in_words(member.partition, topology) for member in members if member.partition is not None)
        ),
    }
