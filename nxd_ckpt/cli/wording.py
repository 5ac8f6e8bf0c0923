"""What the functions say, told as the command's own: its flags for their keywords, and paths that its user knows."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping

from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.errors import StorageError

_UNFINISHED = re.compile(r"(^|/)\.([^/]+)\.(?:incomplete|replaced)(?=/|$).*")
"""Under which an output is written, or what it replaces put aside."""


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The option of the command for each keyword that its function may complain of."""
    return {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """``message`` with ``--param-names`` for ``saved_param_names=``, and ``--overwrite`` for ``overwrite=True``.

    A word without ``=`` is a keyword only with an underscore in it: "config" and "mapping" are words too, and ``dp=2``
    says what the size is. Nothing in quotes or paths is changed.
    """
    names = "|".join(sorted(flags, key=len, reverse=True))
    keyword = re.compile(rf"(?<![\w/.'\"-])({names})(=True\b|=(?![\w'\"]))?(?![\w/'\"])")

    def flag(found: re.Match[str]) -> str:
        is_keyword = found[2] is not None or "_" in found[1]
        return flags[found[1]] if is_keyword else found[0]

    return keyword.sub(flag, message)


def message_of(error: BaseException, flags: Mapping[str, str]) -> str:
    """What the command says of an error of a function or of the system."""
    system = error.__cause__ if isinstance(error, StorageError) else error
    if isinstance(system, OSError) and isinstance(system.filename, str) and system.strerror:
        return f"{_known_to_users(system.filename)}: {system.strerror}"
    return in_flags(str(error), flags)


def _known_to_users(path: str) -> str:
    """For a file of ours the directory that holds it, for an output that is being made its name."""
    directory, found, _ = path.partition(f"{os.sep}{HIDDEN}")
    if found:
        return f"{directory} (or {HIDDEN} in it)"
    return _UNFINISHED.sub(r"\1\2", path)
