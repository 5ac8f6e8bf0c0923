"""What the training of the small Llama is made of, whichever way it is parallel: data, learning rate, options, log."""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nxd_ckpt

BETAS = (0.9, 0.95)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """For AdamW: no weight decay on norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def learning_rate_factor(step: int, steps: int, warmup: int = 5) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class Bytes:
    """The source files of Python's standard library as one long text; a token is a byte."""

    def __init__(self, length: int, limit: int = 2**21) -> None:
        self._length = length
        text = bytearray()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += file.read_bytes()
            if len(text) >= limit:
                break
        self._tokens = torch.frombuffer(text, dtype=torch.uint8).long()

    def batch(self, position: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows ``position`` to ``position + size``: inputs and, one byte on, targets, each (size, length)."""
        windows = (len(self._tokens) - 1) // self._length
        starts = [(index % windows) * self._length for index in range(position, position + size)]
        cut = torch.stack([self._tokens[start : start + self._length + 1] for start in starts])
        return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


class Log:
    """JSON lines, on stdout or appended to a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def write(self, **record: Any) -> None:
        line = json.dumps(record)
        if self._file is None:
            print(line, flush=True)
        else:
            with self._file.open("a") as file:
                file.write(line + "\n")


def find_checkpoint(args: argparse.Namespace) -> tuple[str, str | None]:
    """Where to resume from: the directory, and the tag that ``--loading_step`` asks for; no tag to start anew."""
    own, other = args.checkpoint_dir, args.resume_from
    directory = own if other is None or nxd_ckpt.has_checkpoint(own) else other
    if args.loading_step == "-1":
        return own, None
    if args.loading_step != "latest_if_exists":
        return directory, f"step_{args.loading_step}"
    if not nxd_ckpt.has_checkpoint(directory):
        return own, None
    return directory, nxd_ckpt.open_checkpoint(directory).tag


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama on Python's standard library.")
    parser.add_argument("--checkpoint_dir", required=True, help="directory that all ranks share")
    parser.add_argument("--loading_step", default="-1", help="-1 starts anew, latest_if_exists resumes, or a step")
    parser.add_argument("--resume_from", help="directory to load from while checkpoint_dir holds no checkpoint")
    parser.add_argument("--save_every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--num_kept_ckpts", type=int, default=3, help="older checkpoints are deleted")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tensor_parallel_size", type=int, default=2)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--inner", type=int, default=352, help="width inside the MLPs")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dropout_steps", type=int, default=sys.maxsize, help="early dropout: none after these steps")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="that is computed in")
    parser.add_argument("--batch_size", type=int, default=4, help="sequences per step and data-parallel rank")
    parser.add_argument("--sequence_length", type=int, default=64, help="bytes")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log_file", type=Path, help="file to append JSON lines to; stdout by default")
    return parser.parse_args()
