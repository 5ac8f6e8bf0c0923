"""A directory with a state dict of model and optimizer, read as a tag that a single rank saved.

``torch.distributed.checkpoint.save`` writes such directories, and so do OLMo-core's ``save_model_and_optim_state`` and
torch_checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nxd_ckpt.core.dcp_names import MASTER_WEIGHTS, DcpNames
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign.dcp_tensors import DcpTensors
from nxd_ckpt.tag.foreign.dcp_trees import DcpTrees, Entries
from nxd_ckpt.tag.foreign.rank_items import RankItems, is_present
from nxd_ckpt.tag.foreign.torch_dcp import METADATA, DcpFiles
from nxd_ckpt.tag.state_dicts import reading


def entries_of(files: TagFiles) -> DcpTensors | RankItems:
    """Return the entries of a directory of torch DCP or of torch_checkpointing. Raises the errors of opening it."""
    names = files.names()
    return RankItems(files) if METADATA not in names and is_present(names) else DcpTensors(files, DcpFiles())


class DcpDirectory:
    """Layout (`TagLayout`) of the directory in ``files``, whose state dict has these ``entries``.

    Without ``names`` the optimizer is under "optim" or "optimizer", whichever exists. The model is under "model"; if
    there is none, it is the tensors at the top, as with TorchTitan.
    """

    def __init__(self, files: TagFiles, entries: Entries, names: DcpNames | None = None) -> None:
        self.files = files
        self._tensors = entries
        self._trees = DcpTrees(self._tensors, names or _usual_names(self._tensors.names))

    def topology(self) -> Topology:
        return Topology()

    def parts(self) -> Parts:
        return Parts(
            model=bool(self._trees.model),
            optimizer="zero1_full" if self._trees.has_optimizer else None,
            scheduler=self._trees.has_scheduler,
            user_content=self._trees.has_content,
            master_weights=any(MASTER_WEIGHTS in keys for keys in self._trees.states.values()),
        )

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        return self._trees.model_tree()

    @reading
    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        states: dict[int, dict[str, Any]] = {}
        masters: dict[int, Any] = {}
        names = self._trees.parameters
        for index, parameter in enumerate(names):
            entries = self._trees.state(parameter)
            if MASTER_WEIGHTS in entries:
                masters[index] = entries.pop(MASTER_WEIGHTS)
            if entries:
                states[index] = entries
        tree: dict[str, Any] = {
            "state": {},
            "param_groups": self._trees.numbered_groups(),
            "base_state": states,
            "shape_info": {index: torch.Size(self._shape(parameter)) for index, parameter in enumerate(names)},
        }
        return tree | ({"sharded_master_weights": masters} if masters else {})

    @reading
    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        """Return the parameters by index; None if the optimizer's own state dict was saved, which has numbers."""
        names = self._trees.parameters
        return None if names and all(map(str.isdecimal, names)) else names

    @reading
    def scheduler(self) -> Any:
        return self._trees.scheduler()

    @reading
    def user_content(self) -> Any:
        return self._trees.content()

    def _shape(self, parameter: str) -> tuple[int, ...]:
        """Return the whole shape of a parameter: the model's, else that of its largest entry."""
        for names in (self._trees.model.get(parameter, {}).values(), self._trees.states.get(parameter, {}).values()):
            forms = [form for form in map(self._tensors.form, names) if form is not None]
            if forms:
                return max((form.shape for form in forms), key=len)
        return ()


def _usual_names(names: Iterable[str]) -> DcpNames:
    keys = {name.partition(".")[0] for name in names}
    optim = "optimizer" if "optimizer" in keys and "optim" not in keys else "optim"
    return DcpNames(model="model" if "model" in keys else "", optim=optim)
