"""For whoever writes a storage of their own, or tests what uses one. ``docs/own-storage.md`` shows them at work.

==================================  =====================================================================
``HookedStorage``                   a wrapper that calls a hook before every ``Operation``
``recording``, ``failing``,         hooks: note operations, make chosen ones fail, slow them down, kill the process
``delaying``, ``killing``,          before one; ``chained``: several of them
``MemoryStorage``                   a store in memory, as awkward as the contract of storages allows
``contract.StorageContract``        the tests that every storage passes, to be subclassed; needs pytest
==================================  =====================================================================
"""

import sys

from nxd_ckpt.testing.memory import MemoryStorage
from nxd_ckpt.testing.storage import Hook, HookedStorage, Operation, chained, delaying, failing, killing, recording

__all__ = [
    "Hook",
    "HookedStorage",
    "MemoryStorage",
    "Operation",
    "chained",
    "delaying",
    "failing",
    "killing",
    "recording",
]

if "pytest" in sys.modules:  # so that a failing assertion of the contract shows both of its sides
    sys.modules["pytest"].register_assert_rewrite("nxd_ckpt.testing.contract")
