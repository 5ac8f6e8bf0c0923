"""Copies of files from hosts' disks to a lower tier, made by these hosts at rank 0's request.

Rank 0 asks for each piece of a file, so its throttle and its cancelling apply to all hosts. It receives no bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

from nxd_ckpt import effects
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.output.tag_file import TagFile
from nxd_ckpt.output.transfer import Progress
from nxd_ckpt.storage.base import Storage, remove_if
from nxd_ckpt.storage.hosts.storage import HostsStorage

logger = logging.getLogger("nxd_ckpt")


class HostCopies:
    """Copies of a tag's ``files`` to tier number ``tier``. Safe for threads.

    Rank 0 copies at most ``own`` files at once itself.
    """

    def __init__(self, source: HostsStorage, tag: str, files: Sequence[TagFile], tier: int, own: int) -> None:
        self._source, self._tag, self._tier = source, tag, tier
        holders = source.holders([f"{tag}/{file.name}" for file in files])
        self._copier = assign_hosts(files, {file.name: holders[f"{tag}/{file.name}"] for file in files})
        self._left_out = {source.hosts.here}
        self.own_turn = effects.Semaphore(own)

    def side_by_side(self, files: Sequence[TagFile]) -> list[TagFile]:
        """Return the files in an order that keeps all hosts busy: one file of each host, then the next of each."""
        turns, begun = dict[str, int](), Counter[int | None]()
        for file in files:
            copier = self._copier.get(file.name)
            begun[copier] += 1
            turns[file.name] = begun[copier]
        return sorted(files, key=lambda file: turns[file.name])

    def copy(
        self, file: TagFile, target: Storage, folder: str, progress: Progress, confirm: Callable[[], bool]
    ) -> bool:
        """Return True if another host copied the file below ``folder``, and verified it; otherwise none of it is there.

        A host that fails is not asked again. Errors of ``progress`` pass, and of ``confirm``, which is called before a
        failed copy is removed. Raises OSError if ``target`` is not reachable.
        """
        number, key = self._copier.get(file.name), f"{folder}/{file.name}"
        if number is None or file.entry is None or number in self._left_out:
            return False
        try:
            pieces = self._source.copy_out(
                number, f"{self._tag}/{file.name}", self._tier, folder, file.name, file.entry
            )
            with closing(pieces):
                for moved in pieces:
                    progress(moved)
            if target.size(key) == file.nbytes:
                return True
            problem: Exception = OSError(f"{target.url}/{key} is not what the host wrote")
        except (OSError, EOFError, MalformedFile) as error:
            problem = error
        if number not in self._left_out:
            self._left_out.add(number)
            logger.warning(
                "nxd_ckpt: rank 0 copies files of %s itself, instead of host %d: %s", self._tag, number, problem
            )
        remove_if(target, key, confirm)
        return False


def assign_hosts(files: Iterable[TagFile], holders: Mapping[str, Iterable[int]]) -> dict[str, int]:
    """Return the host that copies each file, by name: of its holders, the one with the fewest bytes to copy. Pure."""
    load, chosen = Counter[int](), dict[str, int]()
    for file in sorted(files, key=lambda file: (-file.nbytes, file.name)):
        least = min(sorted(holders[file.name]), key=lambda number: load[number], default=None)
        if least is not None:
            chosen[file.name] = least
            load[least] += file.nbytes
    return chosen
