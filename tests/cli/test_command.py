"""The command line itself: exit codes, errors, warnings, and what it needs to start."""

import contextlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nxd_ckpt import close_checkpointers, save_checkpoint
from nxd_ckpt.cli.main import GROUPS, flags_of, main, parsers
from nxd_ckpt.cli.text import in_flags
from nxd_ckpt.errors import CheckpointNotFound
from tests.cli.conftest import Run
from tests.golden.checkpoints import saved
from tests.support.processes import run_program
from tests.support.terminal import Terminal

REPOSITORY = Path(__file__).parents[2]
LOOKING = ["list", "inspect", "verify"]


def run_after(preparation: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process that was forked, and first did something to its output."""
    source = f"import os, sys\n{preparation}\nfrom nxd_ckpt.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    return run_program(source, *arguments)


def test_it_runs_as_a_process(examples: Path) -> None:
    """``python -m nxd_ckpt.cli`` prints one document and exits with the command's code."""
    command = [sys.executable, "-m", "nxd_ckpt.cli", "list", str(examples), "--json"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (0, "") == (ended.returncode, ended.stderr)
    assert ["z_plain", "zero1", "cut"] == [tag["tag"] for tag in json.loads(ended.stdout)["tags"]]


def test_a_terminal_without_the_letters_gets_them_escaped(copied: Path) -> None:
    """Names that stdout cannot encode are no reason to fail."""
    (copied / "zero1").rename(copied / "größe")
    ended = run_after("sys.stdout.reconfigure(encoding='ascii', errors='strict')", "list", copied)
    assert (0, "") == (ended.returncode, ended.stderr)
    assert r"  gr\xf6\xdfe  " in ended.stdout


def test_a_reader_that_stops_is_no_error(examples: Path) -> None:
    """``nxd-ckpt inspect ... | head`` ends quietly, as if by the signal that other programs get."""
    without_reader = "read, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)"
    ended = run_after(without_reader, "inspect", examples, "--tensors")
    assert ("", 141) == (ended.stderr, ended.returncode)


@pytest.mark.parametrize(("closed", "words", "code"), [(">&-", ["list"], 0), ("2>&-", ["diff", "/absent"], 2)])
def test_a_closed_output_changes_no_exit_code(examples: Path, closed: str, words: list[str], code: int) -> None:
    """What was done is not reported as failed; 1 of ``diff`` would mean that two checkpoints differ."""
    command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "nxd_ckpt.cli", *words, str(examples)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (code, "") == (ended.returncode, ended.stderr)


@pytest.mark.parametrize("command", LOOKING)
def test_errors_are_one_line_unless_asked(run: Run, tmp_path: Path, command: str) -> None:
    """``--traceback`` lets the exception through."""
    outcome = run(command, tmp_path / "absent")
    assert (1, "") == (outcome.code, outcome.out)
    assert f"nxd-ckpt: error: checkpoint directory {tmp_path}/absent does not exist\n" == outcome.err
    with pytest.raises(CheckpointNotFound):
        run(command, tmp_path / "absent", "--traceback")


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("/run/.nxd_ckpt/journal.json", "/run (or .nxd_ckpt in it)"),
        ("/run/.nxd_ckpt/staging/a-1/model/x.pt", "/run (or .nxd_ckpt in it)"),
        ("/data/.whole.incomplete", "/data/whole"),
        ("/data/.whole.incomplete/model.pt", "/data/whole"),
        ("/data/.step.tar.replaced", "/data/step.tar"),
        ("/data/.whole.lease/.nxd_ckpt/lease.json", "/data/whole"),
        ("/data/.hidden/manifest.json", "/data/.hidden/manifest.json"),
    ],
)
def test_errors_of_the_system_name_what_users_know(
    run: Run, examples: Path, monkeypatch: pytest.MonkeyPatch, file: str, named: str
) -> None:
    """In one line: not a journal that there may not even be, nor the name under which an output is written."""

    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr("nxd_ckpt.storage.local.LocalStorage.read", refuse)
    outcome = run("verify", examples)
    assert (1, f"nxd-ckpt: error: {named}: Permission denied\n") == (outcome.code, outcome.err)


def test_messages_name_options(run: Run, examples: Path, tmp_path: Path) -> None:
    """As this command spells them: not the keyword of the function that complains."""
    outcome = run("convert", "--to", "hf", examples / "zero1", tmp_path / "out")
    assert "as --config of convert; or pass --mapping" in outcome.err
    outcome = run("convert", examples / "zero1", tmp_path / "out")
    assert "pass --to, tag (nxd_ckpt's own) or one of dcp, files, hf, torchtitan, tar" in outcome.err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("pass saved_param_names=: for each", "pass --saved-param-names: for each"),
        ("pass overwrite=True to replace it", "pass --overwrite to replace it"),
        ("num_workers must be at least 1", "--num-workers must be at least 1"),
        ("from dp=2 tp=4 to dp=1", "from dp=2 tp=4 to dp=1"),
        ("partitions and stages are words", "partitions and stages are words"),
        ("'num_workers' in /data/num_workers/x", "'num_workers' in /data/num_workers/x"),
    ],
)
def test_keywords_become_options(message: str, expected: str) -> None:
    """And nothing else does: sizes, words, names in quotes and paths stay."""
    assert expected == in_flags(message, flags_of(parsers()[1]["convert"]))


def test_options_have_hyphens() -> None:
    for name, parser in parsers()[1].items():
        options = {option for action in parser._actions for option in action.option_strings if "_" in option}
        assert set() == options, name


@pytest.mark.parametrize(
    ("line", "expected"),
    [("nxd-ckpt con", {"convert"}), ("nxd-ckpt convert --part", {"--partitions"}), ("nxd-ckpt verify --al", {"--all"})],
)
def test_the_shell_completes(line: str, expected: set[str], tmp_path: Path) -> None:
    """Commands and their options, as argcomplete's shell function asks for them; without importing torch."""
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run(
        [sys.executable, "-m", "nxd_ckpt.cli"], cwd=REPOSITORY, env={**os.environ, **asked}, check=True, timeout=600
    )
    assert expected == {found.strip() for found in (tmp_path / "found").read_text().split("\n")}


def test_an_interrupt_is_quiet(run: Run, examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a long verification: the shell's exit code for it, no traceback."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nxd_ckpt.storage.local.LocalStorage.read_into", interrupt)
    outcome = run("verify", examples)
    assert (130, "", "nxd-ckpt: interrupted\n") == (outcome.code, outcome.out, outcome.err)


def test_warnings_go_to_stderr(run: Run, copied: Path) -> None:
    """Once each, so that a JSON document stays one."""
    model = copied / "z_plain" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    torch.save(torch.load(model), model)
    (copied / "z_plain" / "done").write_text("1")  # as neuronx-distributed ends a save
    outcome = run("inspect", copied, "z_plain", "--json")
    assert "neuronx_distributed" == outcome.document["written_by"]
    warning = f"nxd-ckpt: warning: {copied}/z_plain: its 'done' marker is not that of its manifest"
    assert 1 == outcome.err.count(warning)
    assert outcome.err == run("inspect", copied, "z_plain", "--json").err
    os.rename(copied / "z_plain", copied / "z\n\x1b[2J\u202e")
    said = rf"nxd-ckpt: warning: {copied}/z\n\x1b[2J\u202e: its 'done' marker is not that of its manifest"
    assert run("inspect", copied, "z\n\x1b[2J\u202e").err.startswith(said), "names cannot move the cursor"


def test_help_does_not_wait_for_torch() -> None:
    """torch takes a second to import: parsing and ``--help`` do without it."""
    program = """
import contextlib, sys
from nxd_ckpt.cli.main import COMMANDS, main
for arguments in ([], *([command.name] for command in COMMANDS)):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):
        main([*arguments, "--help"])
print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    outcome = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (0, "False\n") == (outcome.returncode, outcome.stdout), outcome.stderr


@pytest.mark.parametrize(
    ("line", "error", "example"),
    [
        (["inspct", "run"], "no command 'inspct' (did you mean 'inspect'?); the commands are list, ", "list run1"),
        (["show", "run"], "no command 'show' (did you mean 'inspect'?)", "list run1"),
        (["help", "verify"], "no command 'help' (did you mean '--help'?)", "list run1"),
        (["verify", "run", "--qiet"], "unrecognized arguments: '--qiet' (did you mean '--quiet'?)", "verify run1"),
        (["verify", "--tag", "t", "run"], "'--tag' (did you mean 'DIR TAG'?)", "verify run1"),
        (["diff", "run", "a", "b"], "unrecognized arguments: 'b'", "diff run1/step_200 run1/step_300"),
        (["prune", "run"], "error: give rules: ", "prune run1 --last 3"),
        (["prune", "run", "--keep", "1"], "did you mean '--last'?", "prune run1 --last 3"),
        (["list"], "the following arguments are required: DIR", "list run1"),
        (["list", "a", "--jso"], "unrecognized arguments: '--jso' (did you mean '--json'?)", "list run1"),
        (["inspect", "a", "--rank", "x"], "argument --rank: invalid int value: 'x'", "inspect run1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_misspelt_is_suggested(
    line: list[str], error: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a few lines, with an example of the command, however many options that has."""
    with pytest.raises(SystemExit) as exited:
        main(line)
    said = capsys.readouterr().err
    assert 2 == exited.value.code
    assert error in said
    assert f"example: nxd-ckpt {example}" in said
    assert 2 == said.count("\n")


def test_the_help_groups_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Each once, in the group that says what it is for."""
    assert 0 == main([])
    said = capsys.readouterr().out
    groups = {title.partition(" ")[0]: commands for title, commands in GROUPS.items()}
    assert ["look", "prove", "keep", "write"] == list(groups)
    lines = [line for line in said.splitlines() if line.startswith("  ") and line[2:3].islower()]
    listed = [line.split()[0] for line in lines]
    assert [command.name for commands in groups.values() for command in commands] == listed


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (["list", "{run}n"], "does not exist; did you mean {run}?"),
        (["inspect", "{run}", "setp_1"], "no tag 'setp_1' (did you mean 'step_1'?)"),
        (["verify", "{run}/setp_1"], "does not exist; did you mean {run}/step_1?"),
        (["unpin", "{run}", "setp_1"], "no tag 'setp_1' (did you mean 'step_1'?), pinned or not"),
        (["convert", "{run}/nowhere", "{run}/out", "--to", "tag"], "checkpoint directory {run}/nowhere does not exist"),
        (["convert", "{run}/step_1", "{run}/out", "--to=tag", "--dp=0"], "--dp must be a whole number of at least 1"),
        (["cp", "{run}/empty", "{run}/out"], "found nothing"),
        (["list", ""], "must not be empty"),
        (["list", "https://host/run"], "https://host/run: checkpoints are not read from web servers"),
        (["list", "gss://bucket/run"], "unknown scheme 'gss' (did you mean gs://?)"),
        (["list", "hdfs://host/run"], "needs pyarrow: pip install pyarrow"),
    ],
)
def test_bad_input_is_one_line_that_helps(
    line: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names with the ones that were meant, packages that are missing, numbers that cannot be."""
    place = tmp_path / "run"
    save_checkpoint(place, "step_1", {"weight": torch.ones(2)})
    close_checkpointers()
    (place / "empty").mkdir()
    if "hdfs" in line[1] and find_spec("pyarrow") is not None:
        pytest.skip("pyarrow is installed")
    assert 1 == main([word.format(run=place) for word in line])
    said = capsys.readouterr().err
    assert error.format(run=place) in said
    assert 1 == said.count("\n")


def test_two_names_of_one_option_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "--to", "files", "in", "out", "--no-optimizer", "--model-only"])
    assert "--no-optimizer and --model-only are one option" in capsys.readouterr().err
    for flag in ("--param-names", "--saved-param-names"):
        args = parsers()[0].parse_args(["convert", "--to", "files", "in", "out", flag, "names.json"])
        assert "names.json" == args.saved_param_names


@pytest.mark.parametrize("plain", [False, True])
def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: bool) -> None:
    """Words of good news are green there, unless NO_COLOR is set; an output to a file has none."""
    save_checkpoint(tmp_path, "step_1", {"weight": torch.ones(2)})
    close_checkpointers()
    monkeypatch.setenv("NO_COLOR", "1" if plain else "")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        assert 0 == main(["list", str(tmp_path)])
    assert ("\x1b[32mlatest\x1b[0m" in terminal.getvalue()) is not plain


def test_every_command_fits_80_columns(
    run: Run, examples: Path, golden: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lines are broken at spaces, and rows of tables between columns; no word is lost, whatever the width."""
    nxd = saved(golden, "f_dp2_tp2_bf16_master_avoid_lp_xser").directory
    commands: list[tuple[str | Path, ...]] = [
        ("list", examples),
        *(("inspect", directory) for directory in (nxd, examples)),
        *(("inspect", directory, "--tensors") for directory in (nxd, examples)),
        *(("inspect", directory, "--by-prefix") for directory in (nxd, examples)),
        ("verify", nxd),
        ("diff", nxd, examples, "--quiet"),
        ("doctor", nxd),
        ("watch", nxd, "--once"),
        ("prune", examples, "--last", "1", "--dry-run"),
        ("convert", nxd / "step_3", tmp_path / "whole", "--to", "files", "--dry-run"),
    ]
    wide = [run(*command).out for command in commands]
    _on_a_terminal(monkeypatch)
    for command, expected in zip(commands, wide, strict=True):
        narrow = run(*command).out
        too_long = [line for line in narrow.splitlines() if len(line) > 80 and " " in line.strip()]
        assert [] == too_long, command
        if command[0] not in ("list", "diff"):  # a list leaves columns out, and ages change
            assert _words(expected) == _words(narrow), command


def _on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def _words(text: str) -> list[str]:
    """But for ages."""
    return sorted(word for word in text.split() if not word.isdigit() and word not in ("s", "min", "h", "d"))
