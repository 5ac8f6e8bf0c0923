"""Helpers for your own tests: of a resume with your training objects, of a storage, of code that uses one.

``docs/doctor.md`` shows the first at work, ``docs/own-storage.md`` the others.

==================================  =====================================================================
``check_resume``                    train, save, load into fresh objects, train on: equal to an uninterrupted run
``ResumeDiffers``                   its error, which names the first difference
``HookedStorage``                   a wrapper that calls a hook before every ``Operation``
``recording``, ``failing``,         hooks: note operations, make chosen ones fail, slow them down, kill the process
``delaying``, ``killing``,          before one; ``chained``: several of them
``MemoryStorage``                   a store in memory, as awkward as the contract of storages allows
``contract.StorageContract``        the tests that every storage passes, to be subclassed; needs pytest
==================================  =====================================================================
"""

import sys

from nxd_ckpt.testing.resume import ResumeDiffers, check_resume
from nxd_ckpt.testing.storage import (
    Hook,
    HookedStorage,
    MemoryStorage,
    Operation,
    chained,
    delaying,
    failing,
    killing,
    recording,
)

__all__ = [
    "Hook",
    "HookedStorage",
    "MemoryStorage",
    "Operation",
    "ResumeDiffers",
    "chained",
    "check_resume",
    "delaying",
    "failing",
    "killing",
    "recording",
]

if "pytest" in sys.modules:  # so that a failing assertion of the contract shows both of its sides
    sys.modules["pytest"].register_assert_rewrite("nxd_ckpt.testing.contract")
