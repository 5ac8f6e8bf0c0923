"""One rank of an emulated world: ``python -m nxd_ckpt.emulation.child LIFELINE (SCRIPT | -m MODULE) ARGS``.

Internal to the launcher, which keeps the far end of the pipe ``LIFELINE`` open for as long as it lives.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType

from nxd_ckpt.emulation.install import install


def run(command: list[str]) -> None:
    """Run the script or module as ``__main__``, as ``python SCRIPT`` and ``python -m MODULE`` would."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        script = Path(command[0])
        sys.argv = command
        sys.path[0] = str(script.resolve().parent)
        # Not runpy.run_path, which takes __main__ away when the script returns: exit hooks may still need it.
        main = ModuleType("__main__")
        main.__file__ = str(script)
        sys.modules["__main__"] = main
        exec(compile(script.read_bytes(), str(script), "exec"), main.__dict__)


def end_with_launcher(lifeline: int) -> None:
    """Send this process SIGTERM once the launcher is gone."""

    def watch() -> None:
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    end_with_launcher(int(sys.argv[1]))
    install()
    run(sys.argv[2:])
