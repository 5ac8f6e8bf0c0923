"""What docs/cli.md and the tutorials show of the command: each console block is a command line and what it prints.

``python -m tests.cli.reference`` writes the blocks anew, in the repository's root.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from nxd_ckpt.cli.main import main
from tests.docs.markdown import DOCS, code_blocks
from tests.support.terminal import Terminal

DOCUMENT = DOCS / "cli.md"
SHOWN = [DOCUMENT, DOCS / "tutorial-nxd.md", DOCS / "tutorial-laptop.md"]

_BLOCK = re.compile(r"^(```console\n\$ nxd-ckpt )(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHORT_OPTION = re.compile(r"(?m)^(  -\w) [A-Z]+(?=, --)")
_VOLATILE = re.compile(r"\b(\d[\d.:-]*|[0-9a-f]{12}-\d+)\b")


def command_lines(text: str) -> list[list[str]]:
    """The arguments of every console block."""
    return [shlex.split(block[2]) for block in _BLOCK.finditer(text)]


def rendered(document: Path) -> str:
    """Return the text of a page with the real output in every console block, of what its Python blocks make."""
    text, namespace = document.read_text(), {"__name__": "page"}
    with _in_a_directory_of_its_own() as directory, contextlib.redirect_stdout(None):
        for block in code_blocks(document, "python"):
            exec(compile(block, str(document), "exec"), namespace)
        return _BLOCK.sub(lambda block: f"{block[1]}{block[2]}\n{_printed(block[2], directory)}```", text)


def steady(text: str) -> str:
    """``text`` without what differs between two runs, machines and versions: numbers, and the columns they widen.

    Of help the letters alone: Pythons differ in where argparse breaks lines, at hyphens too, and until 3.12 it says
    what an option takes after its short name, too.
    """
    text = _BLOCK.sub(
        lambda block: "".join(_SHORT_OPTION.sub(r"\1", block[0]).split()) if block[2].endswith("--help") else block[0],
        text,
    )
    lines = [line for line in text.splitlines() if not line.startswith("  versions ")]
    return "\n".join(re.sub(" +", " ", _VOLATILE.sub("#", line)) for line in lines)


def _printed(arguments: str, directory: str) -> str:
    out = Terminal()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(shlex.split(arguments))
    return out.getvalue().replace(directory, "/data")


@contextlib.contextmanager
def _in_a_directory_of_its_own() -> Iterator[str]:
    """A directory to make checkpoints in, and a terminal of a known width without colours."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}):
        os.chdir(directory)
        try:
            yield os.getcwd()
        finally:
            os.chdir(before)


if __name__ == "__main__":
    for shown in SHOWN:
        shown.write_text(rendered(shown))
