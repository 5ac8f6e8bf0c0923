"""Pages that show real output: each is run from top to bottom, in a directory of its own.

A console block is a command line and what it prints; in Python blocks, the comment behind a call of print is.
``python -m tests.cli.reference`` writes the blocks anew, in the repository's root.
"""

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from nxd_ckpt.cli.main import main
from tests.docs.markdown import DOCS
from tests.docs.old_runs import write_old_runs
from tests.support.terminal import Terminal

DOCUMENT = DOCS / "cli.md"
MIGRATED = [DOCS / "convert.md", DOCS / "known-troubles.md"]
SHOWN = [DOCUMENT, DOCS / "tutorial-nxd.md", DOCS / "tutorial-laptop.md", *MIGRATED]

_BLOCK = re.compile(r"^(```console\n\$ nxd-ckpt )(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STEP = re.compile(
    r"^```python\n(?P<code>.*?)^```$|(?P<console>^```console\n\$ nxd-ckpt .*?^```$)", re.MULTILINE | re.DOTALL
)
_PRINTED = re.compile(r"^( *print\(.*\)  # ).*$", re.MULTILINE)
_SHORT_OPTION = re.compile(r"(?m)^(  -\w) [A-Z]+(?=, --)")
_VOLATILE = re.compile(r"\b(\d[\d.:-]*|[0-9a-f]{12}-\d+)\b")


def command_lines(text: str) -> list[list[str]]:
    """The arguments of every console block."""
    return [shlex.split(block[2]) for block in _BLOCK.finditer(text)]


def rendered(document: Path) -> str:
    """Return the text of a page with the real output in every block that shows one."""
    text, namespace = document.read_text(), {"__name__": "page"}

    def run(step: re.Match[str]) -> str:
        if step["console"]:
            return _BLOCK.sub(lambda block: f"{block[1]}{block[2]}\n{_printed(block[2], directory)}```", step[0])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            lines_before = "\n" * text[: step.start("code")].count("\n")
            exec(compile(lines_before + step["code"], str(document), "exec"), namespace)
        lines = iter(out.getvalue().splitlines())
        return f"```python\n{_PRINTED.sub(lambda line: line[1] + next(lines), step['code'])}```"

    with _in_a_directory_of_its_own() as directory:
        if document in MIGRATED:
            write_old_runs(Path(directory))
        return _STEP.sub(run, text)


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
