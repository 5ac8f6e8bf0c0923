"""Where a conversion reads and where it writes: two tags, each by its checkpoint directory and name."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nxd_ckpt.core.tags import validate_tag
from nxd_ckpt.errors import CheckpointNotFound, InvalidArgument
from nxd_ckpt.layout.directory import may_be_replaced
from nxd_ckpt.storage.urls import open_storage

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Place:
    """A tag: its ``name`` in ``directory`` (absolute, symbolic links resolved)."""

    directory: str
    name: str

    @property
    def path(self) -> str:
        return os.path.join(self.directory, self.name)


def locate_input(path: StrPath) -> Place:
    """The tag directory ``path``. Raises CheckpointNotFound where there is none."""
    real = _resolved(path, "input_dir")
    if not os.path.isdir(real):
        raise CheckpointNotFound(f"input_dir {os.fspath(path)} does not exist, or is not a directory")
    return Place(*os.path.split(real))


def locate_output(path: StrPath, source: Place, overwrite: bool) -> Place:
    """The tag directory ``path`` that is to be made, proved to be free or replaceable, and apart from ``source``.

    Raises:
        InvalidArgument: it is or contains the input, or lies inside it; it exists, and ``overwrite`` is not given or
            it is not a checkpoint. Nothing was touched.
    """
    target = Place(*os.path.split(_resolved(path, "output_dir")))
    validate_tag(target.name)
    common = os.path.commonpath([source.path, target.path])
    if common in (source.path, target.path):
        raise InvalidArgument(
            f"output_dir {target.path} and input_dir {source.path} are the same, or one lies inside the other; a "
            "conversion never touches its input: write to a directory of its own"
        )
    if os.path.lexists(target.path) and not os.path.isdir(target.path):
        raise InvalidArgument(f"output_dir {target.path} is a file; choose another path")
    if not os.path.isdir(target.path) or not os.listdir(target.path):
        return target
    if not overwrite:
        raise InvalidArgument(
            f"output_dir {target.path} exists; pass --overwrite (overwrite=True) to replace it once the conversion "
            "has succeeded, or choose another path"
        )
    if not may_be_replaced(open_storage(target.directory), target.name):
        raise InvalidArgument(
            f"output_dir {target.path} exists and holds more than a checkpoint; it is left alone: choose another path"
        )
    return target


def _resolved(path: StrPath, what: str) -> str:
    text = os.fspath(path)
    if not text or "://" in text:
        raise InvalidArgument(f"{what} must be a local directory, found {text!r}")
    return os.path.realpath(text)
