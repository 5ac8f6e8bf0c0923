"""Messages of the functions in the command's terms: flags instead of keywords, and paths that the user has given."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping

from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.errors import StorageError

_UNFINISHED = re.compile(r"(^|/)\.([^/]+)\.(?:incomplete|replaced)(?=/|$).*")
"""Temporary name of an output, or of a directory that it replaces."""

TEMPLATES = ("--partitions", "--saved-param-names")
"""Flags whose files ``inspect`` makes templates of."""


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the command's flag for each keyword that its function may mention."""
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    return {action.dest: action.option_strings[-1] for action in shown if action.option_strings}


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """Replace keywords by flags: ``saved_param_names=`` by ``--param-names``, ``overwrite=True`` by ``--overwrite``.

    A word without ``=`` is a keyword only with an underscore in it: "config" and "mapping" are words too, and ``dp=2``
    states a size. Nothing in quotes or paths is changed.
    """
    names = "|".join(sorted(flags, key=len, reverse=True))
    keyword = re.compile(rf"(?<![\w/.'\"-])({names})(=True\b|=(?![\w'\"]))?(?![\w/'\"])")

    def flag(match: re.Match[str]) -> str:
        is_keyword = match[2] is not None or "_" in match[1]
        return flags[match[1]] if is_keyword else match[0]

    return keyword.sub(flag, message)


def message_of(error: BaseException, flags: Mapping[str, str]) -> str:
    """Return the command's message for an error of a function or of the system."""
    system = error.__cause__ if isinstance(error, StorageError) else error
    if isinstance(system, OSError) and isinstance(system.filename, str) and system.strerror:
        return f"{_user_path(system.filename)}: {system.strerror}"
    message = in_flags(str(error), flags)
    needed = [flag for flag in TEMPLATES if re.search(f"[Pp]ass {flag}", message)]
    hints = (f"nxd-ckpt inspect TAG --template {flag[2:]} > FILE makes one to fill in" for flag in needed)
    return "; ".join([message, *hints])


def _user_path(path: str) -> str:
    """Replace an internal file by its directory, and the temporary name of an output by its name."""
    directory, separator, _ = path.partition(f"{os.sep}{HIDDEN}")
    if separator:
        return f"{directory} (or {HIDDEN} in it)"
    return _UNFINISHED.sub(r"\1\2", path)
