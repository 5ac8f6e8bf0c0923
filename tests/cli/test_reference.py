"""docs/cli.md is true: it shows what the command prints, and leaves no command out."""

import shlex
from pathlib import Path

import pytest

from nxd_ckpt.cli.command import Command
from nxd_ckpt.cli.main import COMMANDS, parsers
from tests.cli.reference import DOCUMENT, SHOWN, command_lines, rendered, steady
from tests.docs.markdown import DOCS, headings


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_blocks_show_what_the_command_prints(page: Path) -> None:
    """But for numbers. `python -m tests.cli.reference` brings it up to date."""
    assert steady(rendered(page)) == steady(page.read_text())


def test_every_command_is_documented() -> None:
    """It has a heading of its own, and an example, here or on the page about hardware."""
    lines = command_lines(DOCUMENT.read_text() + (DOCS / "hardware.md").read_text())
    for command in COMMANDS:
        assert f"`nxd-ckpt {command.name}`" in headings(DOCUMENT)
        assert any(line[0] == command.name for line in lines)


def test_every_command_says_what_each_argument_is_for() -> None:
    """No argument is without help, and no command without a description."""
    for parser in parsers()[1].values():
        assert parser.description
        assert [] == [action.dest for action in parser._actions if not action.help]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_begins_with_an_example(command: Command) -> None:
    whole, single = parsers()
    first, *_ = single[command.name].format_help().splitlines()
    said, _, example = first.partition(": nxd-ckpt ")
    assert "example" == said
    assert command is whole.parse_args(shlex.split(example)).command
