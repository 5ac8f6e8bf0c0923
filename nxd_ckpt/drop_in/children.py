"""Children of multiprocessing that begin the script again ("spawn", "forkserver"): they install what their parent has.

A forked child has it by itself. The others read what multiprocessing hands to each of them, after they have imported
the main script again, and before they call its function.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from multiprocessing import current_process
from typing import Any

from nxd_ckpt.drop_in.settings import Settings

logger = logging.getLogger("nxd_ckpt")

_KEY = "nxd_ckpt"
_OF_THIS_PROCESS = "topology", "process_group"


class _Handed:
    """Is unpickled by a call of ``install`` there, with the options here."""

    def __init__(self, install: Callable[[Settings], None], settings: Settings) -> None:
        self._install, self._settings = install, settings

    def __reduce__(self) -> tuple[Any, ...]:
        given = {name: value for name, value in self._settings.options.items() if name not in _OF_THIS_PROCESS}
        options = {name: value for name, value in given.items() if _can_be_pickled(name, value)}
        return _received, (self._install, Settings(options, self._settings.tiers))


def _received(install: Callable[[Settings], None], settings: Settings) -> _Handed:
    install(settings)
    return _Handed(install, settings)


def hand_to_children(install: Callable[[Settings], None], settings: Settings) -> None:
    """Have children of this process, and theirs, call ``install(settings)``."""
    _of_children()[_KEY] = _Handed(install, settings)


def hand_nothing() -> None:
    """Undo `hand_to_children`."""
    _of_children().pop(_KEY, None)


def _of_children() -> dict[str, Any]:
    """Return what multiprocessing hands on to each child, by name."""
    handed: dict[str, Any] = vars(current_process()).setdefault("_config", {})
    return handed


def _can_be_pickled(name: str, value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception as error:  # of whatever class: it is an object of the caller's
        logger.warning(
            "nxd_ckpt: a child of multiprocessing saves without %s=, which cannot be handed to it (%s): call install() "
            "in the child", name, error,
        )  # fmt: skip
        return False
    return True
