"""Options for reading a tag without a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import TypedDict

from nxd_ckpt.core.partition import Partition
from nxd_ckpt.options.execution import SavedNames
from nxd_ckpt.storage.urls import StorageOptions


@dataclass(frozen=True)
class OpenOptions:
    """Opening of a tag. ``storage_options`` may hold secrets: no repr shows them.

    Attributes:
        partitions: how parameters were partitioned over its ranks, by name, if the tag does not record it (NxD's do
            not).
        saved_param_names: the optimizer's parameter names, for each pipeline stage, for each param group, in order, if
            the
            tag does not record them (NxD's do not).
        trust_pickle: allow objects of any class in it.
        storage_options: storage options for URLs, named as in fsspec and s3fs.
    """

    partitions: Mapping[str, Partition] | None = None
    saved_param_names: SavedNames | None = None
    trust_pickle: bool = False
    storage_options: StorageOptions | None = field(default=None, repr=False)


class OpenKeywords(TypedDict, total=False):
    partitions: Mapping[str, Partition] | None
    saved_param_names: SavedNames | None
    trust_pickle: bool
    storage_options: StorageOptions | None
