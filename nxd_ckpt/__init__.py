"""Checkpoints for training on AWS Trainium and Inferentia: neuronx-distributed's files, made safe and fast.

============================  =========================================================================
``save_checkpoint``           neuronx_distributed's functions: change the import, keep the script
``load_checkpoint``
``has_checkpoint``
``finalize_checkpoint``
``install``                   the same for a whole program, by one line; ``uninstall`` undoes it
``Checkpointer``              a job's handle on one directory; ``PendingSave`` is a save under way
``list_checkpoints``          the tags of a directory
``open_checkpoint``           one tag opened for reading, anywhere: a ``Checkpoint``
``load_keys``                 single tensors of a tag, by name; ``get_checkpoint_metadata``: all of them, as
                              ``GlobalTensor``
``diff_checkpoints``          what two tags differ in, and by how much
``Last``, ``Every``           rules for which tags to keep, for ``retain=``
``Best``, ``Within``
``Tier``                      one of the places that checkpoints go to, for ``tiers=``
``remove_checkpoint``         removes tags by name, even while saving
``convert``                   any checkpoint in any form and size; ``unshard_checkpoint``: one of them
``copy_checkpoint``           one tag, as it is, in another place
``examine_checkpoint``        whether a tag can be resumed from, and continues the one before it
``checkpoint_statistics``     every tensor of a tag in a few numbers: norm, mean, zeros, NaN
``Topology``                  who is where: sizes of dp, tp, pp, ep, and this rank
``Partition``                 how a parameter is cut, for ``partitions=``; ``Section``: a part of a fused one (QKV)
``capture_random_state``      random state as plain data, for ``rank_content=``; ``restore_random_state``
``capture_data_position``     where a data loader is, the same way; ``restore_data_position``
``ElasticSampler``            data that are read on by any number of ranks: samples in one order, or streams
``DataStreams``
``errors``                    every exception, as one tree; ``__version__``: "0.1.0"
============================  =========================================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nxd_ckpt import errors
from nxd_ckpt.version import __version__

if TYPE_CHECKING:
    from nxd_ckpt.api import (
        close_checkpointers,
        finalize_checkpoint,
        has_checkpoint,
        load_checkpoint,
        remove_checkpoint,
        save_checkpoint,
    )
    from nxd_ckpt.checkpoint import Checkpoint, get_checkpoint_metadata, load_keys, open_checkpoint
    from nxd_ckpt.checkpointer import Checkpointer
    from nxd_ckpt.commit.tier import Tier
    from nxd_ckpt.conversion.cp import copy_checkpoint
    from nxd_ckpt.converting import convert, unshard_checkpoint
    from nxd_ckpt.core.partition import Partition, Section
    from nxd_ckpt.core.retention_rules import Best, Every, Last, Within
    from nxd_ckpt.core.topology import Topology
    from nxd_ckpt.drop_in.install import install, uninstall
    from nxd_ckpt.examine.diff import diff_checkpoints
    from nxd_ckpt.examine.doctor import examine_checkpoint
    from nxd_ckpt.examine.statistics import checkpoint_statistics
    from nxd_ckpt.live.data_position import (
        DataStreams,
        ElasticSampler,
        capture_data_position,
        capture_random_state,
        restore_data_position,
        restore_random_state,
    )
    from nxd_ckpt.reshard.whole_tag import GlobalTensor
    from nxd_ckpt.saving.pending import PendingSave
    from nxd_ckpt.tag.listing import list_checkpoints

__all__ = [
    "Best",
    "Checkpoint",
    "Checkpointer",
    "DataStreams",
    "ElasticSampler",
    "Every",
    "GlobalTensor",
    "Last",
    "Partition",
    "PendingSave",
    "Section",
    "Tier",
    "Topology",
    "Within",
    "__version__",
    "capture_data_position",
    "capture_random_state",
    "checkpoint_statistics",
    "close_checkpointers",
    "convert",
    "copy_checkpoint",
    "diff_checkpoints",
    "errors",
    "examine_checkpoint",
    "finalize_checkpoint",
    "get_checkpoint_metadata",
    "has_checkpoint",
    "install",
    "list_checkpoints",
    "load_checkpoint",
    "load_keys",
    "open_checkpoint",
    "remove_checkpoint",
    "restore_data_position",
    "restore_random_state",
    "save_checkpoint",
    "uninstall",
    "unshard_checkpoint",
]

# Imported at first use, so that `nxd-ckpt --help` does not wait for torch.
_MODULE_OF = {
    "Best": "core.retention_rules",
    "Checkpoint": "checkpoint",
    "Checkpointer": "checkpointer",
    "DataStreams": "live.data_position",
    "ElasticSampler": "live.data_position",
    "Every": "core.retention_rules",
    "GlobalTensor": "reshard.whole_tag",
    "Last": "core.retention_rules",
    "Partition": "core.partition",
    "PendingSave": "saving.pending",
    "Section": "core.partition",
    "Tier": "commit.tier",
    "Topology": "core.topology",
    "Within": "core.retention_rules",
    "capture_data_position": "live.data_position",
    "capture_random_state": "live.data_position",
    "checkpoint_statistics": "examine.statistics",
    "close_checkpointers": "api",
    "convert": "converting",
    "copy_checkpoint": "conversion.cp",
    "diff_checkpoints": "examine.diff",
    "examine_checkpoint": "examine.doctor",
    "finalize_checkpoint": "api",
    "get_checkpoint_metadata": "checkpoint",
    "has_checkpoint": "api",
    "install": "drop_in.install",
    "list_checkpoints": "tag.listing",
    "load_checkpoint": "api",
    "load_keys": "checkpoint",
    "open_checkpoint": "checkpoint",
    "remove_checkpoint": "api",
    "restore_data_position": "live.data_position",
    "restore_random_state": "live.data_position",
    "save_checkpoint": "api",
    "uninstall": "drop_in.install",
    "unshard_checkpoint": "converting",
}


# Other libraries have these.
_MEANT = {
    "save": "save_checkpoint(), or save() of a Checkpointer or of nxd_ckpt.dcp",
    "load": "load_checkpoint(), or load() of a Checkpointer or of nxd_ckpt.dcp",
    "async_save": "save_checkpoint(async_save=True), or nxd_ckpt.dcp.async_save()",
    "wait": "finalize_checkpoint()",
    "close": "close_checkpointers()",
    "restore": "load_checkpoint()",
    "CheckpointManager": "Checkpointer",
    "list": "list_checkpoints()",
    "verify": "verify_checkpoint() of nxd_ckpt.verify, which is imported by its own name",
}

if not TYPE_CHECKING:  # a type checker should still see that a name is misspelt

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF.get(name)
        if module is None:
            meant = _MEANT.get(name)
            advice = "" if meant is None else f": did you mean {meant}?"
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
