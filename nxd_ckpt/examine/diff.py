"""What two tags differ in, and by how much, whatever sizes they were saved on."""

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
    """A value, not a tensor, that differs. ``name`` is such as "optim/param_groups/0/lr", "scheduler/last_epoch" or
    "user_content/steps". ABSENT stands for a value that one of the tags does not have."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Difference:
    """What the tags ``a`` and ``b`` differ in. True if they differ, or if something could not be compared.

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
        """For a notebook."""
        rows: list[tuple[Any, ...]] = []
        rows += [
            (one.name, one.kind, one.differing, _rounded(one.max_difference), _rounded(one.relative_norm))
            for one in self.tensors
        ]
        rows += [(one.name, "value", f"{one.a!r:.80}", f"{one.b!r:.80}", None) for one in self.values]
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

    Tensors are put together by name, and compared in 64 MiB of memory; their digests are verified. NaN in the same
    place is equal. Tensors of different dtypes are compared as numbers; without a ``tolerance`` they always differ. If
    it is not known how a tensor is cut, and both tags were saved on the same tp and ep, then what their ranks held is
    compared.

    Args:
        a, b: opened by :func:`open_checkpoint`, with ``partitions=`` and ``saved_param_names=`` where they do not say.
        prefix: compare only names that begin so: a shell's patterns such as "model/" or "optim/*/exp_avg".
        tolerance: two tensors are equal if no element differs by more, whatever their dtypes.
        full: read also tensors whose recorded digests (CRC-32) are equal.
        progress: show a bar on a terminal.

    Raises:
        InvalidArgument: neither tag has such a name; a tolerance below 0.
        CorruptCheckpoint, PartLost: a tag is not what was written, or lost a file.
        TagReplaced: a tag was removed, or saved again, since it was opened.
    """
    if tolerance is not None and not tolerance >= 0:
        raise InvalidArgument(f"tolerance must be a number, 0 or more, found {tolerance!r}")
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
    with a.opened.kept(), b.opened.kept():
        found = _difference(a, b, prefixes, tolerance, full, progress)
        if found.problems or any(tensor.problem for tensor in found.tensors):
            a.opened.require_kept()
            b.opened.require_kept()
    return found


def _difference(
    a: Checkpoint, b: Checkpoint, prefixes: Sequence[str], tolerance: float | None, full: bool, progress: bool
) -> Difference:
    def wanted(name: str) -> bool:
        return not prefixes or any(fnmatchcase(name, f"{one}*") for one in prefixes)

    problems: dict[str, str] = {}
    values_a, values_b = (plain_values(one.whole, problems) for one in (a, b))
    names = [name for name in dict.fromkeys([*values_a, *values_b]) if wanted(name)]
    comparison = TensorComparison(a.whole, b.whole, wanted, full=full)
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
        tuple(problem for name, problem in problems.items() if wanted(name)),
        comparison.done.nbytes,
    )
