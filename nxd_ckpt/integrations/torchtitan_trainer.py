"""Import hook that makes the trainer of torchtitan 0.2.2 use `nxd_ckpt.integrations.torchtitan`.

That trainer has no option for another checkpoint manager, but it imports a module of the user's before it makes one::

    torchrun ... -m torchtitan.train --job.config_file llama.toml \\
        --experimental.custom_import nxd_ckpt.integrations.torchtitan_trainer
"""

from __future__ import annotations

import logging
import sys

from nxd_ckpt.integrations.torchtitan import CheckpointManager, TitanCheckpointManager


def _use_our_manager() -> list[str]:
    """Replace TorchTitan's manager in every module that has imported it; return their names. Warns if there is none."""
    changed = []
    for name, module in list(sys.modules.items()):
        is_trainer = name == "__main__" or name.startswith("torchtitan.")
        if is_trainer and vars(module).get("CheckpointManager") is TitanCheckpointManager:
            module.CheckpointManager = CheckpointManager  # type: ignore[attr-defined]
            changed.append(name)
    if not changed:
        logging.getLogger("nxd_ckpt").warning(
            "no trainer of torchtitan 0.2.2 is loaded yet, so it will save with its own manager: let its option "
            "experimental.custom_import import this module; with 0.3, set checkpoint=CheckpointManager.Config(...)"
        )
    return changed


_use_our_manager()
