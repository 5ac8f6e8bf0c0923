"""Processes of the tests: a server that has imported what they all need forks them in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess

from nxd_ckpt.emulation.child import exit_code, leave
from nxd_ckpt.emulation.launcher import free_ports

FORKED = multiprocessing.get_context("forkserver")
# nxd_ckpt imports lazily: the last two name what a save and a load import. Optimizers that step import torch._dynamo.
# torch-xla is left out where it is not installed. Its import starts no thread and touches no device.
FORKED.set_forkserver_preload(
    [
        "tests.support.uncollected",  # the first
        "boto3",
        "pytest",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch_xla.distributed.zero_redundancy_optimizer",
        "nxd_ckpt.testing.storage",
        "tests.protocol.states",
        "tests.support.frozen",  # the last
    ]
)


class Program:
    """A running program, as ``python -c SOURCE ARGUMENTS...``. It ends as an interpreter does, up to and
    with the functions of ``atexit``.

    Args:
        source: the program's text.
        arguments: its ``sys.argv[1:]``.
        environment: variables to set beside those of this process.
    """

    def __init__(self, source: str, *arguments: object, environment: dict[str, str] | None = None) -> None:
        self._written = tempfile.TemporaryDirectory(prefix="nxd_ckpt_program_")
        directory, given = Path(self._written.name), [str(argument) for argument in arguments]
        self._outputs = [directory / "stdout", directory / "stderr"]
        self._process = FORKED.Process(target=_run, args=(source, given, environment or {}, self._outputs))
        self._process.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._written.cleanup()

    def wait(self, timeout: float = 600.0) -> CompletedProcess[str]:
        """Its exit code, and all that it wrote."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"the program still runs after {timeout} s"
        return CompletedProcess([], self._process.exitcode, *[output.read_text() for output in self._outputs])


def run_program(source: str, *arguments: object) -> CompletedProcess[str]:
    """A :class:`Program` from its start to its end."""
    with Program(source, *arguments) as program:
        return program.wait()


def run_file(path: Path, *arguments: object) -> CompletedProcess[str]:
    """``python PATH ARGUMENTS...``, as a :class:`Program`."""
    return run_program(f"import runpy\nrunpy.run_path({str(path)!r}, run_name='__main__')", *arguments)


def heed_ctrl_c() -> None:
    """For ``preexec_fn=``: tests that run in the background (nohup, &) ignore SIGINT, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_ranks(source: str, *arguments: Sequence[object]) -> list[CompletedProcess[str]]:
    """A program on as many ranks as there are lists of arguments, each of which finds what torchrun would tell it."""
    common = {"WORLD_SIZE": str(len(arguments)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0])}
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                Program(source, *own, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            )
            for rank, own in enumerate(arguments)
        ]
        return [program.wait() for program in programs]


_TO_THEIR_ENDS = """
import gc, os, sys
import torch.distributed.checkpoint
gc.freeze()
directory, *names = sys.argv[1:]
children = {}
for name in names:
    if (pid := os.fork()) == 0:
        break
    children[name] = pid
else:
    for name, pid in children.items():
        with open(f"{directory}/{name}.code", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    raise SystemExit
for number, stream in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(f"{directory}/{name}.{stream}", os.O_WRONLY | os.O_CREAT), number)
with open(f"{directory}/{name}.py") as file:
    program = compile(file.read(), name, "exec")
sys.argv = [name]
exec(program)
"""


def run_to_their_ends(programs: Mapping[str, str]) -> dict[str, CompletedProcess[str]]:
    """Programs, at the same time, each in an interpreter to its very end, past what :class:`Program` leaves out.

    They are forked by the main module of a new interpreter, once it has imported torch, which takes longest.
    """
    numbers = {program: str(number) for number, program in enumerate(programs)}
    with tempfile.TemporaryDirectory(prefix="nxd_ckpt_programs_") as written:
        directory = Path(written)
        for program, number in numbers.items():
            (directory / f"{number}.py").write_text(programs[program])
        subprocess.run([sys.executable, "-c", _TO_THEIR_ENDS, written, *numbers.values()], check=True, timeout=600)

        def said(program: str, what: str) -> str:
            return (directory / f"{numbers[program]}.{what}").read_text()

        return {
            program: CompletedProcess([], int(said(program, "code")), said(program, "stdout"), said(program, "stderr"))
            for program in programs
        }


def _run(source: str, arguments: list[str], environment: dict[str, str], outputs: list[Path]) -> None:
    for stream, output in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    program = compile(source, "<program>", "exec")
    leave(exit_code(lambda: exec(program, {"__name__": "__main__"})))
