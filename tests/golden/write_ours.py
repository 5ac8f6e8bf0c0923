"""Writes the golden checkpoints of ours: ``python -m tests.golden.write_ours TAR``, needs torch-xla.

Run it on a release, and keep the tar under a name of its own: what a release wrote, every later one must load.
"""

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

import nxd_ckpt
from tests.support.rank_pool import RankPool
from tests.training.model import Setup, Trainer
from tests.training.scenarios import save

XSER = (("use_xser", True),)

SETUPS = {
    "plain_dp2_tp2": Setup((("dp", 2), ("tp", 2)), zero1=False),
    "zero1_dp2_tp2_bf16": Setup((("dp", 2), ("tp", 2)), dtype="bfloat16"),
    "zero1_dp2_tp2_bf16_xser": Setup((("dp", 2), ("tp", 2)), dtype="bfloat16", options=XSER),
    "zero1_dp2_tp2_bf16_avoid_xser": Setup(
        (("dp", 2), ("tp", 2)),
        dtype="bfloat16",
        options=(*XSER, ("avoid_saving_lower_precision_weights", True)),
    ),
    "zero1_dp2_pp2_dcp": Setup((("dp", 2), ("pp", 2)), options=(("use_zero1_dcp", True),)),
    "zero1_dp4_ep2_xser": Setup((("dp", 4), ("ep", 2)), options=XSER),
}


def write(rank: int, root: str, name: str, setup: Setup) -> None:
    """Train, save as ``step_2``, and keep what this rank held."""
    trainer = Trainer(rank, setup)
    trainer.train(2)
    held: dict[str, Any] = trainer.state()
    save(rank, f"{root}/{name}/ckpt", "step_2", trainer, setup, rank_content={"rank": rank})
    nxd_ckpt.close_checkpointers()
    expected = Path(root, name, "expected")
    expected.mkdir(exist_ok=True)
    torch.save(held, expected / f"rank_{rank:04d}.pt")


def main(target: str) -> None:
    with tempfile.TemporaryDirectory() as root, RankPool(nproc=4, xla=True) as pool:
        for name, setup in SETUPS.items():
            pool.run(write, root, name, setup, timeout=300)
        with tarfile.open(target, "w:xz") as tar:
            tar.add(root, "ours")


if __name__ == "__main__":
    from tests.golden import write_ours  # the workers find its functions by the module's own name

    write_ours.main(sys.argv[1])
