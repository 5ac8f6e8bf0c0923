"""What the tests of tiers save, and what they find there."""

from collections.abc import Iterable
from pathlib import Path

import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.verify import verify_checkpoint


def state(step: int) -> dict[str, torch.Tensor]:
    """A model that tells its step."""
    return {"weight": torch.full((64,), float(step)), "bias": torch.arange(5.0) + step}


def save(saver: Checkpointer, *steps: int) -> None:
    """One save for each step, after the other."""
    for step in steps:
        saver.save(f"step_{step}", state(step), user_content={"step": step})


def tags_in(storage: Storage | Path) -> list[str]:
    """The complete tags, by name."""
    there = LocalStorage(storage) if isinstance(storage, Path) else storage
    return sorted(info.tag for info in list_tags(there) if info.complete)


def damaged(places: Iterable[Path]) -> list[object]:
    """What is wrong with any of the visible tags in these directories."""
    return [found for place in places for tag in tags_in(place) for found in verify_checkpoint(place, tag).problems]
