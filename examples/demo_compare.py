"""What the demo compares: losses, all ranks' tensors of two checkpoints, and global tensors on other sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TypeVar

from global_tensors import TIED, equal_bits, global_tensors
from torch import Tensor

import nxd_ckpt
from nxd_ckpt.formats.tensors import iter_tensors

# On other sizes, sums are taken in another order. bf16 keeps 8 significant bits, so each of them may come out
# different by 2^-8 of its value; in a loss, the mean over hundreds of predictions, such differences mostly cancel.
# A quarter of a single one is allowed. (Seen: up to 2^-14. With data one sequence off: 2^-7; with fresh moments: 2^-1.)
LOSS_TOLERANCE = 2.0**-10

Name = TypeVar("Name", bound=Hashable)


def steps_that_differ(expected: Mapping[int, str], actual: Mapping[int, str], first: int, last: int) -> list[int]:
    """Steps from ``first`` to ``last`` whose losses are not equal in every bit, or missing in either run."""
    steps = range(first, last + 1)
    return [step for step in steps if expected.get(step) is None or expected[step] != actual.get(step)]


def relative_differences(
    expected: Mapping[int, str], actual: Mapping[int, str], first: int, last: int
) -> dict[int, float]:
    """For each step, by how much of itself the expected loss is missed: infinity where either run lacks it, or NaN."""
    found = {}
    for step in range(first, last + 1):
        one, other = (float.fromhex(losses.get(step, "nan")) for losses in (expected, actual))
        difference = abs(other - one) / abs(one)
        found[step] = difference if difference == difference else float("inf")
    return found


def tensors_that_differ(expected: nxd_ckpt.Checkpoint, actual: nxd_ckpt.Checkpoint) -> tuple[int, list[str]]:
    """All ranks' model and optimizer state: how many tensors were compared, and which differ in value or dtype."""
    count, different = 0, []
    for rank in range(expected.topology.world_size):
        for part in ("model_state", "optimizer_state"):
            first, second = (dict(iter_tensors(getattr(one, part)(rank))) for one in (expected, actual))
            compared, paths = _differing(first, second)
            count += compared
            different += [f"rank {rank}: {part}: {'/'.join(map(str, path))}" for path in paths]
    return count, different


def global_tensors_that_differ(
    expected: Path, saved: nxd_ckpt.Topology, actual: Path, live: nxd_ckpt.Topology
) -> tuple[int, list[str]]:
    """The same for the global tensors of two tag directories, the one saved on other sizes than the other."""
    return _differing(global_tensors(expected, saved.dp, saved.tp), global_tensors(actual, live.dp, live.tp))


def fsdp2_tensors_that_differ(
    expected: Path, saved: nxd_ckpt.Topology, actual: nxd_ckpt.Checkpoint
) -> tuple[int, list[str]]:
    """The same for a tag directory of the training for NxD and a tag of FSDP2, whose parameters are the master weights:
    where the weights are bf16, they are these, rounded."""
    by_hand = global_tensors(expected, saved.dp, saved.tp)
    found = {}
    for name in actual.metadata:
        tensor = actual.read(name)
        if name.startswith("model/"):
            found[name] = tensor.to(by_hand[name].dtype)
            if name != f"model/{TIED}":
                found[f"optim/{name.removeprefix('model/')}/master_weights"] = tensor
        else:
            found[name] = tensor
    return _differing(by_hand, found)


def _differing(expected: Mapping[Name, Tensor], actual: Mapping[Name, Tensor]) -> tuple[int, list[Name]]:
    """How many names there are on either side, and those whose tensors are not equal in every bit, or missing."""
    names = list({**expected, **actual})
    different = [
        name
        for name in names
        if name not in expected or name not in actual or not equal_bits(expected[name], actual[name])
    ]
    return len(names), different
