"""A plugin of pytest that runs the tests once for every mutant of a module, each time in a fork of its own.

``pytest -p tests.mutants.session --mutate FILE --outcomes JSON TESTS``. The tests are imported once. A first fork runs
them all on the module as it is, and says which lines each of them runs. Of a mutant only those run which come by its
line, the fastest first, until one fails. In its fork the code of the functions is replaced in place: whoever holds a
function holds the mutant, and nothing is imported anew.
"""

import ast
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from tests.hostile import budget
from tests.mutants.operators import Mutant, mutants
from tests.support.replaced_code import replace_code

_BASELINE_SECONDS = 1800.0
_MEMORY = 2**32
"""Bytes of address space beyond what is used: a mutant without a limit must not take the machine's."""

_CPU_SECONDS = 30
"""That one test may take with a mutant, as long as it may take at all: no signal of Python's ends what hangs in C."""


class Ran(NamedTuple):
    """One test on the module as it is: whether it passed, how long it took, and the module's lines that it ran."""

    passed: bool
    seconds: float
    lines: frozenset[int]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutate", type=Path, help="the module's file")
    parser.addoption("--outcomes", type=Path, help="where to write what became of each mutant, as JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """In place of one run of the tests."""
    file: Path = session.config.getoption("--mutate").resolve()
    # Nothing of what the tests of a fork tell is for the terminal of this process.
    session.config.pluginmanager.unregister(name="terminalreporter")
    ran = _in_fork(lambda: _baseline(session, str(file)), _BASELINE_SECONDS)
    if ran is None or not all(test.passed for test in ran):
        failed = [item.nodeid for item, test in zip(session.items, ran or (), strict=False) if not test.passed]
        raise pytest.UsageError(f"the tests fail on {file.name} as it is: {failed}")
    outcomes = []
    for number, mutant in enumerate(mutants(ast.parse(file.read_text()))):
        outcome = _outcome(session, str(file), number, _tests_of(mutant, session.items, ran))
        outcomes.append({"name": mutant.name, "line": mutant.lines[0], "outcome": outcome})
        print(f"{outcome:9} {mutant.lines[0]:4} {mutant.name:.150}", flush=True)
    session.config.getoption("--outcomes").write_text(json.dumps(outcomes))
    return True


def _baseline(session: pytest.Session, file: str) -> list[Ran]:
    """Run all tests. What the fixtures of a file's first test run counts for all of its tests: they share some."""
    budget.SECONDS *= 30  # each line is traced, which takes its time
    ran, shared = list[Ran](), dict[Path, set[int]]()
    for item, nextitem in _in_order(session.items):
        failed, began, lines = session.testsfailed, time.monotonic(), set[int]()
        item.add_marker(pytest.mark.timeout(0))
        tracer = _tracer(file, lines)
        threading.settrace(tracer)
        sys.settrace(tracer)
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        finally:
            sys.settrace(None)
        first = shared.setdefault(item.path, lines)
        ran.append(Ran(failed == session.testsfailed, time.monotonic() - began, frozenset(lines | first)))
    _become(file, 0)  # raises where no mutant would change anything
    return ran


def _tracer(file: str, lines: set[int]) -> Callable[[FrameType, str, Any], Any]:
    def local(frame: FrameType, event: str, arg: Any) -> Any:
        lines.add(frame.f_lineno)
        return local

    return lambda frame, event, arg: local if frame.f_code.co_filename == file else None


def _tests_of(mutant: Mutant, items: Sequence[pytest.Item], ran: Sequence[Ran]) -> list[tuple[pytest.Item, float]]:
    """The tests that come by its lines, and their seconds, the fastest first."""
    first, last = mutant.lines
    lines = set(range(first, last + 1))
    found = [(item, test.seconds) for item, test in zip(items, ran, strict=True) if test.lines & lines]
    return sorted(found, key=lambda one: one[1])


def _outcome(session: pytest.Session, file: str, number: int, tests: list[tuple[pytest.Item, float]]) -> str:
    if not tests:
        return "unreached"

    def killed() -> bool:
        soft = _used() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
        _become(file, number)
        for item, nextitem in _in_order([item for item, _ in tests]):
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + _CPU_SECONDS, resource.RLIM_INFINITY))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            if session.testsfailed:
                return True
        return False

    survived = _in_fork(killed, 20 + 10 * sum(seconds for _, seconds in tests))
    return "survived" if survived is False else "killed"  # a crash and a hang are noticed, too


def _in_order(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip(items, [*items[1:], None], strict=True)


def _become(file: str, number: int) -> None:
    """Make of the module in ``file`` its mutant of that number."""
    tree = ast.parse(Path(file).read_text())
    before = compile(tree, file, "exec")
    mutants(tree)[number].apply()
    replace_code(before, compile(tree, file, "exec"))


def _used() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _in_fork(work: Callable[[], Any], seconds: float) -> Any:
    """What ``work`` returns in a fork of this process; None if it ends otherwise, or takes longer."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, sending))
    process.start()
    sending.close()
    try:
        return receiving.recv() if receiving.poll(seconds) else None
    except EOFError:
        return None
    finally:
        receiving.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with the processes that it started
        process.kill()
        process.join()


def _work(work: Callable[[], Any], sending: Connection) -> None:
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sending.send(work())
