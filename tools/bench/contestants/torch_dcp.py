"""torch.distributed.checkpoint: save, async_save and load, on a flat dict of the live tensors.

That is its shortest way: it loads in place, and nothing has to be put back into a module or an optimizer.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from tools.bench.contestants.contract import ASYNCS, LOADS, SAVES, Contestant, Pending
from tools.bench.host import make_durable
from tools.bench.results import ASYNC, SAVE
from tools.bench.workloads import State
from tools.bench.world import World

OWN_SYNC = "fsync of its files by its own sync_files, of the directory by the benchmark"


class PendingDcp:
    """Its future says that files are synced; the directory is left to do."""

    def __init__(self, future: Future[Any], path: Path, leads: bool) -> None:
        self._future, self._path, self._leads = future, path, leads

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()
        if self._leads:
            make_durable(self._path)


class TorchDcp(Contestant):
    """As its documentation shows it."""

    measures = SAVES | ASYNCS | LOADS
    notes = MappingProxyType({SAVE: OWN_SYNC, ASYNC: OWN_SYNC})

    def save(self, durable: bool) -> None:
        path = self.next_path()
        save(self.state.host(), storage_writer=FileSystemWriter(path, sync_files=durable))
        if durable and self.leads:
            make_durable(path)

    def save_async(self) -> Pending:
        path = self.next_path()
        return self._pending(async_save(self.state.host(), checkpoint_id=path), path)

    def load(self, how: str) -> None:
        # Its reader wants CPU tensors to copy to; for others it would move each one there and back.
        host = self.state.host()
        load(host, storage_reader=FileSystemReader(self.path))
        if self.state.device.type != "cpu":
            self.state.fill(host)
            self.state.settle()

    def _pending(self, started: Any, path: Path) -> PendingDcp:
        future = getattr(started, "upload_completion", started)
        return PendingDcp(future, path, self.leads)


class CachedStaging(TorchDcp):
    """async_save with a stager that is kept, so that it reuses its memory: the best that it can be told to do."""

    measures = ASYNCS

    def __init__(self, name: str, state: State, directory: Path, world: World) -> None:
        super().__init__(name, state, directory, world)
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)

    def save_async(self) -> Pending:
        path = self.next_path()
        return self._pending(
            async_save(self.state.host(), checkpoint_id=path, async_stager=self._stager), path
        )

    def close(self) -> None:
        self._stager.close()


def contestants(state: State, directory: Path, world: World) -> list[Contestant]:
    kinds = {"torch DCP": TorchDcp, "torch DCP, cached staging": CachedStaging}
    return [kind(name, state, directory, world) for name, kind in kinds.items()]
