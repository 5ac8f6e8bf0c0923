"""Loading: validate everything on all ranks, agree, then change live state; model before optimizer.

The optimizer comes second because shards without saved master weights are cut from the model's *loaded* parameters.
Nothing is kept in memory between the two phases but where the bytes lie: what is verified first is read again then,
mostly from the page cache.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.adapters.model import ModelAdapter, open_model
from nxd_ckpt.adapters.optimizer import OptimizerAdapter, open_optimizer
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import IncompatibleState, PartNotFound, RanksDisagree, TopologyMismatch
from nxd_ckpt.formats.tensors import TensorStub, iter_tensors
from nxd_ckpt.layout.files import MissingTensor
from nxd_ckpt.runtime.agreement import Agreement, Alone, decided_by_rank0, on_all
from nxd_ckpt.runtime.master_weights import MasterWeight, find_master_weights
from nxd_ckpt.runtime.opening import OpenTag, choose_tag, open_complete_tag
from nxd_ckpt.storage.base import Storage

logger = logging.getLogger("nxd_ckpt")


@dataclass(frozen=True)
class LoadOptions:
    """How to load; names, defaults and meaning as in neuronx_distributed's ``load_checkpoint`` where it has them.

    Attributes:
        strict: names that are missing or unexpected in the model are an error, else they are skipped with a warning.
        num_workers: accepted for the sake of existing scripts; every rank reads its own files at once.
        use_zero1_dcp: accepted likewise; the format is detected.
        param_names: the optimizer's parameter names, per group in order, where they cannot be known otherwise.
        rank_content: an empty dict, filled with what this rank saved as ``rank_content``.
        verify: prove the digests of all bytes before anything is changed.
        trust_pickle: unpickle objects of any class. Only for checkpoints from sources you trust like your own code.
    """

    strict: bool = True
    num_workers: int | None = 8
    use_zero1_dcp: bool = False
    param_names: Sequence[Sequence[str]] | None = None
    rank_content: dict[Any, Any] | None = None
    verify: bool = True
    trust_pickle: bool = False


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
        self._model: ModelAdapter | None = None if model is None else open_model(model)
        self._optimizer: OptimizerAdapter | None = None
        self._scheduler = scheduler
        self._model_tree: Mapping[str, Any] = {}
        self._optimizer_tree: dict[str, Any] = {}
        self._names: list[str] = []
        self._demand(model, optimizer, scheduler)
        _same_topology(opened, topology, optimizer is not None)
        if optimizer is not None:
            self._optimizer = open_optimizer(
                optimizer,
                model=self._model,
                param_names=options.param_names,
                zero1_optimizer=opened.parts.optimizer != "plain",
                topology=topology,
            )
            names = self._optimizer.parameter_names or _flat(options.param_names)
            self._optimizer_tree = opened.optimizer_tree(topology.coordinates, names)
            self._optimizer.validate(self._optimizer_tree)
        if self._model is not None:
            self._model_tree = self._whole_model(self._model)
            self._names = self._model.validate(self._model_tree, options.strict)
        self._scheduler_state = opened.scheduler() if scheduler is not None else None
        self.user_content = opened.user_content()
        self._rank_content = None if options.rank_content is None else self._own_content()
        if options.verify:
            self._verify()

    def apply(self) -> None:
        """Change the live objects."""
        for name in self._names:
            self._assign(name, self._model_tree[name])
        if self._optimizer is not None:
            self._optimizer.load(self._optimizer_tree, self._read)
        if isinstance(self._scheduler, dict):
            self._scheduler.clear()
            self._scheduler.update(self._scheduler_state or {})
        elif self._scheduler is not None:
            self._scheduler.load_state_dict(self._scheduler_state)
        if self._options.rank_content is not None and self._rank_content is not None:
            self._options.rank_content.clear()
            self._options.rank_content.update(self._rank_content)

    def _demand(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Raise PartNotFound for what is asked for, but was never saved."""
        parts = self._opened.parts
        for wanted, held, name in (
            (model is not None, parts.model, "model"),
            (optimizer is not None, parts.optimizer is not None, "optimizer"),
            (scheduler is not None, parts.scheduler, "scheduler"),
        ):
            if wanted and not held:
                raise PartNotFound(
                    f"{self._opened.where} was saved without {name}; it holds {parts_held(parts)}. "
                    f"Load it with {name}=None, or choose another tag"
                )

    def _whole_model(self, model: ModelAdapter) -> dict[str, Any]:
        """The model's tree, with weights that were left out taken from the optimizer's master weights."""
        tree = self._opened.model_tree(self._topology.coordinates)
        missing = [name for name, leaf in tree.items() if isinstance(leaf, MissingTensor)]
        if not missing:
            return tree
        parts = self._opened.parts
        if parts.lower_precision_weights or not parts.master_weights:
            raise PartNotFound(
                f"{self._opened.where}: {tree[missing[0]].file} (model, {missing[0]}) is missing, with "
                f"{len(missing) - 1} more: the tag lost files since it was saved; load another one"
            )
        names = self._optimizer.parameter_names if self._optimizer is not None else None
        names = _flat(self._options.param_names) or names
        found = find_master_weights(self._opened, self._topology, missing, names, model)
        lost = [name for name in missing if name not in found]
        if lost and self._options.strict:
            first: MissingTensor = tree[lost[0]]
            raise PartNotFound(
                f"{self._opened.where}: no file holds {', '.join(lost[:5])} ({len(lost)} tensors; {first.file} is "
                "missing) and no master weights stand for them. Pass the live model and optimizer, or param_names=, "
                "so that master weights can be matched by name; strict=False leaves those tensors as they are"
            )
        if lost:
            logger.warning("%s: not restored, no file holds them: %s", self._opened.where, ", ".join(lost))
        return {name: found.get(name, leaf) for name, leaf in tree.items() if name not in lost}

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
        named = [(f"model/{name}", self._model_tree[name]) for name in self._names]
        named += [("optim/" + ".".join(map(str, path)), leaf) for path, leaf in iter_tensors(self._optimizer_tree)]
        proved: set[tuple[str, int]] = set()
        for name, leaf in named:
            for stub in leaf.stubs if isinstance(leaf, MasterWeight) else [leaf]:
                if isinstance(stub, TensorStub) and (stub.file, stub.storage.offset) not in proved:
                    proved.add((stub.file, stub.storage.offset))
                    self._opened.verify(stub, name)

    def _assign(self, name: str, leaf: Any) -> None:
        model = self._model
        if model is None:
            return
        destination = model.destination(name) if isinstance(leaf, TensorStub) else None
        if destination is not None:
            self._opened.read_into(leaf, destination, f"model/{name}")
        else:
            model.assign(name, self._read(leaf))

    def _read(self, leaf: Any) -> Any:
        if isinstance(leaf, TensorStub):
            return self._opened.read(leaf)
        return leaf.read(self._opened.read) if isinstance(leaf, MasterWeight) else leaf


def _same_on_all(asked: list[str | None] | None) -> str | None:
    """The tag that every rank asked for. Raises RanksDisagree."""
    tags = asked or [None]
    for rank, tag in enumerate(tags):
        if tag != tags[0]:
            raise RanksDisagree(f"rank 0 loads tag {tags[0]!r}, rank {rank} {tag!r}; all ranks must load the same")
    return tags[0]


def _flat(param_names: Sequence[Sequence[str]] | None) -> list[str] | None:
    return None if param_names is None else [name for group in param_names for name in group]


def parts_held(parts: Any) -> str:
    """What a tag holds, in words."""
    held = [name for name in ("model", "optimizer", "scheduler", "user_content") if getattr(parts, name)]
    return ", ".join(held) or "nothing"


def _same_topology(opened: OpenTag, live: Topology, with_optimizer: bool) -> None:
    """Raise TopologyMismatch where this rank's files are not simply those of its coordinates."""
    saved = opened.topology
    same = (saved.tp, saved.pp, saved.ep) == (live.tp, live.pp, live.ep)
    # Model files do not depend on dp, nor does a plain optimizer; ZeRO-1 shards do.
    if same and (saved.dp == live.dp or not (with_optimizer and opened.parts.optimizer != "plain")):
        return
    raise TopologyMismatch(
        f"{opened.where} was saved on {saved.describe()}, but is loaded on {live.describe()}; load it on the sizes "
        "that it was saved on"
    )
