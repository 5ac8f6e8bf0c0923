"""What broken saves and resumes do to a tag: each changes one thing in what the ranks of a job hold."""

from collections.abc import Callable

import torch

from tests.examine.runs import Rank

STEPS = 10, 13

Mutant = Callable[[list[Rank], list[Rank]], None]
"""Changes the latter, what the ranks hold now; the former is what they held before."""


def weights_not_saved(before: list[Rank], now: list[Rank]) -> None:
    for rank, was in zip(now, before, strict=True):
        rank["model"] = was["model"]


def optimizer_not_saved(before: list[Rank], now: list[Rank]) -> None:
    """Its state is that of the tag before."""
    for rank, was in zip(now, before, strict=True):
        rank["optimizer"]["base_state"] = was["optimizer"]["base_state"]


def optimizer_left_out(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        del rank["optimizer"]


def steps_began_anew(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        for entries in rank["optimizer"]["base_state"].values():
            entries["step"] = torch.tensor(3.0)


def rank_a_step_behind(before: list[Rank], now: list[Rank]) -> None:
    for entries in now[3]["optimizer"]["base_state"].values():
        entries["step"] -= 1


def not_a_number(before: list[Rank], now: list[Rank]) -> None:
    now[0]["optimizer"]["base_state"][4]["exp_avg"][0, 0] = float("nan")


MUTANTS: dict[Mutant, tuple[str, str]] = {
    weights_not_saved: ("weights", "model"),
    optimizer_not_saved: ("steps", "optimizer"),
    optimizer_left_out: ("parts", "optimizer"),
    steps_began_anew: ("steps", ""),
    rank_a_step_behind: ("steps", "rank 3"),
    not_a_number: ("values", "optim/3.weight/exp_avg"),
}


TOGETHER = (
    (rank_a_step_behind, not_a_number),
    (weights_not_saved,),
    (optimizer_not_saved,),
    (optimizer_left_out,),
    (steps_began_anew,),
)
