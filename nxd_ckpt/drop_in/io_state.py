"""A stand-in for ``g_iostate``, NxD's record of the saves under way, through which programs wait and remove."""

from __future__ import annotations

from collections.abc import Sequence

from nxd_ckpt import api
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.effects import Event
from nxd_ckpt.storage.urls import StrPath


class IOState:
    """The methods of NxD's ``CheckpointIOState`` that programs call from outside, for the directory saved to last."""

    def __init__(self) -> None:
        self._place: tuple[StrPath, Topology | None] | None = None
        self._removals: list[Event] = []

    def saved(self, directory: StrPath, topology: Topology | None) -> None:
        """Note the directory of a save."""
        self._place = directory, topology

    def wait_save(self, async_remove: bool = True) -> None:
        """Wait until the saves in flight are complete; raise the first failure that was not raised before."""
        api.finalize_checkpoint()

    def wait_remove(self) -> None:
        """Wait until the removals so far have been made, or put off."""
        while self._removals:
            self._removals.pop(0).wait()

    def wait_all(self) -> None:
        """Wait for saves and removals."""
        self.wait_save()
        self.wait_remove()

    def submit_remove(
        self, num_kept: int | None, async_remove: bool = True, remove_tags: Sequence[str] | None = None
    ) -> None:
        """Remove tags behind the save in flight, which is not waited for; one that does not exist is no error.

        Without ``async_remove`` this call waits for the removal. Without ``remove_tags`` there is nothing to do: each
        save removes what its own ``num_kept_ckpts`` says.
        """
        if not remove_tags or self._place is None:
            return
        directory, topology = self._place
        done = api.remove_later(directory, list(remove_tags), topology)
        if done is not None:
            self._removals.append(done)
        if not async_remove:
            self.wait_remove()
