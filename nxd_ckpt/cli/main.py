"""``nxd-ckpt COMMAND ...``: the table of commands, and the handling of their errors."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from nxd_ckpt.cli import text, writers
from nxd_ckpt.cli.command import TEMPLATES, Command
from nxd_ckpt.cli.content_commands import DIFF, INSPECT
from nxd_ckpt.cli.directory_commands import LIST, REPORT, WATCH
from nxd_ckpt.cli.proof_commands import DOCTOR, SELFTEST, VERIFY
from nxd_ckpt.cli.retention_commands import PIN, PRUNE, RM, UNPIN
from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import CheckpointError, StorageError
from nxd_ckpt.version import __version__

GROUPS: Mapping[str, tuple[Command, ...]] = {
    "look - say what is there": (LIST, INSPECT, WATCH, DIFF, REPORT),
    "prove - look for damage, and for a resume that would go wrong": (VERIFY, DOCTOR, SELFTEST),
    "keep - decide which checkpoints stay": (PIN, UNPIN, PRUNE, RM),
    "write - bring a checkpoint to another place as it is, or write it in another form": (
        writers.CP,
        writers.CONVERT,
    ),
}
COMMANDS: tuple[Command, ...] = tuple(command for commands in GROUPS.values() for command in commands)


class _Parser(argparse.ArgumentParser):
    """Parser whose help begins with an example."""

    def __init__(self, *args: Any, example: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._example = example

    def format_help(self) -> str:
        return f"example: {self._example}\n\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        """Exit with the message, and a line that is right; the usage of some commands would fill the screen."""
        self.exit(2, f"{self.prog}: error: {message}\nexample: {self._example} ({self.prog} --help shows all)\n")


class _WholeParser(_Parser):
    """Parser of the whole command line, whose help lists the commands by what they are for."""

    commands: argparse._SubParsersAction[Any]

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        summaries = {action.dest: action for action in self.commands._choices_actions}
        for title, commands in GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments([summaries[command.name] for command in commands])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(self._optionals._group_actions)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return f"example: {self._example}\n\n{formatter.format_help()}"


_MEANT = {
    "help": "--help",
    "show": "inspect",
    "info": "inspect",
    "check": "verify",
    "export": "convert",
    "import": "convert",
    "copy": "cp",
    "remove": "rm",
    "delete": "rm",
}
"""Words that are no commands, each with the one that does what they say."""

_PIPE_CLOSED = 128 + 13
_INTERRUPTED = 128 + 2
"""Exit codes by which shells report a process that a signal (SIGPIPE, SIGINT) ended."""


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the whole command line, and each command's parser by name."""
    whole = _WholeParser(
        prog="nxd-ckpt",
        example=LIST.example,
        description="Look at checkpoints of nxd_ckpt and neuronx-distributed, copy them, and write them again on other "
        "sizes. Needs no accelerator and no torch-xla.",
        epilog="Exit code: 0 if all is well, 1 for an error or a problem found, 2 for a wrong command line; of diff, "
        "1 if something differs, and 2 for an error; of selftest, 2 if nothing can be tested.",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"nxd-ckpt {__version__}")
    whole.commands = chosen = whole.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    single: dict[str, argparse.ArgumentParser] = {}
    for command in COMMANDS:
        parser = chosen.add_parser(
            command.name,
            example=command.example,
            help=command.summary,
            description=command.description,
            usage=command.usage,
            allow_abbrev=False,
        )
        command.add_arguments(parser)
        single[command.name] = parser
    return whole, single


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; usage errors exit with 2, as argparse does."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("nxd-ckpt: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _main(argv: Sequence[str] | None) -> int:
    parser, single = parsers()
    complete(parser)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed (>&-): the command still runs, without output
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help()
        return 0
    args = _parsed(parser, single, words)
    command: Command = args.command
    flags = flags_of(single[command.name])
    try:
        with _warnings_on_stderr(flags):
            code = command.run(args)
            sys.stdout.flush()
            return code
    except argparse.ArgumentTypeError as error:
        single[command.name].error(str(error))
    except BrokenPipeError:
        # The reader of our output stopped, as `head` does. Buffered output must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except (CheckpointError, OSError, ModuleNotFoundError) as error:
        if args.traceback or (isinstance(error, ModuleNotFoundError) and error.name != "torch"):
            raise
        print(f"nxd-ckpt: {text.red('error:', sys.stderr)} {text.printable(message_of(error, flags))}", file=sys.stderr)
        return command.code_of_error


def _parsed(
    parser: argparse.ArgumentParser, single: Mapping[str, argparse.ArgumentParser], words: Sequence[str]
) -> argparse.Namespace:
    """Parse the command line. For a wrong one, exit with the names that may have been meant."""
    if words[0] not in single and not words[0].startswith("-"):
        meant = _MEANT.get(words[0])
        named = listed(words[:1], list(single)) if meant is None else f"{words[0]!r} (did you mean {meant!r}?)"
        parser.error(f"there is no command {named}; the commands are {', '.join(single)}")
    if words[0] not in single:
        parser.parse_args(words)  # --help and --version end here, and all else is wrong
    used = single[words[0]]
    args, unknown = used.parse_known_intermixed_args(words[1:])  # as `rm run1 --dry-run step_300`
    _refuse_twice(used, words)
    if unknown:
        options = [option for action in used._actions for option in action.option_strings if action.dest != "help"]
        if flag := args.command.other_names.get(unknown[0].partition("=")[0]):
            used.error(f"unrecognized arguments: {unknown[0]!r} (did you mean {flag!r}?)")
        used.error(f"unrecognized arguments: {listed(unknown, options)}")
    return args


def _refuse_twice(used: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exit if an option is given by two of its names: neither of them may win in silence."""
    used_names = {word.partition("=")[0] for word in words}
    names: dict[str, list[str]] = {}
    for action in used._actions:
        if not isinstance(action, argparse._AppendAction):  # each of these is a rule of its own
            names.setdefault(action.dest, []).extend(name for name in action.option_strings if name in used_names)
    twice = next((each for each in names.values() if len(each) > 1), None)
    if twice is not None:
        used.error(f"{' and '.join(twice)} are one option: give one of them")


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell's request for completions, and exit; without such a request, return. Needs argcomplete."""
    if "_ARGCOMPLETE" in os.environ:
        from argcomplete import autocomplete

        autocomplete(parser)


class _InFlags(logging.Formatter):
    def __init__(self, flags: Mapping[str, str]) -> None:
        super().__init__("nxd-ckpt: warning: %(message)s")
        self._flags = flags

    def formatMessage(self, record: logging.LogRecord) -> str:
        return text.printable(text.in_flags(super().formatMessage(record), self._flags))


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


_UNFINISHED = re.compile(r"(^|/)\.([^/]+)\.(?:incomplete|replaced|lease)(?=/|$).*")
"""Temporary name of an output, or of a directory that it replaces."""


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the command's flag for each keyword that its function may mention."""
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    return {action.dest: action.option_strings[-1] for action in shown if action.option_strings}


def message_of(error: BaseException, flags: Mapping[str, str]) -> str:
    """Return the command's message for an error of a function or of the system."""
    if isinstance(error, ModuleNotFoundError):
        return f"this needs {error.name}, which is not installed: pip install {error.name}"
    system = error.__cause__ if isinstance(error, StorageError) else error
    if isinstance(system, OSError) and isinstance(system.filename, str) and system.strerror:
        return f"{_user_path(system.filename)}: {system.strerror}"
    message = text.in_flags(str(error), flags)
    needed = [flag for flag in TEMPLATES if re.search(f"[Pp]ass {flag}", message)]
    hints = (f"nxd-ckpt inspect TAG --template {flag[2:]} > FILE makes one to fill in" for flag in needed)
    return "; ".join([message, *hints])


def _user_path(path: str) -> str:
    """Replace an internal file by its directory, and the temporary name of an output by its name."""
    output = _UNFINISHED.sub(r"\1\2", path)
    directory, separator, _ = output.partition(f"{os.sep}{HIDDEN}")
    return f"{directory} (or {HIDDEN} in it)" if separator else output
