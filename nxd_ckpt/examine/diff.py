"""Differences between two tags, which may have been saved on different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from nxd_ckpt.checkpoint import Checkpoint
from nxd_ckpt.core.html_table import html_table
from nxd_ckpt.errors import InvalidArgument, as_checkpoint_errors
from nxd_ckpt.examine.tensors import TensorComparison, TensorDifference
from nxd_ckpt.reshard.plain_values import ABSENT, equal_values, plain_values
from nxd_ckpt.storage.progress import watched

__all__ = ["ABSENT", "Difference", "TensorDifference", "ValueDifference", "diff_checkpoints"]


@dataclass(frozen=True)
class ValueDifference:
    """A differing value that is not a tensor.

    Attributes:
        name: for example "optim/param_groups/0/lr", "scheduler/last_epoch" or "user_content/steps".
        a, b: the value in each tag; ABSENT where a tag does not have it.
    """

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Difference:
    """Differences between the tags ``a`` and ``b``. True if they differ, or if something could not be compared.

    Attributes:
        tensors, values: those that differ.
        same_tensors: the number of tensors that do not differ.
        same_digests: how many of those were not read, because their recorded digests are equal.
        problems: parts of the tags that could not be compared.
        nbytes: bytes that were read of the tensors of ``b``.
    """

    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    same_tensors: int
    same_digests: int
    problems: tuple[str, ...]
    nbytes: int

    def __bool__(self) -> bool:
        return bool(self.tensors or self.values or self.problems)

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        rows: list[tuple[Any, ...]] = []
        rows += [
            (
                difference.name,
                difference.kind,
                difference.differing,
                _rounded(difference.max_difference),
                _rounded(difference.relative_norm),
            )
            for difference in self.tensors
        ]
        rows += [
            (difference.name, "value", f"{difference.a!r:.80}", f"{difference.b!r:.80}", None)
            for difference in self.values
        ]
        head = ("name", "what differs", "elements, or a", "max |a - b|, or b", "||a - b|| / ||a||")
        differ = f"{len(self.tensors)} tensors and {len(self.values)} values differ"
        return html_table(f"{differ}, {self.same_tensors} tensors are the same", head, rows)


def _rounded(number: float | None) -> str | None:
    return None if number is None else f"{number:.4g}"


@as_checkpoint_errors()
def diff_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    prefix: str | Sequence[str] = (),
    tolerance: float | None = None,
    full: bool = False,
    progress: bool = False,
) -> Difference:
    """Compare two tags, of nxd_ckpt or NxD, in any place, saved on any sizes.

    Tensors are matched by name, and compared in 64 MiB of memory; their digests are verified. NaN in the same place is
    equal. Tensors of different dtypes are compared as numbers; without a ``tolerance`` they always differ. If a
    tensor's
    partition is unknown and both tags were saved on the same tp and ep, the parts of each rank are compared.

    Args:
        a, b: opened by `open_checkpoint`, with ``partitions=`` and ``saved_param_names=`` if the tags do not record
            them.
        prefix: compare only names with this beginning; shell patterns such as "model/" or "optim/*/exp_avg".
        tolerance: treat differences up to this as equal, whatever the dtypes.
        full: also read tensors whose recorded digests (CRC-32) are equal.
        progress: show a bar on a terminal.

    Raises:
        InvalidArgument: neither tag has such a name; a tolerance below 0.
        CorruptCheckpoint, PartLost: a tag is not what was written, or lost a file.
        TagReplaced: a tag was removed, or saved again, since it was opened.
    """
    if tolerance is not None and not tolerance >= 0:
        raise InvalidArgument(f"tolerance must be a number, 0 or more, found {tolerance!r}")
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
    with a.opened.guarded(), b.opened.guarded():
        difference = _difference(a, b, prefixes, tolerance, full, progress)
        if difference.problems or any(tensor.problem for tensor in difference.tensors):
            a.opened.require_unchanged()
            b.opened.require_unchanged()
    return difference


def _difference(
    a: Checkpoint, b: Checkpoint, prefixes: Sequence[str], tolerance: float | None, full: bool, progress: bool
) -> Difference:
    def is_selected(name: str) -> bool:
        return not prefixes or any(fnmatchcase(name, f"{prefix}*") for prefix in prefixes)

    problems: dict[str, str] = {}
    values_a, values_b = (plain_values(tag.whole, problems) for tag in (a, b))
    names = [name for name in dict.fromkeys([*values_a, *values_b]) if is_selected(name)]
    comparison = TensorComparison(a.whole, b.whole, is_selected, full=full)
    if prefixes and not names and not comparison.names:
        raise InvalidArgument(f"no name in either tag begins with {' or '.join(prefixes)}")
    with watched("diff", comparison.nbytes, lambda: comparison.done.nbytes, progress):
        tensors = tuple(comparison.differences(tolerance))
    pairs = [ValueDifference(name, values_a.get(name, ABSENT), values_b.get(name, ABSENT)) for name in names]
    return Difference(
        tensors,
        tuple(pair for pair in pairs if not equal_values(pair.a, pair.b)),
        len(comparison.names) - len(tensors),
        comparison.same_digests,
        tuple(problem for name, problem in problems.items() if is_selected(name)),
        comparison.done.nbytes,
    )
