"""Where the tests' ranks come from: a server that has imported what they all need, and forks them in milliseconds."""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
# nxd_ckpt imports lazily: the last two name what a save and a load import.
FORKED.set_forkserver_preload(
    ["boto3", "pytest", "torch.distributed", "nxd_ckpt.testing.storage", "tests.protocol.states"]
)
