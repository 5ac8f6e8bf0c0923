"""Types of the keywords in ``**options`` of public functions, for type checkers and editors.

All below the mark is generated from the option classes by ``python -m tests.options.keywords``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from nxd_ckpt.core.arguments import Count
from nxd_ckpt.core.heads import Hardware
from nxd_ckpt.core.name_patterns import IgnoreKeys
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.retention_rules import GivenMetrics, NumKept, Retain
from nxd_ckpt.core.tags import TagValues
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.options.checkpointer_options import Notice, OnFailure
from nxd_ckpt.options.conversion import (
    Dtype,
    Form,
    MappingSpec,
    NamesOf,
    OptimizerForm,
    Release,
    StrategyName,
)
from nxd_ckpt.options.execution import Names, SavedNames, Verify
from nxd_ckpt.storage.urls import StorageOptions, StrPath

Size = int | str
ShardSize = int | str
Seconds = float | str
Minutes = float | str
"""Units as callers may write them; in the options they are numbers."""


# ---- generated ----
class DirectoryKeywords(TypedDict, total=False):
    topology: Topology | None
    process_group: Any
    timeout: Seconds
    storage_options: StorageOptions | None


class OpenKeywords(TypedDict, total=False):
    partitions: Mapping[str, Partition] | None
    saved_param_names: SavedNames | None
    trust_pickle: bool
    storage_options: StorageOptions | None


class PruneKeywords(TypedDict, total=False):
    dry_run: bool
    verify: bool | None
    storage_options: StorageOptions | None
    timeout: Seconds
    progress: bool


class LoadKeysKeywords(OpenKeywords, total=False):
    pre_download: bool
    work_dir: StrPath | None


class CopyKeywords(TypedDict, total=False):
    num_workers: Count
    max_bytes_per_second: Size | None
    timeout: Seconds
    overwrite: bool
    dry_run: bool
    storage_options: StorageOptions | None
    output_options: StorageOptions | None
    durable: bool
    progress: bool


class AnySaveKeywords(TypedDict, total=False):
    param_names: Sequence[Sequence[str]] | None
    partitions: Mapping[str, Partition] | None
    trust_pickle: bool
    overwrite: bool | None
    weights_only: bool
    ignore_keys: IgnoreKeys | None
    retain: Retain
    metrics: GivenMetrics
    files: Mapping[str, str] | None
    max_bytes_per_second: Size | None
    dedup: bool


class UnshardKeywords(TypedDict, total=False):
    use_safetensors: bool
    unshard_strategy: StrategyName
    sha256: bool
    size_per_shard: ShardSize
    partitions: Mapping[str, Partition] | None
    saved_param_names: SavedNames | None
    overwrite: bool
    dry_run: bool
    storage_options: StorageOptions | None
    output_options: StorageOptions | None
    durable: bool
    progress: bool


class CheckpointerKeywords(DirectoryKeywords, total=False):
    run_id: str | None
    durable: bool
    memory_cap: Size | None
    progress: bool
    on_save_failure: OnFailure
    max_failed_saves: Count
    num_kept_ckpts: NumKept
    retain: Retain
    preemption: Notice
    preemption_grace: Seconds
    every: Count | None
    every_minutes: Minutes | None
    final_save: Callable[[int], object] | None


class SaveKeywords(AnySaveKeywords, total=False):
    num_workers: int | None
    use_xser: bool
    num_kept_ckpts: NumKept
    zero1_optimizer: bool
    use_zero1_dcp: bool
    avoid_saving_lower_precision_weights: bool


class SaveCheckpointKeywords(AnySaveKeywords, DirectoryKeywords, total=False):
    run_id: str | None
    durable: bool
    memory_cap: Size | None
    progress: bool
    on_save_failure: OnFailure
    max_failed_saves: Count


class AnyLoadKeywords(TypedDict, total=False):
    param_names: Sequence[Sequence[str]] | None
    saved_param_names: Sequence[Sequence[Sequence[str]]] | None
    partitions: Mapping[str, Partition] | None
    rank_content: dict[Any, Any] | None
    verify: Verify | None
    share_reads: bool | None
    trust_pickle: bool
    progress: bool
    mapping: MappingSpec
    kv_size_multiplier: Count
    hardware: Hardware
    key_mapping: Mapping[str, str] | None
    prefix: str
    ignore_keys: IgnoreKeys | None
    weights_only: bool
    load_weights_only: bool
    strict_model_weights: bool | None
    tag_values: TagValues | None
    prove: bool | None
    fallback: bool
    pre_download: bool
    work_dir: StrPath | None


class LoadKeywords(AnyLoadKeywords, total=False):
    strict: bool
    num_workers: int | None
    use_zero1_dcp: bool


class LoadCheckpointKeywords(AnyLoadKeywords, DirectoryKeywords, total=False):
    pass


class InstallKeywords(LoadCheckpointKeywords, total=False):
    num_workers: int | None
    use_xser: bool
    num_kept_ckpts: NumKept
    zero1_optimizer: bool
    use_zero1_dcp: bool
    avoid_saving_lower_precision_weights: bool
    overwrite: bool | None
    retain: Retain
    metrics: GivenMetrics
    files: Mapping[str, str] | None
    max_bytes_per_second: Size | None
    dedup: bool
    run_id: str | None
    durable: bool
    memory_cap: Size | None
    on_save_failure: OnFailure
    max_failed_saves: Count
    strict: bool


class ConvertKeywords(UnshardKeywords, total=False):
    to: Form | None
    names: NamesOf | None
    dp: Count | None
    tp: Count | None
    pp: Count | None
    ep: Count | None
    stages: Names | None
    virtual_pp: Count
    use_xser: bool | None
    optimizer: bool | None
    optimizer_form: OptimizerForm | None
    optim_only: bool
    model_key: str | None
    optim_key: str | None
    flatten_optimizer_state: bool
    torchtitan_release: Release
    config: StrPath | None
    mapping: MappingSpec
    prefix: str
    key_mapping: Mapping[str, str] | None
    kv_size_multiplier: Count | None
    hardware: Hardware | None
    pad_attn_heads: bool
    dtype: Dtype | None
    qkv_linear: bool
    fuse_qkv: bool
    coalesce_qkv: bool
    split_gate_up: bool
    tokenizer: StrPath | None
    master_weights: bool
    model: str | None
    all_ranks: bool
    timeout: Seconds
    num_workers: Count
