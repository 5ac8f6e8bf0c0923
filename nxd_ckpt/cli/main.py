"""``nxd-ckpt COMMAND ...``: the table of commands, and what becomes of their errors.

A command is a module with a line in :data:`COMMANDS`. It imports what it works with inside ``run``: ``--help`` does not
wait for torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from nxd_ckpt.cli import (
    convert_zero1,
    cp_command,
    diff_command,
    doctor_command,
    export_command,
    from_dcp_command,
    import_command,
    inspect_command,
    list_command,
    migrate_command,
    pack_command,
    pin_command,
    prune_command,
    report_command,
    reshard,
    text,
    to_dcp_command,
    unpin_command,
    unshard_command,
    verify_command,
    watch_command,
)
from nxd_ckpt.cli.wording import flags_of, in_flags, message_of
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.version import __version__


class Command(Protocol):
    """What each module of :data:`COMMANDS` offers. ``EXAMPLE`` is a command line, ``SUMMARY`` a phrase, ``DESCRIPTION``
    whole sentences."""

    NAME: str
    EXAMPLE: str
    SUMMARY: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def run(self, args: argparse.Namespace, /) -> int:
        """Do it and return the exit code. Errors of nxd_ckpt and of the operating system are for :func:`main`."""


COMMANDS: tuple[Command, ...] = (
    list_command,
    watch_command,
    inspect_command,
    verify_command,
    diff_command,
    doctor_command,
    report_command,
    cp_command,
    pin_command,
    unpin_command,
    prune_command,
    reshard,
    convert_zero1,
    export_command,
    import_command,
    migrate_command,
    to_dcp_command,
    from_dcp_command,
    unshard_command,
    pack_command,
)

class _Parser(argparse.ArgumentParser):
    """One whose help begins with an example."""

    def __init__(self, *args: Any, example: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._example = example

    def format_help(self) -> str:
        return f"example: {self._example}\n\n{super().format_help()}"


_PIPE_CLOSED = 128 + 13
_INTERRUPTED = 128 + 2
"""As shells report a process that a signal (SIGPIPE, SIGINT) ended."""


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command line, and that of each command by name."""
    whole = _Parser(
        prog="nxd-ckpt",
        example=list_command.EXAMPLE,
        description="Look at checkpoints of nxd_ckpt and neuronx-distributed, copy them, and write them anew on other "
        "sizes. Needs no accelerator and no torch-xla.",
        epilog="Exit code: 0 if all is well, 1 for an error or a problem found, 2 for a wrong command line; of diff, "
        "1 if something differs, and 2 for an error.",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"nxd-ckpt {__version__}")
    chosen = whole.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    single: dict[str, argparse.ArgumentParser] = {}
    for command in COMMANDS:
        parser = chosen.add_parser(
            command.NAME,
            example=command.EXAMPLE,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            allow_abbrev=False,
        )
        parser.set_defaults(run=command.run, code_of_error=1)
        command.add_arguments(parser)
        parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
        single[command.NAME] = parser
    return whole, single


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; usage errors exit with 2, as argparse does."""
    parser, single = parsers()
    complete(parser)
    if sys.stdout is None:  # it was closed (>&-): what is asked for is done all the same, and told to nobody
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    args = parser.parse_args(argv)
    flags = flags_of(single[args.command])
    try:
        with _warnings_on_stderr(flags):
            code: int = args.run(args)
            sys.stdout.flush()
            return code
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # Whoever read our output stopped, as `head` does. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (CheckpointError, OSError) as error:
        if args.traceback:
            raise
        print(f"nxd-ckpt: error: {text.printable(message_of(error, flags))}", file=sys.stderr)
        code = args.code_of_error
        return code


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell, where it asks what may stand at the cursor, and end; else return. Needs argcomplete."""
    if "_ARGCOMPLETE" in os.environ:
        from argcomplete import autocomplete

        autocomplete(parser)


class _InFlags(logging.Formatter):
    def __init__(self, flags: Mapping[str, str]) -> None:
        super().__init__("nxd-ckpt: warning: %(message)s")
        self._flags = flags

    def formatMessage(self, record: logging.LogRecord) -> str:
        return text.printable(in_flags(super().formatMessage(record), self._flags))


@contextmanager
def _warnings_on_stderr(flags: Mapping[str, str]) -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(_InFlags(flags))
    logger = logging.getLogger("nxd_ckpt")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
