"""Checkpoints in W&B's runs, by reference: ``log_checkpoint("run", "step_100", metrics={"loss": loss})``."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from nxd_ckpt.core.names import MANIFEST
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.integrations.reference import Reference, reference_to
from nxd_ckpt.storage.urls import StorageOptions, StrPath


def log_checkpoint(
    path: StrPath,
    tag: Tag | None = None,
    *,
    metrics: Mapping[str, float] | None = None,
    step: int | None = None,
    name: str = "checkpoint",
    storage_options: StorageOptions | None = None,
) -> Reference:
    """Log a complete tag, and ``metrics``, to the current run. One rank calls this.

    The tag becomes a version of the artifact ``name``, of type "checkpoint", with the manifest's URI as its only entry
    and the reference and ``metrics`` as its metadata.

    Raises:
        InvalidArgument: ``wandb.init()`` was not called.
        CheckpointError: see `nxd_ckpt.integrations.reference.reference_to`; nothing was logged.
    """
    if wandb.run is None:
        raise InvalidArgument("there is no run to log to: call wandb.init() first")
    reference = reference_to(path, tag, storage_options)
    document = {**reference.document(), "step": step, "metrics": dict(metrics or {})}
    artifact = wandb.Artifact(name, "checkpoint", metadata=document)
    # For a directory on a disk W&B would list all files.
    artifact.add_reference(f"{reference.uri}/{MANIFEST}", name=f"{reference.tag}/{MANIFEST}", checksum=False)
    wandb.run.log_artifact(artifact, aliases=["latest", reference.tag])
    if metrics:
        wandb.run.log(dict(metrics), step=step)
    return reference
