"""Train a small Llama with transformers' Trainer, checkpointed by nxd_ckpt, and go on from the last checkpoint.

::

    python examples/train_transformers.py --directory checkpoints --steps 20
    python examples/train_transformers.py --directory checkpoints --steps 40      # goes on from step 20
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from nxd_ckpt.integrations.transformers import Trainer  # in place of transformers.Trainer


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = torch.randint(64, (32, 8))
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            args.directory,
            max_steps=args.steps,
            save_steps=2,
            save_total_limit=2,
            lr_scheduler_type="constant",
            report_to=[],
            optim="adamw_torch",  # the default, fused, is not for torch-xla's devices
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    last = get_last_checkpoint(args.directory)
    trainer.train(resume_from_checkpoint=last)
    print(f"step {trainer.state.global_step}" + ("" if last is None else f", went on from step {last.split('-')[-1]}"))


if __name__ == "__main__":
    main()
