"""A small model of transformers' with dropout, its data, and runs of its Trainer."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

from nxd_ckpt.integrations.transformers import Trainer
from nxd_ckpt.live.dtensor import local_of


class TinyConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "tiny"


class Tiny(PreTrainedModel):  # type: ignore[misc]
    """Two layers and dropout."""

    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.post_init()

    def get_input_embeddings(self) -> None:
        """There are none."""

    def get_output_embeddings(self) -> None:
        """There are none."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.net(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


def data() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    return [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(6)]


class Background(Trainer):
    """Saves in the background."""

    async_save = True


class Quick(Trainer):
    """Without waiting for the disk."""

    checkpoint_options: ClassVar[dict[str, Any]] = {"durable": False}


def trained(
    directory: Path | str,
    *,
    kind: Any = Quick,
    resume: Any = None,
    seed: int = 1,
    callbacks: Any = None,
    **options: Any,
) -> Any:
    """A trainer after four steps, of which every second is saved; ``resume`` is what it goes on from."""
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "learning_rate": 0.1, **options}
    arguments = TrainingArguments(
        str(directory),
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **chosen,
    )
    trainer = kind(Tiny(TinyConfig()), arguments, train_dataset=data(), eval_dataset=data()[:2], callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Any) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in trainer.model.parameters()]


def held(trainer: Any) -> list[list[float]]:
    """What this rank holds of the parameters."""
    return [local_of(parameter).flatten().tolist() for parameter in trainer.model.parameters()]


def losses(trainer: Any) -> dict[int, float]:
    """By step."""
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
