"""Loading: validate everything on all ranks, agree, then change live state; model before optimizer.

The optimizer comes second because shards without saved master weights are cut from the model's *loaded* parameters.
Nothing is kept in memory between the two phases but where the bytes lie: what is verified first is read again then,
mostly from the page cache.
"""

from __future__ import annotations

from typing import Any

import torch

from nxd_ckpt.adapters.model import ModelAdapter
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import IncompatibleState, PartNotFound, RanksDisagree
from nxd_ckpt.formats.tensors import Assembly, TensorStub
from nxd_ckpt.runtime.agreement import Agreement, Alone, decided_by_rank0, on_all
from nxd_ckpt.runtime.load_options import LoadOptions
from nxd_ckpt.runtime.load_trees import open_trees
from nxd_ckpt.runtime.opening import OpenTag, choose_tag, open_complete_tag
from nxd_ckpt.runtime.reading import Leaf
from nxd_ckpt.storage.base import Storage


def load(
    storage: Storage,
    topology: Topology,
    agreement: Agreement | None,
    tag: str | None,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    options: LoadOptions,
) -> Any:
    """Load what is not None, and return the user content or None. See Checkpointer.load."""
    agreement = agreement or Alone()
    asked = agreement.gather(tag)
    chosen: str = decided_by_rank0(agreement, lambda: choose_tag(storage, _same_on_all(asked)))

    def prepare() -> _Prepared:
        opened = open_complete_tag(storage, chosen, trust_pickle=options.trust_pickle)
        return _Prepared(opened, topology, model, optimizer, scheduler, options)

    prepared = on_all(agreement, prepare)
    on_all(agreement, prepared.apply)
    return prepared.user_content


class _Prepared:
    """A load that has been validated in full: :meth:`apply` only copies."""

    def __init__(
        self, opened: OpenTag, topology: Topology, model: Any, optimizer: Any, scheduler: Any, options: LoadOptions
    ) -> None:
        self._opened, self._topology, self._options = opened, topology, options
        self._scheduler = scheduler
        _demand(opened, model, optimizer, scheduler)
        self._trees = open_trees(opened, topology, model, optimizer, options)
        self._scheduler_state = opened.scheduler() if scheduler is not None else None
        self.user_content = opened.user_content()
        self._rank_content = None if options.rank_content is None else self._own_content()
        self._reader = opened.reader()
        if options.verify:
            self._verify()

    def apply(self) -> None:
        """Change the live objects."""
        model, optimizer = self._trees.model, self._trees.optimizer
        if model is not None:
            for name in self._trees.names:
                self._assign(model, name, self._trees.model_tree[name])
        if optimizer is not None:
            optimizer.load(self._trees.optimizer_tree, self._read)
        if isinstance(self._scheduler, dict):
            self._scheduler.clear()
            self._scheduler.update(self._scheduler_state or {})
        elif self._scheduler is not None:
            self._scheduler.load_state_dict(self._scheduler_state)
        if self._options.rank_content is not None and self._rank_content is not None:
            self._options.rank_content.clear()
            self._options.rank_content.update(self._rank_content)

    def _own_content(self) -> dict[Any, Any]:
        content = self._opened.rank_content(self._topology.rank)
        if not isinstance(content, dict):
            raise IncompatibleState(
                f"{self._opened.where}: rank_content= fills a dict, but rank {self._topology.rank} saved a "
                f"{type(content).__name__}; read it with open_checkpoint(...).rank_content({self._topology.rank})"
            )
        return content

    def _verify(self) -> None:
        """Read every byte that will be loaded once, before anything changes."""
        for name, leaf in self._trees.leaves():
            self._reader.prove(leaf, name)

    def _assign(self, model: ModelAdapter, name: str, leaf: Any) -> None:
        if not isinstance(leaf, (TensorStub, Assembly)):
            model.assign(name, leaf)
            return
        destination = model.destination(name)
        if destination is None:
            model.assign(name, self._read(leaf))
        else:
            self._reader.read_into(leaf, destination, f"model/{name}", proved=self._options.verify)

    def _read(self, leaf: Leaf) -> torch.Tensor:
        return self._reader.read(leaf, self._trees.name_by_leaf[id(leaf)], proved=self._options.verify)


def _demand(opened: OpenTag, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Raise PartNotFound for what is asked for, but was never saved."""
    parts = opened.parts
    for wanted, held, name in (
        (model is not None, parts.model, "model"),
        (optimizer is not None, parts.optimizer is not None, "optimizer"),
        (scheduler is not None, parts.scheduler, "scheduler"),
    ):
        if wanted and not held:
            raise PartNotFound(
                f"{opened.where} was saved without {name}; it holds {parts_held(parts)}. "
                f"Load it with {name}=None, or choose another tag"
            )


def _same_on_all(asked: list[str | None] | None) -> str | None:
    """The tag that every rank asked for. Raises RanksDisagree."""
    tags = asked or [None]
    for rank, tag in enumerate(tags):
        if tag != tags[0]:
            raise RanksDisagree(f"rank 0 loads tag {tags[0]!r}, rank {rank} {tag!r}; all ranks must load the same")
    return tags[0]


def parts_held(parts: Any) -> str:
    """What a tag holds, in words."""
    held = [name for name in ("model", "optimizer", "scheduler", "user_content") if getattr(parts, name)]
    return ", ".join(held) or "nothing"
