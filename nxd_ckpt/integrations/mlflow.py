"""Checkpoints in mlflow's runs, by reference: ``log_checkpoint("run", "step_100", metrics={"loss": loss})``."""

from __future__ import annotations

from collections.abc import Mapping

import mlflow

from nxd_ckpt.core.tags import Tag
from nxd_ckpt.integrations.reference import Reference, reference_to
from nxd_ckpt.storage.urls import StorageOptions, StrPath


def log_checkpoint(
    path: StrPath,
    tag: Tag | None = None,
    *,
    metrics: Mapping[str, float] | None = None,
    step: int | None = None,
    storage_options: StorageOptions | None = None,
) -> Reference:
    """Log a complete tag, and ``metrics``, to the active run. One rank calls this.

    The tag's reference becomes the artifact ``checkpoints/TAG.json``; its URI and digest become the run's tags
    ``nxd_ckpt.uri`` and ``nxd_ckpt.digest`` (of the last one logged).

    Raises:
        CheckpointError: see `nxd_ckpt.integrations.reference.reference_to`; nothing was logged.
    """
    reference = reference_to(path, tag, storage_options)
    document = {**reference.document(), "step": step, "metrics": dict(metrics or {})}
    mlflow.log_dict(document, f"checkpoints/{reference.tag}.json")
    mlflow.set_tags({"nxd_ckpt.uri": reference.uri, "nxd_ckpt.digest": reference.digest})
    mlflow.log_metrics(dict(metrics or {}), step=step)
    return reference
