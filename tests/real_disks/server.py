"""A mounted disk in a process of its own, and how tests tell it what is to go wrong."""

import os
import select
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.real_disks.disk import Fault, MountedDisk
from tests.real_disks.fuse import mounted, serve_one, unmount
from tests.support.processes import FORKED


class Mount:
    """A disk that is mounted at ``path``."""

    def __init__(self, path: Path, connection: Connection) -> None:
        self.path, self._connection = path, connection

    def set(self, fault: Fault | None) -> None:
        """See :meth:`MountedDisk.set`."""
        self._ask("set", fault)

    def met(self) -> tuple[int, Counter[str]]:
        """How many requests met the fault, and how many requests of each name there were since it was set."""
        found: tuple[int, Counter[str]] = self._ask("met")
        return found

    def cut(self) -> None:
        """See :meth:`MountedDisk.cut`."""
        self._ask("cut")

    def restore(self, seed: int | None = None) -> None:
        """See :meth:`MountedDisk.restore`."""
        self._ask("restore", seed)

    def _ask(self, *words: Any) -> Any:
        self._connection.send(words)
        return self._connection.recv()

    @contextmanager
    def losing_what_is_not_synced(self) -> Iterator[None]:
        """When what is within is done, the power fails: every visible file must last, as it was.

        Raises AssertionError.
        """
        yield
        before = self.visible()
        assert before
        self.cut()
        self.restore()
        after = self.visible()
        assert before.keys() == after.keys()
        assert [] == [name for name in before if before[name] != after[name]]

    def visible(self) -> dict[str, bytes]:
        """Every file, with its bytes, but for those in hidden places, which are of no use to anyone later."""
        found = {}
        for folder, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths = [Path(folder, name) for name in names if not name.startswith(".")]
            found.update({str(path.relative_to(self.path)): path.read_bytes() for path in paths})
        return found


@contextmanager
def mounted_disk(path: Path, *, swaps: bool = True, links: bool = True) -> Iterator[Mount]:
    """Mount one at ``path``, a directory that is made."""
    path.mkdir()
    ours, theirs = FORKED.Pipe()
    process = FORKED.Process(target=_serve, args=(theirs, path, swaps, links), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "mounted"
        yield Mount(path, ours)
    finally:
        unmount(path)
        process.kill()
        process.join()


def _serve(connection: Connection, path: Path, swaps: bool, links: bool) -> None:
    """Until it is unmounted."""
    disk, fd = MountedDisk(swaps=swaps, links=links), mounted(path)
    connection.send("mounted")
    while True:
        ready, _, _ = select.select([fd, connection.fileno()], [], [])
        if connection.fileno() in ready:
            try:
                name, *arguments = connection.recv()
            except EOFError:  # the tests are no more
                unmount(path)
                os._exit(1)
            found = (disk.struck, disk.counts) if name == "met" else getattr(disk, name)(*arguments)
            connection.send(found)
        if fd in ready and not serve_one(fd, disk.answer):
            return
