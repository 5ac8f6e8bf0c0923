"""A stand-in for neuronx-distributed's ``parallel_layers.parallel_state``, for tests that run without it."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from nxd_ckpt.errors import InvalidArgument

_PACKAGE = "neuronx_distributed"
_DIMENSIONS = ("data", "tensor_model", "pipeline_model", "expert_model", "expert_data")


class FakeParallelState:
    """The query functions of NxD's ``parallel_state``, as rank ``rank`` of ``world`` would see them.

    ``get_D_parallel_rank()``, ``get_D_parallel_size()`` and ``get_D_parallel_replica_groups()`` for D in
    data, tensor_model, pipeline_model, expert_model and expert_data, and context_model with ``cp`` above 1; groups hold
    global ranks.

    Args:
        tp, pp, ep, cp, world: sizes; data parallel is what is left of ``world``.
        rank: the global rank that asks.
        tp_groups: the tensor-parallel groups, where they are not runs of ``tp`` consecutive ranks: in order
            of pipeline stage, then data-parallel rank, each in order of tensor-parallel rank. Trn1 with tp =
            4 on 8
            ranks: ``[[0, 2, 4, 6], [1, 3, 5, 7]]``.
        initialized: what ``model_parallel_is_initialized()`` says.

    Source: neuronx-distributed 0.18. Ranks are ordered pp outermost, then dp, then cp, then tp; ep splits dp, ep
    faster.

    Raises:
        InvalidArgument: the sizes or groups do not make up the world.
    """

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        world: int = 1,
        rank: int = 0,
        *,
        tp_groups: Sequence[Sequence[int]] | None = None,
        initialized: bool = True,
        cp: int = 1,
    ) -> None:
        dp, rest = divmod(world, tp * pp * cp)
        if rest or dp < 1 or dp % ep or not 0 <= rank < world:
            raise InvalidArgument(f"rank {rank} of {world} with tp={tp}, pp={pp}, ep={ep}: the sizes do not fit")
        groups = [list(group) for group in tp_groups or [range(i, i + tp) for i in range(0, world, tp)]]
        if sorted(_flat(groups)) != list(range(world)) or any(len(group) != tp for group in groups):
            raise InvalidArgument(f"tp_groups={groups}: expected groups of {tp} that hold {world} ranks once each")
        self._rank = rank
        self._initialized = initialized
        stages = [groups[first : first + dp * cp] for first in range(0, pp * dp * cp, dp * cp)]
        data = [list(ranks) for stage in stages for at in range(cp) for ranks in zip(*stage[at::cp], strict=True)]
        context = [groups[first : first + cp] for first in range(0, pp * dp * cp, cp)]
        self._groups: dict[str, list[list[int]]] = {
            "data": data,
            "tensor_model": groups,
            "pipeline_model": [list(ranks) for ranks in zip(*(_flat(stage) for stage in stages), strict=True)],
            "expert_model": [group[i : i + ep] for group in data for i in range(0, dp, ep)],
            "expert_data": [group[i::ep] for group in data for i in range(ep)],
            "context_model": [list(ranks) for group in context for ranks in zip(*group, strict=True)],
        }
        for dimension in (*_DIMENSIONS, *(["context_model"] if cp > 1 else [])):
            for kind in ("rank", "size", "replica_groups"):
                setattr(self, f"get_{dimension}_parallel_{kind}", self._query(dimension, kind))

    def model_parallel_is_initialized(self) -> bool:
        return self._initialized

    def _query(self, dimension: str, kind: str) -> Callable[[], object]:
        groups = self._groups[dimension]
        mine = next(group for group in groups if self._rank in group)
        answers = {"rank": mine.index(self._rank), "size": len(mine), "replica_groups": groups}

        def query() -> object:
            if not self._initialized:
                raise AssertionError(f"{dimension} parallel group is not initialized")
            return answers[kind]

        return query


def _flat(groups: Sequence[Sequence[int]]) -> list[int]:
    return [rank for group in groups for rank in group]


@contextmanager
def installed_parallel_state(state: FakeParallelState) -> Iterator[FakeParallelState]:
    """Inside, ``neuronx_distributed.parallel_layers.parallel_state`` imports as ``state``."""
    package, layers = ModuleType(_PACKAGE), ModuleType(f"{_PACKAGE}.parallel_layers")
    fake = ModuleType(f"{_PACKAGE}.parallel_layers.parallel_state")
    package.__path__ = layers.__path__ = []  # what makes them packages
    for name in dir(state):
        if not name.startswith("_"):
            setattr(fake, name, getattr(state, name))
    vars(package)["parallel_layers"] = layers
    vars(layers)["parallel_state"] = fake
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] == _PACKAGE}
    _replace_modules({module.__name__: module for module in (package, layers, fake)})
    try:
        yield state
    finally:
        _replace_modules(saved)


def _replace_modules(modules: dict[str, ModuleType]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGE]:
        del sys.modules[name]
    sys.modules.update(modules)
