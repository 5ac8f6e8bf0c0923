"""Which tags to keep: a pure function from tags to the tags that go."""

from __future__ import annotations

from collections.abc import Iterable

from nxd_ckpt.core.tags import TagInfo, in_order
from nxd_ckpt.errors import InvalidArgument


def validate_num_kept(num_kept_ckpts: int | None) -> int | None:
    """None or -1 keep all (as NxD has it); a positive number keeps so many.

    Raises:
        InvalidArgument: 0 would delete the checkpoint just saved; other negatives and non-integers mean nothing.
    """
    if num_kept_ckpts is None or num_kept_ckpts == -1:
        return None
    valid = isinstance(num_kept_ckpts, int) and not isinstance(num_kept_ckpts, bool) and num_kept_ckpts >= 1
    if not valid:
        raise InvalidArgument(
            f"num_kept_ckpts must be None or -1 (keep all) or at least 1, found {num_kept_ckpts!r}; "
            "0 would delete the checkpoint that was just saved"
        )
    return num_kept_ckpts


def tags_to_remove(tags: Iterable[TagInfo], num_kept_ckpts: int | None) -> list[str]:
    """The tags that retention removes, oldest first: all complete tags but the newest ``num_kept_ckpts``.

    Incomplete tags are never counted and never removed: they may be another program's save in progress.
    """
    if num_kept_ckpts is None:
        return []
    complete = in_order(info for info in tags if info.complete)
    return [info.tag for info in complete[: max(0, len(complete) - num_kept_ckpts)]]
