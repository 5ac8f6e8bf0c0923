"""Train a small Llama with transformers' Trainer and FSDP2, checkpointed by nxd_ckpt, and go on from the last.

Each rank writes and reads its shards, and a run goes on on another number of ranks::

    torchrun --nproc_per_node 2 examples/train_transformers_fsdp2.py --directory checkpoints --steps 2
    torchrun --nproc_per_node 4 examples/train_transformers_fsdp2.py --directory checkpoints --steps 4   # goes on
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from accelerate import DistributedType, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from nxd_ckpt.integrations import transformers  # its Trainer takes the place of transformers'


class Trainer(transformers.Trainer):
    """Saves in the background, and resumes what another number of ranks saved."""

    async_save = True
    any_world_size = True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="checkpoints")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    # transformers 4 takes these two from accelerate's configuration, transformers 5 from fsdp_config.
    os.environ |= {"FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    chosen = TrainingArguments(
        args.directory,
        max_steps=args.steps,
        save_steps=1,
        save_total_limit=2,
        per_device_train_batch_size=16 // int(os.environ["WORLD_SIZE"]),
        lr_scheduler_type="constant",
        fsdp="full_shard",
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    # accelerate shards on devices alone: here CPU ranks stand for them. Leave this line and use_cpu out on devices.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_NEURON
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = torch.randint(64, (64, 8))
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(LlamaForCausalLM(config), chosen, train_dataset=dataset)
    last = get_last_checkpoint(args.directory)
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        on = f"{trainer.args.world_size} ranks" + ("" if last is None else f", went on from step {last.split('-')[-1]}")
        print(f"step {trainer.state.global_step} on {on}", flush=True)


if __name__ == "__main__":
    main()
