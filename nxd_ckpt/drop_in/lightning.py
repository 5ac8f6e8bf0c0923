"""The methods of NxD's ``NeuronCheckpointIO``, the plug-in of its strategy for Lightning, on top of `rank_files`.

The class stays NxD's, since the strategy takes no other: only its methods are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_ckpt.drop_in import rank_files
from nxd_ckpt.drop_in.functions import plain
from nxd_ckpt.storage.urls import StrPath


def save_checkpoint(
    self: Any,
    checkpoint: Mapping[str, Any],
    path: StrPath,
    storage_options: Any | None = None,
    master_dp_only: bool = True,
) -> None:
    """Save Lightning's dict into the directory ``path``. Raises TypeError for ``storage_options``, as NxD."""
    if storage_options is not None:
        raise TypeError(f"{type(self).__name__} saves to file systems: expected storage_options=None")
    rank_files.save(plain(checkpoint), path, save_xser=self.save_load_xser, master_dp_only=master_dp_only)


def load_checkpoint(self: Any, checkpoint_path: StrPath, master_dp_only: bool = True) -> Any:
    """Return this rank's dict, its tensors on the CPU."""
    return rank_files.load(checkpoint_path, master_dp_only=master_dp_only)


def remove_checkpoint(self: Any, path: StrPath) -> None:
    """Remove the directory; rank 0 does it, wherever else this is called."""
    rank_files.remove(path)
