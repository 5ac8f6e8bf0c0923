"""What each rank saved for itself is no rank's alone in Hugging Face's names: who needs it refuses it by name."""

from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import Checkpointer, convert, open_checkpoint
from nxd_ckpt.errors import IncompatibleState
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import live, write_config
from tests.support.rank_pool import RankPool

KINDS = {
    "learning rate": "optim/param_groups/0/lr",
    "moments": "optim/lm_head.weight/exp_avg",
    "parameters": "optim",
    "master weights": "optim/lm_head.weight/master_weights",
    "scheduler": "scheduler/epoch",
}
"""What differs between the ranks, and the name of it."""

WITH_OPTIMIZER: list[dict[str, Any]] = [
    {"to": "hf", "optimizer": True},
    {"to": "torchtitan"},
    {"to": "files", "names": "hf"},
]
WITH_ALL: list[dict[str, Any]] = [{"to": "tag", "names": "hf"}, {"to": "dcp", "names": "hf"}]
MODEL: list[dict[str, Any]] = [
    {"to": "hf"},
    {"to": "hf", "master_weights": True},
    *({"to": form, "names": "hf", "optimizer": False} for form in ("torchtitan", "files", "tag", "dcp")),
]


def saves(rank: int, directory: Path) -> None:
    model = live(Job(Model()).model.state())
    names = [name for name, _ in model.named_parameters()]
    for kind in KINDS:
        own = {key: float(key == kind and rank) for key in KINDS}
        moments = [each.detach() + own["moments"] for each in model.parameters()]
        state: dict[str, Any] = {
            "state": {index: {"step": 1, "exp_avg": each} for index, each in enumerate(moments)},
            "param_groups": [{"lr": 1 + own["learning rate"], "params": [*range(len(names))]}],
            "sharded_master_weights": {
                index: each.detach().float() + own["master weights"] for index, each in enumerate(model.parameters())
            },
        }
        held = names
        if own["parameters"]:
            held = names[1:]
            state["param_groups"][0]["params"].pop()
            for entries in (state["state"], state["sharded_master_weights"]):
                entries.pop(len(held))
        with Checkpointer(directory / kind) as checkpointer:
            checkpointer.save(1, model, state, {"epoch": own["scheduler"]}, param_names=[held])


@pytest.fixture(scope="module")
def runs(gloo_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    gloo_ranks.run(saves, directory)
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_is_refused_where_it_is_needed(runs: Path, tmp_path: Path, kind: str) -> None:
    """The optimizer and the scheduler of rank 0 were taken for those of all, without a word."""
    config = write_config(tmp_path / "config", Job(Model()).model.config)
    refused = WITH_ALL if kind == "scheduler" else [*WITH_ALL, *WITH_OPTIMIZER]
    for form in refused:
        with pytest.raises(IncompatibleState, match=f": .*{KINDS[kind]}.* differed between the ranks"):
            convert(runs / kind / "step_1", tmp_path / "refused", config=config, **form)
    assert not (tmp_path / "refused").exists()
    fitting = [*MODEL, *(WITH_OPTIMIZER if kind == "scheduler" else [])]
    for number, form in enumerate(fitting):
        convert(runs / kind / "step_1", tmp_path / str(number), config=config, **form)
    convert(runs / kind / "step_1", tmp_path / "own", to="files", optimizer=False)


def test_each_ranks_scheduler_can_be_read(runs: Path) -> None:
    checkpoint = open_checkpoint(runs / "scheduler")
    assert [{"epoch": 0.0}, {"epoch": 1.0}] == [checkpoint.scheduler_state(rank) for rank in range(2)]
