"""Whether tests may mount file systems here, and what to say where they may not."""

import os
import re
from pathlib import Path

import pytest

_SYS_ADMIN = 21
"""The number of CAP_SYS_ADMIN, which root in a container may lack."""


def needs_mounts(device: str = "/proc/mounts") -> pytest.MarkDecorator:
    """Skips tests where nothing may be mounted, or where there is no ``device``, by which they mount."""
    status = Path("/proc/self/status")
    found = re.search(r"^CapEff:\s*(\w+)", status.read_text(), re.MULTILINE) if status.exists() else None
    may_mount = found is not None and bool(int(found[1], 16) >> _SYS_ADMIN & 1)
    return pytest.mark.skipif(
        not (may_mount and os.path.exists(device)), reason=f"it mounts a file system: for root, and with {device}"
    )
