"""One ``torch.save`` file with a whole checkpoint, as ``xm.save`` writes it. Only read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.formats.tensors import TensorStub, map_tensors
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.payload import MODEL_KEYS, OPTIMIZER_KEYS, SCHEDULER_KEYS, Payload
from nxd_ckpt.tag.state_dicts import checked_model, checked_optimizer, reading


class PayloadFile:
    """Layout (`TagLayout`) of a single rank's checkpoint, whose ``payload`` is in ``file``."""

    def __init__(self, files: TagFiles, file: str, payload: Payload) -> None:
        self.files, self.where, self._payload = files, files.where(file), payload

    def topology(self) -> Topology:
        return Topology()

    @reading
    def parts(self) -> Parts:
        optimizer = self._payload.optimizer
        return Parts(
            model=self._payload.model is not None,
            optimizer=None if optimizer is None else "zero1" if "base_state" in optimizer else "plain",
            scheduler=self._payload.scheduler is not None,
            user_content=bool(self._rest),
            master_weights=optimizer is not None and "sharded_master_weights" in optimizer,
        )

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        return checked_model(self._required(self._payload.model, MODEL_KEYS), self.where)

    @reading
    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        return checked_optimizer(self._required(self._payload.optimizer, OPTIMIZER_KEYS), self.where)

    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        return None

    @reading
    def scheduler(self) -> Any:
        return self._read(self._required(self._payload.scheduler, SCHEDULER_KEYS))

    @reading
    def user_content(self) -> Any:
        """Return everything else in the file: step, epoch, arguments."""
        return self._read(self._rest)

    @property
    def _rest(self) -> dict[str, Any]:
        return self._payload.rest

    def _read(self, tree: Any) -> Any:
        return map_tensors(tree, self.files.read, TensorStub)

    def _required(self, part: dict[str, Any] | None, keys: tuple[str, ...]) -> dict[str, Any]:
        if part is None:
            raise PartNotFound(f"{self.where} has nothing under {' or '.join(keys)}; found keys {self._payload.keys}")
        return part
