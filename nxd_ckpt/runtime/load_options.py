"""How to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core.partition import Partition


@dataclass(frozen=True)
class LoadOptions:
    """How to load; names, defaults and meaning as in neuronx_distributed's ``load_checkpoint`` where it has them.

    Attributes:
        strict: names that are missing or unexpected in the model are an error, else they are skipped with a warning.
        num_workers: accepted for the sake of existing scripts; every rank reads its own files at once.
        use_zero1_dcp: accepted likewise; the format is detected.
        param_names: the optimizer's parameter names, per group in order, where they cannot be known otherwise.
        saved_param_names: the same as when it was saved, for each pipeline stage: for tags of other sizes that do not
            say it (neuronx_distributed's).
        partitions: how live parameters are cut over tensor-parallel ranks, by name, where their attributes were lost.
        rank_content: an empty dict, filled with what this rank saved as ``rank_content``; not on other sizes.
        verify: prove the digests of all bytes before anything is changed. Without it, only what is read as a whole
            tensor, or a whole block of one, is compared, as it is loaded.
        share_reads: of data-parallel replicas, which load the same model, one reads each tensor and broadcasts it;
            None does so where measuring says that it is faster than that each reads all. Of several ranks' answers,
            False goes before True, and True before None.
        trust_pickle: unpickle objects of any class. Only for checkpoints from sources you trust like your own code.
    """

    strict: bool = True
    num_workers: int | None = 8
    use_zero1_dcp: bool = False
    param_names: Sequence[Sequence[str]] | None = None
    saved_param_names: Sequence[Sequence[Sequence[str]]] | None = None
    partitions: Mapping[str, Partition] | None = None
    rank_content: dict[Any, Any] | None = None
    verify: bool = True
    share_reads: bool | None = None
    trust_pickle: bool = False
