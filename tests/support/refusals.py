"""What calls are refused with, as text: ranks of other processes return it, and a list of it is compared at once."""

from collections.abc import Callable, Iterable
from typing import Any

from nxd_ckpt.errors import CheckpointError


def refusal(call: Callable[[], Any]) -> str:
    """The kind and the message of the package's error that it raises; "" where it is accepted."""
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(calls: Iterable[Callable[[], Any]]) -> list[str]:
    """Each one's, one call after the other."""
    return [refusal(call) for call in calls]
