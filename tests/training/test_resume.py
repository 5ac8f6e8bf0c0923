"""Training on real torch-xla ranks: a resumed run is the same run, on every layout."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BUCKET
from tests.support.rank_pool import RankPool
from tests.support.s3_server import S3Server
from tests.training import scenarios
from tests.training.model import Setup

pytestmark = pytest.mark.xla

XSER = (("use_xser", True),)
ASYNC = (("async_save", True),)
LEFT_OUT = (*XSER, ("avoid_saving_lower_precision_weights", True))


def setup(name: str, soak: bool = False, **fields: Any) -> Any:
    """A run; those whose options others cover between them are left to ``make soak``."""
    sizes = {part[:2]: int(part[2:]) for part in name.split("_")}
    identifier = name + "".join(f"-{key}={value}" for key, value in fields.items())
    return pytest.param(Setup(tuple(sizes.items()), **fields), id=identifier, marks=[pytest.mark.soak] if soak else [])


@pytest.mark.parametrize(
    "what",
    [
        setup("dp4", soak=True),
        setup("dp4", options=XSER + ASYNC, unused=True),
        setup("dp2_tp2", dtype="bfloat16", options=ASYNC, soak=True),
        setup("dp2_tp2", dtype="bfloat16", options=XSER, soak=True),
        setup("dp2_tp2", master_weights=False, options=XSER + ASYNC, zero_grad_first=True, soak=True),
        setup("dp2_pp2", options=(*ASYNC, ("use_zero1_dcp", True)), dropout=0.5),
        setup("tp4", dtype="bfloat16", options=XSER + ASYNC, dropout=0.25),
        setup("tp4", zero1=False, options=XSER, soak=True),
        setup("dp4_ep2", options=ASYNC, soak=True),
        setup("dp4_ep2", dtype="bfloat16", options=XSER, zero_grad_first=True, soak=True),
        setup("dp2_tp2_ep2", zero1=False, options=XSER + ASYNC),
        setup("dp2_tp2_ep2", zero1=False, unused=True, soak=True),
        setup("dp2_tp2", dtype="bfloat16", options=LEFT_OUT, soak=True),
        setup("dp4_ep2", dtype="bfloat16", options=LEFT_OUT, zero_grad_first=True),
    ],
)
def test_a_resumed_run_is_the_same_run(xla_ranks: RankPool, tmp_path: Path, what: Setup) -> None:
    """Save, start again from another seed, load: state and all later losses are equal to the last bit."""
    problems = xla_ranks.run(scenarios.resume_equals_uninterrupted, str(tmp_path / "ckpt"), what, 99)
    assert [[]] * 4 == problems


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ASYNC, id="async", marks=pytest.mark.soak),
        pytest.param(XSER, id="xser", marks=pytest.mark.soak),
        pytest.param(XSER + ASYNC, id="both"),
    ],
)
def test_a_run_resumes_from_a_store(xla_ranks: RankPool, s3_server: S3Server, options: Any) -> None:
    """As from a directory, to the last bit; the store is found as boto3 finds it, in the environment."""
    what = Setup((("dp", 2), ("tp", 2)), dtype="bfloat16", options=options)
    url = f"s3://{BUCKET}/resume-{uuid.uuid4().hex}"
    problems = xla_ranks.run(scenarios.resume_from_a_store, url, s3_server.environment, what, 99)
    assert [[]] * 4 == problems
    assert [] == s3_server.unfinished(BUCKET)


def test_a_load_filters_and_renames(xla_ranks: RankPool, s3_server: S3Server, tmp_path: Path) -> None:
    """What is left out stays on every rank, shards of weights too; the rest is what was saved, to the last bit."""
    what = Setup((("dp", 2), ("tp", 2)), dtype="bfloat16")
    url = f"s3://{BUCKET}/filters-{uuid.uuid4().hex}"
    arguments = (url, s3_server.environment, what, str(tmp_path))
    assert [[]] * 4 == xla_ranks.run(scenarios.filtered_from_a_store, *arguments)


def test_saving_and_loading_compile_nothing(xla_ranks: RankPool, tmp_path: Path) -> None:
    """The compile counter is flat over a second save, over a load, and over the step after it."""
    what = Setup((("dp", 2), ("tp", 2)), dtype="bfloat16")
    counts = xla_ranks.run(scenarios.compile_counts, str(tmp_path / "ckpt"), what)
    for before, after_save, before_load, after_load, after_step in counts:
        assert (before, before_load, before_load) == (after_save, after_load, after_step)


def test_the_first_step_after_a_load_is_a_step_like_any_other(xla_ranks: RankPool, tmp_path: Path) -> None:
    """Its graph is the one that the uninterrupted run compiled, although new constants wait on the device."""
    what = Setup((("dp", 2), ("tp", 2)), constant=True)
    counts = xla_ranks.run(scenarios.compile_counts_of_new_objects, str(tmp_path / "ckpt"), what)
    for after_load, after_step in counts:
        assert after_load == after_step


def test_what_is_saved_is_the_state_at_the_call(xla_ranks: RankPool, tmp_path: Path) -> None:
    """Parameters, moments and step may change right after an async save returned."""
    what = Setup((("dp", 2), ("tp", 2)), options=XSER)
    problems = xla_ranks.run(scenarios.snapshot_is_of_the_call, str(tmp_path / "ckpt"), what)
    assert [[]] * 4 == problems
