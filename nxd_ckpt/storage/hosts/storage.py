"""The disks of a job's hosts as one object store.

Each rank writes its data on its own host, at the speed of its disk. What says what a directory of files is, small and
written whole, is on every host. The job's own small files have one home, the host of rank 0. A key is there while any
host has it; a listing is the union; what is removed is removed everywhere.

A host that was away may come back with an older save of a name. The marker of a directory names the save that its files
belong to, so the hosts whose marker is that of the newest complete save are its *members*, and nothing of the others is
read or listed. With replicas each data file is on other hosts too, before its writer has closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from typing import NamedTuple, TypeVar

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.core.manifest import CRC_BLOCK, FileEntry
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.base import DirEntry, Reader, Storage, Writer
from nxd_ckpt.storage.hosts.directory import Directory, OwnDirectory
from nxd_ckpt.storage.hosts.keys import Names, top_of
from nxd_ckpt.storage.hosts.remote import RemoteDirectory
from nxd_ckpt.storage.hosts.replicas import ReplicatedWriter
from nxd_ckpt.storage.hosts.server import CopyOut, copy_nothing

T = TypeVar("T")


class Hosts(NamedTuple):
    """The hosts of a job: their directories, that of rank 0 first; which is this one, and which have its replicas."""

    directories: Sequence[Directory]
    here: int
    replicas: Sequence[int] = ()


class HostsStorage:
    """Keys on the disks of all hosts; ``own`` is the directory on this one. Safe for threads.

    It must be joined to the others with `join` before it is used.
    """

    renames = False
    concurrency = 8
    read_nbytes = CRC_BLOCK
    may_lack_files = True
    """A host may be lost, and its files with it."""
    may_be_unmounted = True

    def __init__(self, own: OwnDirectory, names: Names) -> None:
        self.own, self.url = own, own.url
        self._names = names
        self._hosts: Hosts | None = None
        self._members: dict[str, Sequence[Directory]] = {}
        self._received = 0
        self.distrusted: set[tuple[str, int]] = set()

    @property
    def hosts(self) -> Hosts:
        """Raises CheckpointError before it is joined."""
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
        return self._received + sum(one.received for one in directories if isinstance(one, RemoteDirectory))

    def join(
        self, hosts: Hosts, leave: Callable[[], None] = lambda: None, copy_own: CopyOut | None = None
    ) -> None:
        """From now on it is all of these; ``leave`` gives up what that takes, ``copy_own`` is `copy_out` here."""
        self._hosts, self._leave = hosts, leave
        self._copy_own = copy_own or copy_nothing

    def leave(self) -> None:
        """From now on it is nothing, until it is joined anew. Safe to call again."""
        if self._hosts is not None:
            self._received = self.received
            self._leave()
        self.own.expect("", None)
        self._hosts = None
        self._members.clear()
        self.distrusted.clear()

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        return self._from_first(key, lambda directory: directory.read(key, limit))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, memoryview(buffer).cast("B"))])

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
        found: set[DirEntry] = set()
        for directory in self._listed(key):
            found |= set(directory.list(key))
        return sorted(found)

    def write(self, key: str, data: bytes) -> None:
        if self._names.is_at_home(key):
            self._home.write(key, data)
            return
        if self._names.is_mirrored(key):
            for directory in self.hosts.directories:
                directory.write(key, data)
            return
        there = [directory for directory in self._order(key) if directory.is_file(key)]
        for directory in there or [self.own, *self._replicas]:
            directory.write(key, data)

    def write_reserved(self, reserve: str, key: str, data: bytes) -> None:
        """Only for the job's own small files, which are at home."""
        self._home.write_reserved(reserve, key, data)

    def link_new(self, key: str, data: bytes) -> bool:
        at_home, mirrored = self._names.is_at_home(key), self._names.is_mirrored(key)
        if not (at_home or mirrored):  # of one rank's files, which no other has
            created = self.own.link_new(key, data)
            for directory in self._replicas if created else ():
                directory.write(key, data)
            return created
        others = [directory for directory in self.hosts.directories if directory is not self._home]

        def is_elsewhere() -> bool:
            return self._any(others, lambda directory: directory.is_file(key))

        if is_elsewhere() or not self._home.link_new(key, data):
            return False
        if at_home and is_elsewhere():  # another job, whose home is another host, was as fast: neither has it
            self._home.remove(key)
            return False
        if mirrored:
            self._mirror(key, data, others)
        return True

    def _mirror(self, key: str, data: bytes, others: Sequence[Directory]) -> None:
        """Write what is at home to the ``others``, also where one of them does not answer. Raises what that raised.

        What would then be on fewer hosts than replicas are, and lost with them, is nowhere.
        """
        there, problem = [self._home], None
        for directory in others:
            try:
                directory.write(key, data)
                there.append(directory)
            except (OSError, CheckpointError) as error:
                problem = problem or error
        if problem is None:
            return
        for directory in there if len(there) <= len(self.hosts.replicas) else ():
            with suppress(OSError, CheckpointError):
                directory.remove(key)
        raise problem

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        there = next((directory for directory in self.hosts.directories if directory.is_file(key)), None)
        if there is None or not there.exchange(key, expected, data):
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
        """Only for the job's own files, whose directories are looked into before there is anything in them."""
        if self._names.is_at_home(key):
            self._home.make_dir(key)

    def sync_dir(self, key: str) -> None:
        """Of what this host wrote as it was told to. Small files are durable with their names."""
        if not self._names.is_at_home(key):
            self.own.sync_dir(key)

    def rename(self, source: str, target: str) -> None:
        raise OSError(f"{self.url}: cannot rename {source} to {target}: the hosts' disks together have no rename")

    def remove(self, key: str) -> None:
        """Everywhere, as far as it can be reached. Raises the first error that was met."""
        problem: Exception | None = None
        for directory in self.hosts.directories:
            try:
                directory.remove(key)
            except (OSError, CheckpointError) as error:
                problem = problem or error
        self._members.pop(top_of(key), None)
        self.distrusted.difference_update([one for one in self.distrusted if f"{one[0]}/".startswith(f"{key}/")])
        if problem is not None:
            raise problem

    def discard_unfinished(self, key: str) -> None:
        """Nothing: what is unfinished lies among the files, and goes with them."""

    def set_time(self, key: str, seconds: float) -> None:
        """Nothing: a host that was away would have another time."""

    def holders(self, keys: Iterable[str]) -> dict[str, set[int]]:
        """The numbers of the hosts that have each of these files of a tag, as far as they can be reached."""
        found: dict[str, set[int]] = {key: set() for key in keys}
        for folder in {key.rpartition("/")[0] for key in found}:
            for directory in self._order(folder):
                with suppress(ConnectionError, TimeoutError):
                    for entry in directory.list(folder):
                        found.get(f"{folder}/{entry.name}", set()).add(self._number(directory))
        return found

    def lacking(self, top: str) -> set[int]:
        """The numbers of the hosts that answer, and do not have what says which complete save the directory ``top``
        holds."""
        marks = self._marks(top)
        newest = max(marks.values(), key=lambda mark: _order_of(mark[1]), default=None)
        return {number for number, mark in marks.items() if mark != newest}

    def is_short(self, top: str) -> bool:
        """Whether a file in the directory ``top`` has fewer copies than it is to have on the hosts that answer, or a
        copy that is distrusted."""
        if any(top_of(key) == top for key, _ in tuple(self.distrusted)):
            return True
        folders = [top]
        while folders:
            found = Counter[DirEntry]()
            for directory in self._order(folders[0], anew=folders[0] == top):
                with suppress(ConnectionError, TimeoutError):
                    found.update(directory.list(folders[0]))
            if any(copies <= len(self.hosts.replicas) for entry, copies in found.items() if not entry.is_dir):
                return True
            folders = [*folders[1:], *(f"{folders[0]}/{entry.name}" for entry in found if entry.is_dir)]
        return False

    def is_member(self, number: int, top: str) -> bool:
        """Whether that host's files in the directory ``top`` are of its newest complete save, or it does not answer."""
        return self.hosts.directories[number] in self._members_of(top)

    def reachable(self) -> set[int]:
        """The numbers of the hosts that answer."""
        return {*self._marks("")}

    def copies(self, key: str) -> dict[int, Storage]:
        there = dict[int, Storage]()
        for directory in self._order(key):
            with suppress(ConnectionError, TimeoutError):
                if directory.is_file(key):
                    there[self._number(directory)] = self._only(directory)
        return there

    def copy_out(
        self, number: int, key: str, place: int, folder: str, name: str, expected: FileEntry
    ) -> Generator[int, None, None]:
        """Have another host copy a file of its own to ``folder/name`` of a lower tier, by the number ``place``: a piece
        each time that the next is asked for, of which the bytes are yielded. It is complete once there is no next one.

        At place 0 it is the other way round: the host fetches the file to its own directory.

        Given up before, or if anything is raised, it is not there. Raises CorruptCheckpoint, EOFError, OSError: the
        host is away, refuses, or the file is not the ``expected`` one.
        """
        directory = self.hosts.directories[number]
        if isinstance(directory, RemoteDirectory):
            return directory.copy_out(key, place, folder, name, expected)
        return self._copy_own(key, place, folder, name, expected)

    def _only(self, directory: Directory) -> HostsStorage:
        """What one of the hosts holds."""
        alone = HostsStorage(self.own, self._names)
        alone.url = f"{self.url} on host {self._number(directory)} ({directory.url})"
        alone.join(Hosts([directory], 0))
        return alone

    def _number(self, directory: Directory) -> int:
        return next(number for number, one in enumerate(self.hosts.directories) if one is directory)

    @property
    def _home(self) -> Directory:
        return self.hosts.directories[0]

    @property
    def _replicas(self) -> Sequence[Directory]:
        hosts = self.hosts
        return [hosts.directories[number] for number in hosts.replicas]

    def _all(self) -> Sequence[Directory]:
        """In the order in which they are asked: this one, and those after it, the first of which have its replicas."""
        directories, here = self.hosts.directories, self.hosts.here
        return [*directories[here:], *directories[:here]]

    def _order(self, key: str, *, anew: bool = False) -> Sequence[Directory]:
        """The directories that may have the file ``key``, in the order in which they are asked."""
        if self._names.is_hidden(key):
            return self.hosts.directories
        top = top_of(key)
        if anew or top not in self._members:
            self._members[top] = self._members_of(top)
        return self._members[top]

    def _members_of(self, top: str) -> Sequence[Directory]:
        """The hosts whose files in the directory ``top`` are of the newest complete save of that name.

        Those that are away are among them: who does not find a file elsewhere meets their error.
        """
        marks = self._marks(top)
        marked = [(_order_of(done), marker) for marker, done in marks.values() if marker is not None]
        newest = max(marked, key=lambda one: one[0])[1] if marked else None
        directories = self.hosts.directories
        away = [directory for number, directory in enumerate(directories) if number not in marks]
        return [*(directories[number] for number, (marker, _) in marks.items() if marker == newest), *away]

    def _marks(self, top: str) -> dict[int, tuple[bytes | None, bytes | None]]:
        """By host, marker and ``done`` of the directory ``top``; without hosts that are away."""
        keys = [f"{top}/{name}".lstrip("/") for name in (self._names.marker, self._names.done)]
        marks = dict[int, tuple[bytes | None, bytes | None]]()
        for directory in self._all():
            with suppress(ConnectionError, TimeoutError):
                marker, done = directory.peek(keys)
                marks[self._number(directory)] = marker, done
        return marks

    def _listed(self, key: str) -> Sequence[Directory]:
        """The directories that are listed for ``key``."""
        if not key:
            return self._all()
        if not self._names.is_hidden(key):
            return self._order(key, anew=True)
        attempt = "/".join(key.split("/")[:3])
        # What is of this launch is at home, and is looked for again and again.
        if self._names.is_at_home(key) and key.count("/") >= 2 and self._home.is_dir(attempt):
            return [self._home]
        return self._all()

    def _from_first(self, key: str, get: Callable[[Directory], T]) -> T:
        """What ``get`` returns for the first directory that has the file."""
        known, mirrored = top_of(key) in self._members, self._names.is_mirrored(key)
        try:
            return self._first(key, self._order(key, anew=mirrored), get)
        except FileNotFoundError:
            if not known or mirrored or self._names.is_hidden(key):
                raise
        return self._first(key, self._order(key, anew=True), get)  # the name may have got another save since

    def _first(self, key: str, directories: Sequence[Directory], get: Callable[[Directory], T]) -> T:
        """Raises what one that is away raised, where no other has the file."""
        away: Exception | None = None
        if self.distrusted:
            directories = sorted(directories, key=lambda one: (key, self._number(one)) in self.distrusted)
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
        """Whether it holds for any. Raises what one that is away raised where it holds for no other."""
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
    """By which saves of one name are ordered: the number that ``done`` begins with; without one it is not complete."""
    first = (done or b"").partition(b" ")[0]
    return (int(first) if first.isdigit() and len(first) < 20 else -1, done or b"")
