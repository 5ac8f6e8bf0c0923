"""Ranks of the self-test that are forked in milliseconds, where the command starts Python anew for each."""

import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from nxd_ckpt.testing import selftest
from tests.support.processes import FORKED

Before = Callable[[], None]


class ForkedRank:
    """As much of a ``subprocess.Popen`` as the command uses; ``before`` is called in the rank before it begins."""

    def __init__(self, plan: Path, environment: Mapping[str, str], log: Path, before: Before | None = None) -> None:
        reader, self.stdin = FORKED.Pipe(duplex=False)
        self._process = FORKED.Process(target=_run, args=(reader, plan, dict(environment), log, before))
        with reader:
            self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _run(reader: Connection, plan: Path, environment: dict[str, str], log: Path, before: Before | None) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(plan.parent)
    os.dup2(reader.fileno(), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if before is not None:
        before()
    selftest.end(selftest.main(str(plan)))
