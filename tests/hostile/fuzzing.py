"""Reading damaged files: what no reader may do, and how many were tried."""

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from nxd_ckpt.errors import CheckpointError, HostExhausted
from tests.hostile.budget import OverBudget, within_budget
from tests.hostile.targets import TARGETS, Target


def trouble(target: Target, data: bytes) -> str | None:
    """What is wrong with how a file was read: an error that is none of ours, or more than the budget. Else None."""
    try:
        with within_budget(len(data), target.part):
            target.read(data)
    except HostExhausted:
        return f"more memory than the budget\n{traceback.format_exc()}"
    except CheckpointError:
        return None
    except (Exception, OverBudget):
        return traceback.format_exc()
    return None


@contextmanager
def in_silence() -> Iterator[None]:
    """What is said of damaged files, a million times, is of no use."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def troubles(name: str, seeds: range) -> list[tuple[int, str]]:
    """Read the damaged files of these numbers; the numbers of those that were trouble, and what it was."""
    target = TARGETS[name]
    with in_silence():
        for whole in target.valid:
            target.read(whole)  # what is whole is read: else damage would prove nothing
        found = ((seed, trouble(target, target.input(seed))) for seed in seeds)
        return [(seed, what) for seed, what in found if what is not None]
