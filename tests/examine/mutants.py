"""What broken saves and resumes do to a tag: each changes one thing in what the ranks of a job hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.examine.runs import Rank

STEPS = 10, 13

Mutant = Callable[[list[Rank], list[Rank]], None]
"""Changes the latter, what the ranks hold now; the former is what they held before."""


def stale_weight(before: list[Rank], now: list[Rank]) -> None:
    """The buffer of the save before, for one parameter and its master weights."""
    for rank, was in zip(now, before, strict=True):
        rank["model"]["3.weight"] = was["model"]["3.weight"]
        rank["optimizer"]["sharded_master_weights"][4] = was["optimizer"]["sharded_master_weights"][4]


def stale_moment(before: list[Rank], now: list[Rank]) -> None:
    for rank, was in zip(now, before, strict=True):
        rank["optimizer"]["base_state"][0]["exp_avg_sq"] = was["optimizer"]["base_state"][0]["exp_avg_sq"]


def stale_buffer(before: list[Rank], now: list[Rank]) -> None:
    for rank, was in zip(now, before, strict=True):
        rank["model"]["1.running_var"] = was["model"]["1.running_var"]


def optimizer_not_saved(before: list[Rank], now: list[Rank]) -> None:
    """Its state is that of the tag before."""
    for rank, was in zip(now, before, strict=True):
        rank["optimizer"]["base_state"] = was["optimizer"]["base_state"]


def optimizer_left_out(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        del rank["optimizer"]


def optimizer_not_resumed(before: list[Rank], now: list[Rank]) -> None:
    """It began anew at the resume, and counted on in its own way."""
    for rank in now:
        for entries in rank["optimizer"]["base_state"].values():
            entries["exp_avg_sq"] = entries["exp_avg_sq"] * 1e-3
            entries["step"] = torch.tensor(float(STEPS[1]))


def steps_began_anew(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        for entries in rank["optimizer"]["base_state"].values():
            entries["step"] = torch.tensor(3.0)


def weight_shards_swapped(before: list[Rank], now: list[Rank]) -> None:
    """Of the two tensor-parallel ranks."""
    for left, right in ((0, 1), (2, 3)):
        swap(now[left]["model"], now[right]["model"], "0.weight")
        swap(now[left]["optimizer"]["sharded_master_weights"], now[right]["optimizer"]["sharded_master_weights"], 0)


def optimizer_shards_swapped(before: list[Rank], now: list[Rank]) -> None:
    """Of the two data-parallel ranks: master weights do not fit the weights, nor moments those of before."""
    now[0]["optimizer"], now[2]["optimizer"] = now[2]["optimizer"], now[0]["optimizer"]


def rank_a_step_behind(before: list[Rank], now: list[Rank]) -> None:
    for entries in now[3]["optimizer"]["base_state"].values():
        entries["step"] -= 1


def moments_of_another(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        state = rank["optimizer"]["base_state"]
        state[2], state[3] = state[3], state[2]


def second_moment_of_another(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        state = rank["optimizer"]["base_state"]
        swap(state[2], state[3], "exp_avg_sq")


def scheduler_ahead(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        rank["scheduler"]["last_epoch"] += 1


def rate_of_another_step(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        rank["scheduler"]["_last_lr"] = [0.5 * rate for rate in rank["scheduler"]["_last_lr"]]


def loader_behind(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        rank["user_content"]["consumed_samples"] -= 8


def loader_of_a_rank_ahead(before: list[Rank], now: list[Rank]) -> None:
    now[2]["rank_content"]["loader"]["num_yielded"] += 1


def weights_not_from_masters(before: list[Rank], now: list[Rank]) -> None:
    for rank, was in zip(now, before, strict=True):
        rank["model"]["3.weight"] = was["model"]["3.weight"]


def not_a_number(before: list[Rank], now: list[Rank]) -> None:
    now[0]["optimizer"]["base_state"][4]["exp_avg"][0, 0] = float("nan")


def swap(one: Any, other: Any, key: Any) -> None:
    one[key], other[key] = other[key], one[key]


MUTANTS: dict[Mutant, tuple[str, str]] = {
    stale_weight: ("weights", "optim/3.weight/master_weights"),
    stale_moment: ("moments", "optim/0.weight/exp_avg_sq"),
    stale_buffer: ("buffers", "model/1.running_var"),
    optimizer_not_saved: ("steps", "0.weight"),
    optimizer_left_out: ("parts", "optimizer"),
    optimizer_not_resumed: ("moments", "optim/0.weight/exp_avg_sq"),
    steps_began_anew: ("steps", ""),
    weight_shards_swapped: ("shards", "model/0.weight"),
    optimizer_shards_swapped: ("rounding", "model/0.weight"),
    rank_a_step_behind: ("steps", "rank 3"),
    moments_of_another: ("moments", "optim/1.weight/exp_avg_sq"),
    second_moment_of_another: ("moments", "exp_avg"),
    scheduler_ahead: ("scheduler", "scheduler/last_epoch"),
    rate_of_another_step: ("scheduler", "optim/param_groups/0/lr"),
    loader_behind: ("position", "user_content/consumed_samples"),
    loader_of_a_rank_ahead: ("position", "rank_content/loader/num_yielded"),
    weights_not_from_masters: ("rounding", "model/3.weight"),
    not_a_number: ("values", "optim/3.weight/exp_avg"),
}


TOGETHER = (
    (stale_weight, stale_moment, stale_buffer, rank_a_step_behind, scheduler_ahead, rate_of_another_step, loader_behind,
     loader_of_a_rank_ahead, not_a_number, moments_of_another),
    (weight_shards_swapped, weights_not_from_masters, second_moment_of_another),
    (optimizer_shards_swapped,),
    (optimizer_not_saved,),
    (optimizer_left_out,),
    (optimizer_not_resumed,),
    (steps_began_anew,),
)
