"""The disks of a job's hosts as one object store.

Each rank writes its data on its own host, at the speed of its disk. The small files that describe a directory, written
whole, are on every host. The job's own small files have one home, the host of rank 0. A key exists while any host has
it; a listing is the union; a removal removes it everywhere.

A host that was away may come back with an older save of a name. The marker of a directory names the save of its files.
So the hosts with the marker of the newest complete save are its *members*; files of other hosts are neither read nor
listed. With replicas each data file is on other hosts too, before its writer has closed.

The ranks of a job on one host share a claim on that host's directory: the job's lease is on the host of rank 0, where
another job, of which only some hosts are also this job's, does not see it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from nxd_ckpt import effects
from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.core.manifest import CRC_BLOCK, FileEntry
from nxd_ckpt.errors import CheckpointError, DirectoryInUse
from nxd_ckpt.storage.base import DirEntry, Reader, Storage, Writer
from nxd_ckpt.storage.hosts.directory import Names, OwnDirectory, top_of
from nxd_ckpt.storage.hosts.remote import RemoteDirectory
from nxd_ckpt.storage.hosts.server import CopyOut, copy_nothing
from nxd_ckpt.storage.system import HAS_LOCKS, lock, locked

Directory = OwnDirectory | RemoteDirectory
"""One host's directory. Raises the errors of `nxd_ckpt.storage.base`; ConnectionError if the host is away."""

_BESIDE = 2**20
"""Bytes of a write from which sending runs in a thread: less is sent before a thread would have begun."""


class ReplicatedWriter:
    """A writer to ``own`` and to a file of the same key on each other host: closed means complete on all."""

    def __init__(self, own: Writer, others: Sequence[tuple[Directory, str, int]]) -> None:
        self._own = own
        self._others: list[Writer] = []
        self._sender: ThreadPoolExecutor | None = None
        self._sending: list[Future[None]] = []
        try:
            for directory, key, nbytes in others:
                self._others.append(directory.create(key, nbytes))
        except BaseException:
            self.abort()
            raise

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        if len(memoryview(data).cast("B")) >= _BESIDE:
            self._sender = self._sender or ThreadPoolExecutor(1, "nxd_ckpt-replica")
        if self._sender is None:
            self._send(offset, data)
        else:
            self._sending.append(self._sender.submit(self._send, offset, data))
        self._own.write_at(offset, data)

    def settle(self) -> None:
        self._await_sent()
        self._own.settle()

    def close(self) -> None:
        try:
            self._await_sent()
            for writer in self._others:
                writer.close()
            self._own.close()
        finally:
            self._end()

    def abort(self) -> None:
        for sending in self._sending:
            sending.cancel()
        self._end()  # nothing looks into memory afterwards
        for writer in (*self._others, self._own):
            with suppress(OSError):
                writer.abort()

    def _send(self, offset: int, data: bytes | memoryview) -> None:
        for writer in self._others:
            writer.write_at(offset, data)

    def _await_sent(self) -> None:
        """Return once everything was sent and verified on arrival; raise earlier failures."""
        sending = self._sending
        self._sending = []
        for future in sending:
            future.result()
        for writer in self._others:
            writer.settle()

    def _end(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()
        self._sender = None


_WITHIN = 10.0
"""Seconds for which a claim of another job is watched: a data loader that outlives its job may hold it a little longer.
"""
_PAUSE = 0.1
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of file systems without locks."""


def claim(folder: Path, run_id: str) -> Callable[[], None]:
    """Claim this host's directory for the run, and return the function that gives it back.

    ``folder`` has a lock file of each run. The system frees the locks of a process that dies. Nothing is claimed where
    a system or file system has none.

    Raises DirectoryInUse if a process of another run on this host has it.
    """
    if not HAS_LOCKS:
        return lambda: None
    own = folder / run_id
    try:
        unlock = lock(own, shared=True)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return lambda: None

    def give_back() -> None:
        unlock()
        _remove_if_free(own)

    try:
        _refuse_beside_others(own)
    except BaseException:
        give_back()
        raise
    return give_back


def _refuse_beside_others(own: Path) -> None:
    deadline = effects.monotonic() + _WITHIN
    others = [path for path in own.parent.iterdir() if path != own and path.is_file()]
    while others := [path for path in others if not _remove_if_free(path)]:
        if effects.monotonic() > deadline:
            raise DirectoryInUse(
                f"{own.parents[2]} on this host is being written by another live job, run {others[0].name}, on other "
                "hosts; stop it, or save to a directory of your own"
            )
        effects.sleep(_PAUSE)


def _remove_if_free(path: Path) -> bool:
    """Remove the lock file of a run that no process on this host has any more; return whether it is gone."""
    try:
        with locked(path, wait=False), suppress(FileNotFoundError):
            path.unlink()
    except BlockingIOError:
        return False
    return True


T = TypeVar("T")


class Hosts(NamedTuple):
    """The hosts of a job: their directories, rank 0's first; the number of this one, and of those with its replicas."""

    directories: Sequence[Directory]
    here: int
    replicas: Sequence[int] = ()


class HostsStorage(Storage):
    """Keys on the disks of all hosts; ``own`` is the directory on this one. Safe for threads.

    It must be joined to the others with `join` before it is used.
    """

    concurrency = 8
    read_nbytes = CRC_BLOCK
    may_lack_files = True
    """True: a host may be lost, and its files with it."""
    may_be_unmounted = True

    def __init__(self, own: OwnDirectory, names: Names) -> None:
        self.own: OwnDirectory = own
        self.url: str = own.url
        self._names = names
        self._hosts: Hosts | None = None
        self._members: dict[str, Sequence[Directory]] = {}
        self._received = 0
        self.distrusted: set[tuple[str, int]] = set()

    @property
    def hosts(self) -> Hosts:
        """The joined hosts. Raises CheckpointError before `join`."""
        if self._hosts is None:
            raise CheckpointError(
                f"{self.url} is the part of one host (per_host=True): it is used within save, load and has_checkpoint, "
                "which all ranks call together"
            )
        return self._hosts

    @property
    def is_home(self) -> bool:
        return self.hosts.here == 0

    def expect(self, key: str, mark: bytes | None) -> None:
        self.own.expect(key, mark)

    def claim(self, folder: str, run_id: str) -> Callable[[], None]:
        self.own.make_dir(folder)
        return claim(self.own.path(folder), run_id)

    def without_links(self) -> Storage | None:
        return self.own.without_links()

    @property
    def is_joined(self) -> bool:
        return self._hosts is not None

    @property
    def is_replicated(self) -> bool:
        return bool(self.hosts.replicas)

    @property
    def received(self) -> int:
        """Bytes of files that other hosts have sent to this process so far."""
        directories = () if self._hosts is None else self._hosts.directories
        return self._received + sum(each.received for each in directories if isinstance(each, RemoteDirectory))

    def join(self, hosts: Hosts, leave: Callable[[], None] = lambda: None, copy_own: CopyOut | None = None) -> None:
        """Join these hosts; ``leave`` releases their connections, ``copy_own`` is `copy_out` for this host."""
        self._hosts = hosts
        self._leave = leave
        self._copy_own = copy_own or copy_nothing

    def leave(self) -> None:
        """Leave the other hosts, until it is joined again. Safe to call again."""
        if self._hosts is not None:
            self._received = self.received
            self._leave()
        self.own.expect("", None)
        self._hosts = None
        self._members.clear()
        self.distrusted.clear()

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        return self._from_first(key, lambda directory: directory.read(key, limit))

    def open(self, key: str) -> Reader:
        return self._from_first(key, lambda directory: directory.open(key))

    def size(self, key: str) -> int:
        return self._from_first(key, lambda directory: directory.size(key))

    def time(self, key: str) -> float:
        return self._from_first(key, lambda directory: directory.time(key))

    def is_file(self, key: str) -> bool:
        return self._any(self._order(key, anew=self._names.is_mirrored(key)), lambda directory: directory.is_file(key))

    def is_dir(self, key: str) -> bool:
        return self._any(self._all(), lambda directory: directory.is_dir(key))

    def list(self, key: str = "") -> list[DirEntry]:
        entries: set[DirEntry] = set()
        for directory in self._listed(key):
            entries |= set(directory.list(key))
        return sorted(entries)

    def write(self, key: str, data: bytes) -> None:
        if self._names.is_at_home(key):
            self._home.write(key, data)
            return
        if self._names.is_mirrored(key):
            for directory in self.hosts.directories:
                directory.write(key, data)
            return
        with_file = [directory for directory in self._order(key) if directory.is_file(key)]
        for directory in with_file or [self.own, *self._replicas]:
            directory.write(key, data)

    def write_reserved(self, reserve: str, key: str, data: bytes) -> None:
        """Write one of the job's own small files, which are at home, into reserved space."""
        self._home.write_reserved(reserve, key, data)

    def link_new(self, key: str, data: bytes) -> bool:
        at_home = self._names.is_at_home(key)
        mirrored = self._names.is_mirrored(key)
        if not (at_home or mirrored):  # one rank's file, which no other has
            created = self.own.link_new(key, data)
            for directory in self._replicas if created else ():
                directory.write(key, data)
            return created
        others = [directory for directory in self.hosts.directories if directory is not self._home]

        def is_elsewhere() -> bool:
            return self._any(others, lambda directory: directory.is_file(key))

        if is_elsewhere():
            return False
        try:
            if not self._home.link_new(key, data):
                return False
        except (OSError, CheckpointError):
            if mirrored:
                self._withdraw(key, data)
            raise
        if at_home and is_elsewhere():  # another job, whose home is another host, was as fast: neither has it
            self._home.remove(key)
            return False
        if mirrored:
            self._mirror(key, data, others)
        return True

    def _mirror(self, key: str, data: bytes, others: Sequence[Directory]) -> None:
        """Write a home file to the ``others``, also if one of them does not answer. Raises the first error.

        If it would then be on no more hosts than there are replicas, and could be lost with them, it is withdrawn.
        """
        copies = 1
        problem = None
        for directory in others:
            try:
                directory.write(key, data)
                copies += 1
            except (OSError, CheckpointError) as error:
                problem = problem or error
        if problem is None:
            return
        if copies <= len(self.hosts.replicas):
            self._withdraw(key, data)
        raise problem

    def _withdraw(self, key: str, data: bytes) -> None:
        """Remove a file with this content wherever it can be: a host whose disk failed may still have it."""
        for directory in self.hosts.directories:
            with suppress(OSError, CheckpointError):
                if directory.read(key) == data:
                    directory.remove(key)

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        with_file = next((directory for directory in self.hosts.directories if directory.is_file(key)), None)
        if with_file is None or not with_file.exchange(key, expected, data):
            return False
        if self._names.is_mirrored(key):
            self.write(key, data)
        return True

    def create(self, key: str, nbytes: int) -> Writer:
        writer = self.own.create(key, nbytes)
        if not self._replicas:
            return writer
        return ReplicatedWriter(writer, [(directory, key, nbytes) for directory in self._replicas])

    def make_dir(self, key: str) -> None:
        """Make a directory of the job's own files: these are looked into before they have any."""
        if self._names.is_at_home(key):
            self._home.make_dir(key)

    def sync_dir(self, key: str) -> None:
        """Sync this host's files, as far as it was asked to. Small files are durable with their names."""
        if not self._names.is_at_home(key):
            self.own.sync_dir(key)

    def remove(self, key: str) -> None:
        """Remove the key on all hosts that can be reached. Raises the first error."""
        problem: Exception | None = None
        for directory in self.hosts.directories:
            try:
                directory.remove(key)
            except (OSError, CheckpointError) as error:
                problem = problem or error
        self._members.pop(top_of(key), None)
        self.distrusted.difference_update([copy for copy in self.distrusted if f"{copy[0]}/".startswith(f"{key}/")])
        if problem is not None:
            raise problem

    def holders(self, keys: Iterable[str]) -> dict[str, set[int]]:
        """Return the numbers of the reachable hosts that have each of these files of a tag."""
        numbers: dict[str, set[int]] = {key: set() for key in keys}
        for folder in {key.rpartition("/")[0] for key in numbers}:
            for directory in self._order(folder):
                with suppress(ConnectionError, TimeoutError):
                    for entry in directory.list(folder):
                        numbers.get(f"{folder}/{entry.name}", set()).add(self._number(directory))
        return numbers

    def copies(self, key: str) -> dict[int, Storage]:
        copies: dict[int, Storage] = {}
        for directory in self._order(key):
            with suppress(ConnectionError, TimeoutError):
                if directory.is_file(key):
                    copies[self._number(directory)] = self._only(directory)
        return copies

    def copy_out(
        self, number: int, key: str, place: int, folder: str, name: str, expected: FileEntry
    ) -> Generator[int, None, None]:
        """Let another host copy its file to ``folder/name`` of the lower tier number ``place``.

        Each step of the generator copies a piece and yields its bytes; the file is complete once it ends.

        If it is abandoned before, or anything is raised, the file is not there. Raises CorruptCheckpoint, EOFError,
        OSError: the host is away, refuses, or the file is not the ``expected`` one.
        """
        directory = self.hosts.directories[number]
        if isinstance(directory, RemoteDirectory):
            return directory.copy_out(key, place, folder, name, expected)
        return self._copy_own(key, place, folder, name, expected)

    def _only(self, directory: Directory) -> HostsStorage:
        """Return the storage of one host's files."""
        alone = HostsStorage(self.own, self._names)
        alone.url = f"{self.url} on host {self._number(directory)} ({directory.url})"
        alone.join(Hosts([directory], 0))
        return alone

    def _number(self, directory: Directory) -> int:
        return next(number for number, each in enumerate(self.hosts.directories) if each is directory)

    @property
    def _home(self) -> Directory:
        return self.hosts.directories[0]

    @property
    def _replicas(self) -> Sequence[Directory]:
        hosts = self.hosts
        return [hosts.directories[number] for number in hosts.replicas]

    def _all(self) -> Sequence[Directory]:
        """Return all directories in the order in which they are asked: this host's, then those after it (its replicas).
        """
        directories = self.hosts.directories
        here = self.hosts.here
        return [*directories[here:], *directories[:here]]

    def _order(self, key: str, *, anew: bool = False) -> Sequence[Directory]:
        """Return the directories that may have the file ``key``, in the order in which they are asked."""
        if self._names.is_hidden(key):
            return self.hosts.directories
        top = top_of(key)
        if anew or top not in self._members:
            self._members[top] = self._members_of(top)
        return self._members[top]

    def _members_of(self, top: str) -> Sequence[Directory]:
        """Return the hosts whose files in the directory ``top`` are of the newest complete save of that name.

        Hosts that are away count as members: a reader that does not find a file elsewhere gets their error.
        """
        marks = self._marks(top)
        marked = [(_order_of(done), marker) for marker, done in marks.values() if marker is not None]
        newest = max(marked, key=lambda mark: mark[0])[1] if marked else None
        directories = self.hosts.directories
        away = [directory for number, directory in enumerate(directories) if number not in marks]
        return [*(directories[number] for number, (marker, _) in marks.items() if marker == newest), *away]

    def _marks(self, top: str) -> dict[int, tuple[bytes | None, bytes | None]]:
        """Return marker and ``done`` of the directory ``top``, by host; without hosts that are away."""
        keys = [f"{top}/{name}".lstrip("/") for name in (self._names.marker, self._names.done)]
        marks: dict[int, tuple[bytes | None, bytes | None]] = {}
        for directory in self._all():
            with suppress(ConnectionError, TimeoutError):
                marker, done = directory.peek(keys)
                marks[self._number(directory)] = marker, done
        return marks

    def _listed(self, key: str) -> Sequence[Directory]:
        """Return the directories that are listed for ``key``."""
        if not key:
            return self._all()
        if not self._names.is_hidden(key):
            return self._order(key, anew=True)
        attempt = "/".join(key.split("/")[:3])
        # This launch's own files are at home, and are listed again and again.
        if self._names.is_at_home(key) and key.count("/") >= 2 and self._home.is_dir(attempt):
            return [self._home]
        return self._all()

    def _from_first(self, key: str, get: Callable[[Directory], T]) -> T:
        """Return the result of ``get`` for the first directory that has the file."""
        is_cached = top_of(key) in self._members
        mirrored = self._names.is_mirrored(key)
        try:
            return self._first(key, self._order(key, anew=mirrored), get)
        except FileNotFoundError:
            if not is_cached or mirrored or self._names.is_hidden(key):
                raise
        return self._first(key, self._order(key, anew=True), get)  # the name may have got another save since

    def _first(self, key: str, directories: Sequence[Directory], get: Callable[[Directory], T]) -> T:
        """Return the result of the first directory with the file; without one, raise the error of one that is away."""
        away: Exception | None = None
        if self.distrusted:
            directories = sorted(directories, key=lambda directory: (key, self._number(directory)) in self.distrusted)
        for directory in directories:
            try:
                return get(directory)
            except FileNotFoundError:
                continue
            except (ConnectionError, TimeoutError) as error:
                away = away or error
        number = len(self.hosts.directories)
        raise away or FileNotFoundError(f"{self.url}/{key} does not exist on any of {number} hosts")

    def _any(self, directories: Iterable[Directory], holds: Callable[[Directory], bool]) -> bool:
        """Return whether it is true of any; if of none, raise the error of one that is away."""
        away: Exception | None = None
        for directory in directories:
            try:
                if holds(directory):
                    return True
            except (ConnectionError, TimeoutError) as error:
                away = away or error
        if away is not None:
            raise away
        return False


def _order_of(done: bytes | None) -> tuple[int, bytes]:
    """Return the sort key of saves of one name: the number that ``done`` begins with; without one it is incomplete."""
    first = (done or b"").partition(b" ")[0]
    return (int(first) if first.isdigit() and len(first) < 20 else -1, done or b"")
