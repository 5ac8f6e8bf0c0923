"""The stand-in for NxD's parallel_state answers as NxD does."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from nxd_ckpt.errors import InvalidArgument
from tests.support.parallel_state import FakeParallelState, installed_parallel_state

pytestmark = [pytest.mark.plain, pytest.mark.once]

NAME = "neuronx_distributed.parallel_layers.parallel_state"


def test_ranks_are_ordered_as_by_nxd() -> None:
    """Ranks are ordered pp outermost, then dp, then tp; ep splits dp and is its faster part."""
    with installed_parallel_state(FakeParallelState(tp=2, pp=2, ep=2, world=16, rank=11)):
        state = importlib.import_module(NAME)
    assert state.model_parallel_is_initialized()
    ranks = (state.get_pipeline_model_parallel_rank(), state.get_data_parallel_rank())
    assert (1, 1, 1) == (*ranks, state.get_tensor_model_parallel_rank())
    assert (4, 2) == (state.get_data_parallel_size(), state.get_expert_data_parallel_size())
    assert (1, 0) == (state.get_expert_model_parallel_rank(), state.get_expert_data_parallel_rank())
    assert [[0, 1], [2, 3]] == state.get_tensor_model_parallel_replica_groups()[:2]
    assert [[0, 2, 4, 6], [1, 3, 5, 7]] == state.get_data_parallel_replica_groups()[:2]
    assert [[0, 8], [1, 9]] == state.get_pipeline_model_parallel_replica_groups()[:2]
    assert [[0, 2], [4, 6]] == state.get_expert_model_parallel_replica_groups()[:2]
    assert [[0, 4], [2, 6]] == state.get_expert_data_parallel_replica_groups()[:2]


def test_trn1_strided_tensor_parallel_groups() -> None:
    """tp = 4 on Trn1 strides; the data-parallel groups follow."""
    with installed_parallel_state(FakeParallelState(tp=4, world=8, rank=5, tp_groups=[[0, 2, 4, 6], [1, 3, 5, 7]])):
        state = importlib.import_module(NAME)
    assert (1, 2) == (state.get_data_parallel_rank(), state.get_tensor_model_parallel_rank())
    assert [[0, 1], [2, 3], [4, 5], [6, 7]] == state.get_data_parallel_replica_groups()


def test_modules_are_as_before_afterwards() -> None:
    """The stand-in is importable inside the context only."""
    before = {name for name in sys.modules if name.startswith("neuronx_distributed")}
    with installed_parallel_state(FakeParallelState(initialized=False)):
        state = importlib.import_module(NAME)
        assert not state.model_parallel_is_initialized()
        with pytest.raises(AssertionError):
            state.get_data_parallel_rank()
    assert before == {name for name in sys.modules if name.startswith("neuronx_distributed")}


@pytest.mark.parametrize("sizes", [{"tp": 3, "world": 4}, {"ep": 3, "world": 4}, {"world": 2, "rank": 2}])
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any]) -> None:
    """The sizes must divide the world."""
    with pytest.raises(InvalidArgument):
        FakeParallelState(**sizes)
