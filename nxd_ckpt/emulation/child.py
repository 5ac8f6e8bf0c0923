"""One rank of an emulated world: ``python -m nxd_ckpt.emulation.child LIFELINE REPORTS (SCRIPT | -m MODULE) ARGS``.

Internal to the launcher, which keeps the far end of the pipe ``LIFELINE`` open for as long as it lives, and reads from
the pipe ``REPORTS`` who failed first.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from nxd_ckpt.drop_in.script import run
from nxd_ckpt.emulation.install import install


def end_with_launcher(lifeline: int) -> None:
    """Send this process SIGTERM once the launcher is gone."""

    def watch() -> None:
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def leave(code: int) -> None:
    """End the process as Python does, up to and with the exit hooks, and no further.

    After them come the destructors of C++ objects: running threads of gloo or XLA sometimes abort the process then, and
    the script's own exit code is lost.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads; executors end here. multiprocessing calls it too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def exit_code(script: Callable[[], None]) -> int:
    """Run ``script``; return the code that Python would end with, after its output."""
    try:
        script()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_type = type(error)
        sys.last_value = error
        sys.last_traceback = error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def main(lifeline: int, reports: int, command: list[str]) -> None:
    end_with_launcher(lifeline)
    install()
    code = exit_code(lambda: run(command))
    if code:
        # Before the exit hooks close connections: ranks that fail for that reason report later.
        os.write(reports, f"{os.environ['RANK']} {code}\n".encode())
    leave(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
