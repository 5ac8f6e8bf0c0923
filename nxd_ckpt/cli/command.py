"""A command of ``nxd-ckpt`` as a declaration."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.options import add_options, add_storage_option


@dataclass(frozen=True)
class Command:
    """A command: its words, its arguments, and the function that runs it.

    Attributes:
        name: the word on the command line.
        example: a command line that it takes.
        summary: a phrase for the list of commands.
        description: whole sentences for its help.
        run: does the work and returns the exit code. It imports what it needs itself, so that ``--help`` does not wait
            for torch. Errors of nxd_ckpt and of the operating system are left to `nxd_ckpt.cli.main.main`.
        operands: name and help of each positional argument; one whose name ends in "?" may be left out, one in "*"
            also repeated.
        add_flags: adds flags that only this command has.
        options: the option class of its function: a flag for each field. Without one, there is --storage-option only.
        without: fields of ``options`` without a flag.
        spelling: flags of ``options`` with another name than usual.
        quiet: add --quiet.
        code_of_error: the exit code for an error.
    """

    name: str
    example: str
    summary: str
    description: str
    run: Callable[[argparse.Namespace], int]
    operands: Sequence[tuple[str, str]] = ()
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None
    options: type[Any] | None = None
    without: Collection[str] = ()
    spelling: Mapping[str, str] = field(default_factory=dict)
    quiet: bool = False
    code_of_error: int = 1

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add all arguments of the command to its parser."""
        for operand, about in self.operands:
            name = operand.rstrip("?*")
            parser.add_argument(name.lower(), metavar=name, nargs=operand.removeprefix(name) or None, help=about)
        if self.add_flags is not None:
            self.add_flags(parser)
        if self.options is None:
            add_storage_option(parser)
        else:
            add_options(parser, self.options, without=self.without, flags=self.spelling)
        if self.quiet:
            text.add_quiet(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
        parser.set_defaults(run=self.run, code_of_error=self.code_of_error)
