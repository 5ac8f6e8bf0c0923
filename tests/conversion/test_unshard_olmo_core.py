"""Unsharded checkpoints against the real OLMo-core, where it is installed."""

from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import save_checkpoint, unshard_checkpoint
from tests.tag.equality import difference


def test_files_are_those_of_olmo_core(tmp_path: Path) -> None:
    """Of the same model and optimizer: the same names, and in each file the same, for each of its strategies."""
    import olmo_core.distributed.checkpoint as olmo_core

    trained = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    trained(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    olmo_core.save_model_and_optim_state(tmp_path / "dcp", trained, optimizer)
    save_checkpoint(tmp_path / "run", "step_1", trained, optimizer, durable=False)
    strategy = olmo_core.UnshardStrategy
    chunks: dict[str, Any] = {"unshard_strategy": "chunks", "size_per_shard": "50B"}
    for number, (chosen, own, optim) in enumerate(
        [
            (strategy.one_file(), dict[str, Any](), True),
            (strategy.one_file_per_tensor(), {"unshard_strategy": "one_file_per_tensor"}, False),
            (strategy.chunks(50), chunks, False),
        ]
    ):
        theirs, ours = tmp_path / f"theirs-{number}", tmp_path / f"ours-{number}"
        expected = olmo_core.unshard_checkpoint(tmp_path / "dcp", theirs, optim=optim, unshard_strategy=chosen)
        found = unshard_checkpoint(tmp_path / "run" / "step_1", ours, optim=optim, **own)
        places = [None if place is None else ours / place.relative_to(theirs) for place in expected]
        assert places == list(found)
        files = [path.relative_to(theirs) for path in theirs.rglob("*.pt")]
        assert sorted(files) == sorted(path.relative_to(ours) for path in ours.rglob("*.pt"))
        for file in files:
            assert None is difference(*(torch.load(root / file, weights_only=True) for root in (theirs, ours))), file
