"""Running a script or module as ``__main__`` in this process."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def run(command: Sequence[str]) -> None:
    """Run ``SCRIPT ARGS``, or ``-m MODULE ARGS``, as ``python SCRIPT`` and ``python -m MODULE`` would."""
    if command[0] == "-m":
        sys.argv = [*command[1:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        script = Path(command[0])
        sys.argv = [*command]
        sys.path[0] = str(script.resolve().parent)
        # Not runpy.run_path, which takes __main__ away when the script returns: exit hooks may still need it.
        main = ModuleType("__main__")
        main.__file__ = str(script)
        sys.modules["__main__"] = main
        exec(compile(script.read_bytes(), str(script), "exec"), main.__dict__)
