"""What is left out on one rank, name by name, and where the rest is found; and what ranks compare, to see that they
leave out the same."""

from typing import Any

import pytest
import torch

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS
from nxd_ckpt.live.ignoring import Ignoring, digest
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.loading.filters import Filter
from nxd_ckpt.loading.options import LoadOptions

NAMES = ["model/a", "model/b", "optim/a/exp_avg", "scheduler", "user_content/steps"]


class Tied(torch.nn.Module):
    """One tensor with two names, and one with one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight


def chose(*names: str, among: list[str] = NAMES) -> list[str] | None:
    ignoring = Ignoring(lambda known: names)
    ignoring.choose(among)
    return ignoring.choice


def test_ranks_see_whether_they_chose_alike() -> None:
    """Of the model and the optimizer, in any order; each has content of its own."""
    assert chose("model/a", "model/b") == chose("model/b", "model/a", among=NAMES[::-1])
    assert chose("model/a") == chose("model/a", "scheduler", "user_content/steps", among=[*NAMES, "rank_content/x"])
    one, other, more = chose("model/a"), chose("optim/a/exp_avg"), chose("model/a", among=[*NAMES, "model/c"])
    assert one is not None
    assert other is not None
    assert more is not None
    assert [one[0], True] == [other[0], one[1] != other[1]]
    assert [one[1], True] == [more[1], one[0] != more[0]]


def test_globs_are_no_choice() -> None:
    """They are compared as they are."""
    ignoring = Ignoring(["model/a"])
    ignoring.choose(NAMES)
    assert ignoring.choice is None


def test_digests_tell_values_apart() -> None:
    """Equal values have equal ones."""
    assert digest(["a", 1]) == digest(["a", 1])
    assert 3 == len({digest(["a", 1]), digest(["a", 2]), digest([])})


@pytest.mark.parametrize("content", [None, 7, ["steps"]])
def test_content_without_keys_stays_as_it_is(content: Any) -> None:
    """Nothing of it has a name."""
    assert content == Ignoring(["user_content/*"]).pruned("user_content", content)


def test_what_is_said_of_one_tied_name_is_said_of_all() -> None:
    """Of the model's tensor, of its state in the optimizer, and of no other part."""
    ignoring = Ignoring(["model/first.weight", "optim/first.weight", "user_content/first.weight", "scheduler"])
    parts, tied = ("model", "optim", "user_content"), ("first.weight", "second.weight")
    names = [f"{part}/{name}" for part in parts for name in tied]
    apart = [True, False, True, False, True, False]
    assert apart == [ignoring.ignores(name) for name in names]
    ignoring.know_ties(open_model(Tied()))
    assert [True, True, True, True, True, False] == [ignoring.ignores(name) for name in names]
    assert [True, True] == [ignoring.covers("optim/second.weight"), ignoring.ignores("optim/second.weight/exp_avg")]
    assert [True, False] == [ignoring.ignores("scheduler"), ignoring.ignores("model/second.bias")]


def test_the_whole_of_a_part_is_no_tensor() -> None:
    """"model" and "optim" have no alias."""
    ignoring = Ignoring(["optim"])
    ignoring.know_ties(open_model(Tied()))
    assert [True, True, False] == [ignoring.ignores("optim"), ignoring.covers("optim"), ignoring.ignores("model")]


def test_a_choice_that_is_no_list_of_names_is_refused() -> None:
    """InvalidArgument: a text is not taken for a list of letters."""
    ignoring = Ignoring(lambda names: "model/a")
    with pytest.raises(InvalidArgument, match="expected the names to leave out"):
        ignoring.choose(NAMES)


def test_a_name_from_before_a_wrapper_is_looked_for_where_the_tag_has_only_that() -> None:
    """Not where the tag has the live name, or key_mapping says another; the prefix stands before it."""
    base_names = {"x.base.weight": "x.weight", "y.base.weight": "y.weight", "z.base.weight": "z.weight", "w": "v"}
    filtered = Filter(LoadOptions(key_mapping={"z.base.weight": "other"}, prefix="net."))
    filtered.know_base_names(base_names, ["net.x.weight", "net.y.weight", "net.y.base.weight", "net.z.weight", "v"])
    found = {live: filtered.renaming.saved(live) for live in base_names}
    assert {
        "x.base.weight": "net.x.weight",
        "y.base.weight": "net.y.base.weight",
        "z.base.weight": "other",
        "w": "net.w",
    } == found


def test_a_shard_is_left_out_with_its_weight_once_there_are_shards() -> None:
    """Its other state is not."""
    filtered = Filter(LoadOptions(ignore_keys=["model/a"]))
    shard, average = f"optim/a/{MASTER_WEIGHTS}", "optim/a/exp_avg"
    assert [False, False] == [filtered.ignores(name) for name in (shard, average)]
    filtered.know_shards()
    assert [True, False] == [filtered.ignores(name) for name in (shard, average)]
    assert not filtered.ignores(f"optim/b/{MASTER_WEIGHTS}")


def test_a_shard_that_is_left_out_follows_the_weights_that_are_loaded() -> None:
    """One without a name follows any; all other state is kept."""
    filtered = Filter(LoadOptions(ignore_keys=["optim/*"]))
    names = [f"optim/{parameter}/{entry}" for parameter in ("a", "b", "#3") for entry in (MASTER_WEIGHTS, "exp_avg")]
    keeps, keeps_all = filtered.keeps(["a"]), filtered.keeps([])
    assert [False, True, True, True, False, True] == [keeps(name) for name in names]
    assert [True] * 6 == [keeps_all(name) for name in names]
