"""Options for reading a tag without a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nxd_ckpt.core.option_classes import option
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.options.execution import SavedNames
from nxd_ckpt.storage.urls import StorageOptions


@dataclass(frozen=True)
class OpenOptions:
    """Opening of a tag. ``storage_options`` may hold secrets: no repr shows them."""

    partitions: Mapping[str, Partition] | None = option(None, """how parameters were partitioned over its ranks, by
        name, if the tag does not record it (NxD's do not).""")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, for each pipeline stage, for
        each param group, in order, if the tag does not record them (NxD's do not).""")
    trust_pickle: bool = option(False, "allow objects of any class in it.")
    storage_options: StorageOptions | None = option(
        None, "storage options for URLs, named as in fsspec and s3fs.", repr=False
    )
