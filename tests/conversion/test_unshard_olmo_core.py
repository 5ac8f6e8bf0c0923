"""Unsharded checkpoints against the real OLMo-core, where it is installed."""

from pathlib import Path

import torch

from nxd_ckpt import save_checkpoint, unshard_checkpoint
from tests.tag.equality import difference


def test_files_are_those_of_olmo_core(tmp_path: Path) -> None:
    """Of the same model and optimizer: the same names, and in each file the same, by its own strategies too."""
    import olmo_core.distributed.checkpoint as olmo_core

    trained = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    trained(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    olmo_core.save_model_and_optim_state(tmp_path / "dcp", trained, optimizer)
    save_checkpoint(tmp_path / "run", "step_1", trained, optimizer, durable=False)
    strategy = olmo_core.UnshardStrategy
    for number, (chosen, optim) in enumerate(
        [(strategy.one_file(), True), (strategy.one_file_per_tensor(), False), (strategy.chunks(50), False)]
    ):
        theirs, ours = tmp_path / f"theirs-{number}", tmp_path / f"ours-{number}"
        options = {"optim": optim, "unshard_strategy": chosen}
        expected = olmo_core.unshard_checkpoint(tmp_path / "dcp", theirs, **options)
        found = unshard_checkpoint(tmp_path / "run" / "step_1", ours, **options)
        places = [None if place is None else ours / place.relative_to(theirs) for place in expected]
        assert places == list(found)
        files = [path.relative_to(theirs) for path in theirs.rglob("*.pt")]
        assert sorted(files) == sorted(path.relative_to(ours) for path in ours.rglob("*.pt"))
        for file in files:
            assert None is difference(*(torch.load(root / file, weights_only=True) for root in (theirs, ours))), file
