"""mlflow and W&B, offline: a checkpoint is logged by reference. Each test is skipped where its package is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import close_checkpointers, save_checkpoint
from nxd_ckpt.errors import CheckpointNotFound
from nxd_ckpt.integrations.reference import Reference, reference_to
from tests.docs.markdown import DOCS, code_blocks
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.plain, pytest.mark.once]

METRICS = {"loss": 0.5}


@pytest.fixture
def saved(tmp_path: Path) -> Reference:
    """The reference to a tag of three float32 numbers."""
    save_checkpoint(tmp_path / "run", "step_1", {"w": torch.ones(3)}, durable=False)
    return reference_to(tmp_path / "run", "step_1")


def test_a_reference_says_which_checkpoint_it_is(tmp_path: Path, saved: Reference) -> None:
    """Where it is and how large; its digest changes with what is saved, and with nothing else."""
    assert ("step_1", 12, 1, 1) == (saved.tag, saved.nbytes, saved.tensors, saved.ranks)
    assert (tmp_path / "run" / "step_1").as_uri() == saved.uri
    assert saved == reference_to(tmp_path / "run")
    save_checkpoint(tmp_path / "run", "step_1", {"w": torch.zeros(3)}, durable=False)
    assert saved.digest != reference_to(tmp_path / "run").digest
    with pytest.raises(CheckpointNotFound):
        reference_to(tmp_path / "run", "step_2")


def run_the_snippet(of: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of docs/integrations.md, with a tag where it looks for one; what it logs is returned."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    save_checkpoint("s3://bucket/run7", "step_100", {"w": torch.ones(3)}, overwrite=True)
    close_checkpointers()
    (snippet,) = [block for block in code_blocks(DOCS / "integrations.md", "text") if "log_checkpoint" in block]
    assert "integrations.mlflow" in snippet
    namespace: dict[str, Any] = {"loss": 0.5}
    exec(snippet.replace("integrations.mlflow", f"integrations.{of}"), namespace)
    return reference_to("s3://bucket/run7", "step_100")


def test_the_snippet_of_the_docs_runs_with_mlflow(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands in docs/integrations.md."""
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    with mlflow.start_run() as run:
        reference = run_the_snippet("mlflow", s3_server, monkeypatch)
    data = mlflow.get_run(run.info.run_id).data
    assert (METRICS, reference.uri) == (data.metrics, data.tags["nxd_ckpt.uri"])


def test_the_snippet_of_the_docs_runs_with_wandb(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the other module, which it names."""
    wandb: Any = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    logged: list[Any] = []
    with wandb.init(mode="offline", dir=str(tmp_path)) as run:
        monkeypatch.setattr(run, "log_artifact", lambda artifact, **options: logged.append(artifact))
        reference = run_the_snippet("wandb", s3_server, monkeypatch)
    (artifact,) = logged
    assert {**reference.document(), "step": 100, "metrics": METRICS} == artifact.metadata


def test_mlflow_gets_a_reference(tmp_path: Path, saved: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small artifact, tags and metrics of the run."""
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    from nxd_ckpt.integrations.mlflow import log_checkpoint

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    with mlflow.start_run() as run:
        assert saved == log_checkpoint(tmp_path / "run", "step_1", metrics=METRICS, step=1)
    data = mlflow.get_run(run.info.run_id).data
    assert (METRICS, saved.uri, saved.digest) == (
        data.metrics, data.tags["nxd_ckpt.uri"], data.tags["nxd_ckpt.digest"],
    )  # fmt: skip
    logged = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/checkpoints/step_1.json")
    assert {**saved.document(), "step": 1, "metrics": METRICS} == logged


def test_wandb_gets_a_reference(tmp_path: Path, saved: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """An artifact whose only entry is the manifest's URI; offline it waits in the run's directory."""
    wandb: Any = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    from nxd_ckpt.integrations.wandb import log_checkpoint

    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    logged: list[Any] = []
    with wandb.init(mode="offline", dir=str(tmp_path)) as run:
        log_artifact = run.log_artifact

        def noted(artifact: Any, **options: Any) -> Any:
            logged.append(artifact)
            return log_artifact(artifact, **options)

        monkeypatch.setattr(run, "log_artifact", noted)
        assert saved == log_checkpoint(tmp_path / "run", "step_1", metrics=METRICS, step=1)
    (artifact,) = logged
    (entry,) = artifact.manifest.entries.values()
    assert ("step_1/manifest.json", f"{saved.uri}/manifest.json") == (entry.path, entry.ref)
    assert {**saved.document(), "step": 1, "metrics": METRICS} == json.loads(json.dumps(artifact.metadata))
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
