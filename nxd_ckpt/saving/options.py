"""Options of a save."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core.name_patterns import IgnoreKeys
from nxd_ckpt.core.names import is_own, is_own_folder
from nxd_ckpt.core.option_classes import Options, option, options_of
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.retention_rules import GivenMetrics, NumKept, Retain, Rule, recorded_metrics, rules_of
from nxd_ckpt.core.tags import filled_tag, tag_of_step, validate_tag
from nxd_ckpt.core.units import Size, size
from nxd_ckpt.errors import CheckpointError, InvalidArgument, InvalidTag
from nxd_ckpt.storage.urls import ARCHIVES

CHUNK = 16 * 2**20
"""Bytes per write call: large enough for any disk, small enough for progress to be seen."""


@dataclass(frozen=True)
class SaveOptions(Options):
    """Options of a save, named as in neuronx_distributed's ``save_checkpoint`` where it has them, with its defaults."""

    num_workers: int | None = option(8, """ranks of a host that write at the same time. It has no effect with
        ``use_xser``.""")
    use_xser: bool = option(False, "a file for each tensor, shared out among data-parallel replicas.")
    num_kept_ckpts: NumKept = option(None, """complete tags to keep, at least 1; older ones are removed. None or -1
        keeps all.""")
    zero1_optimizer: bool = option(False, """the optimizer that is passed as a dict is a ZeRO-1 shard. Live optimizers
        are recognised.""")
    use_zero1_dcp: bool = option(False, """a ZeRO-1 optimizer becomes a torch DCP directory, of entries by parameter
        name.""")
    avoid_saving_lower_precision_weights: bool = option(False, """leave out model weights that the optimizer's master
        weights stand for. As in NxD it has no effect, except for a warning, without ``use_xser``, without saved master
        weights, and with experts.""")
    param_names: Sequence[Sequence[str]] | None = option(None, """names of the optimizer's parameters, a list for each
        param group; needed without a live model.""")
    partitions: Mapping[str, Partition] | None = option(None, """cuts of parameters over tensor-parallel ranks, by
        name; needed if their attributes were lost.""")
    trust_pickle: bool = option(False, "allow content that only a load with ``trust_pickle`` can read.")
    overwrite: bool | None = option(None, """replace an existing tag. None: yes on file systems; no on object
        stores, where the old tag is removed first.""")
    weights_only: bool = option(False, "save the model only.")
    ignore_keys: IgnoreKeys | None = option(None, """names that are not saved: globs such as ``optim/*``, or a
        function of all names.""")
    retain: Retain = option(None, """complete tags to keep: a number, or rules such as
        ``[Last(3), Every(1000), Best("loss", 3), Within(hours=2)]``. ``num_kept_ckpts=k`` adds ``Last(k)``.""")
    metrics: GivenMetrics = option(None, """numbers by name, such as ``{"loss": 2.1}``, kept in the tag
        for the rule ``Best``. Rank 0's count.""")
    files: Mapping[str, str] | None = option(None, """paths of others' files, such as a trainer's, by their names in
        the tag, which gets them with their digests. Rank 0's count; they must not change during the save.""")
    max_bytes_per_second: Size | None = option(None, """maximum rate at which each rank digests and writes an
        async save, as a number or such as "200MB"; by default unlimited. Waiting for the save ends it.""")
    dedup: bool = option(False, """do not write again a file that the tag before has: hard-link it, share its blocks,
        or let S3 copy it. Works best with ``use_xser``.""")

    @property
    def rules(self) -> tuple[Rule, ...] | None:
        """Rules for the complete tags to keep; None keeps all."""
        return rules_of(self.num_kept_ckpts, self.retain)

    @property
    def recorded_metrics(self) -> dict[str, float | None]:
        """The manifest's record of ``metrics``."""
        return recorded_metrics(self.metrics)

    @property
    def writers_on_host(self) -> int | None:
        """Ranks of a host that write at the same time; None is all of them."""
        return None if self.use_xser else self.num_workers

    def validate(self, timeout: float) -> None:
        """Raise InvalidArgument or UnsupportedState for options that no rank can honour.

        After ``timeout`` seconds without progress a rank counts as lost.
        """
        rate = self.max_bytes_per_second
        workers = self.num_workers
        if rate is not None and rate * timeout < 2 * CHUNK:
            raise InvalidArgument(
                f"max_bytes_per_second={rate} with timeout={timeout:g}: {size(CHUNK)} would "
                f"take so long that a rank counts as lost; expected at least {math.ceil(2 * CHUNK / timeout)}"
            )
        own = [name for name in self.files or () if is_own(name) or is_own_folder(name)]
        if own:
            raise InvalidArgument(f"files= has {own[0]!r}, a name of a checkpoint's own files: give it another name")
        if workers is not None and workers < 1 and not self.use_xser:
            raise InvalidArgument(f"num_workers must be None or at least 1, found {workers}")
        if self.avoid_saving_lower_precision_weights and self.weights_only:
            raise InvalidArgument(
                "avoid_saving_lower_precision_weights=True with weights_only=True leaves nothing to save: pass one"
            )


def local_world_size(world_size: int) -> int:
    """Return the ranks of this host, as the launcher says; without one, all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def understood(
    tag: object, values: Mapping[str, Any] | None, keywords: Mapping[str, Any], world_size: int
) -> tuple[str, SaveOptions, CheckpointError | None]:
    """Return the name of a save, its options, and the error that prevents it, which must reach all ranks.

    Fields of the name that Composer fills by itself are filled here too, on each rank with the values of rank 0: one
    tag is saved by all of them.
    """
    name = str(tag)
    options = SaveOptions()
    known = {"rank": 0, "local_rank": 0, "node_rank": 0, "world_size": world_size}
    try:
        filled = filled_tag(tag, values, known | {"local_world_size": local_world_size(world_size)})
        name = validate_tag(tag_of_step(filled) if isinstance(filled, int) else filled)
        if name.endswith(ARCHIVES):
            raise InvalidTag(f"tag {name!r} would be a directory, not a file: save it as another tag, and pack that")
        # An asynchronous save reads them later: these are copies, as the caller may change them meanwhile.
        options = options_of(SaveOptions, keywords)
    except CheckpointError as error:
        return name, options, error
    return name, options, None
