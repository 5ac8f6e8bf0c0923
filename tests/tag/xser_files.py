"""Writing xser files as torch-xla and NxD lay them out."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt.formats import xser
from nxd_ckpt.formats.torch_zip_writer import image_of


def save_xser(
    tree: Any, path: Path, *, info: bool = True, left_out: Collection[int] = (), expert: Collection[int] = ()
) -> None:
    """``path`` and the folder beside it; tensors with a tid in ``left_out`` get no file."""
    references, tensors = xser.split(tree)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image_of(references).tail([]))
    folder = path.with_name(f"{path.name}.tensors")
    folder.mkdir()
    for tid, tensor in tensors:
        if tid not in left_out:
            torch.save(tensor, folder / f"tensor_{tid}.pt")
    if info:
        torch.save(xser.info(tensors, expert), path.with_name(f"{path.name}.info.pt"))
