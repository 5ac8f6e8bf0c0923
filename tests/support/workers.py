"""``pytest --workers N``: processes that take one file of tests after the other.

They are forked once all tests are collected, and share the server that forks ranks: importing everything, once for each
process, takes as long as many tests.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_Place = tuple[str, tuple[str, int | None, str]]
"""A test's id and location."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, metavar="N", help="processes that share the files of tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in worker processes, if there shall be several and nothing went wrong before."""
    option = session.config.option
    if option.workers < 2 or option.collectonly or session.testsfailed:
        return None
    capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
    capture.resume_global_capture()  # of what forked processes print, too
    forkserver.ensure_running()
    capture.suspend_global_capture()
    directory = _factory(session.config).getbasetemp()
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        reporter.showfspath = False  # tests of several files end in turns
    numbers, end = os.pipe()  # of the files that no worker has taken; less than a pipe holds
    os.write(end, b"".join(number.to_bytes(4, "big") for number in range(len(files))))
    os.close(end)
    workers: list[_Worker] = []
    for index in range(option.workers):
        workers.append(_Worker(session, files, numbers, directory / f"worker{index}", workers))
    os.close(numbers)
    try:
        while running := {worker.channel: worker for worker in workers if not worker.channel.closed}:
            for channel in wait(list(running)):
                running[channel].receive()  # type: ignore[index]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers:
            worker.end()
    return True


class _Worker:
    """A worker, as the process sees it that reports what it says."""

    def __init__(
        self,
        session: pytest.Session,
        files: list[list[pytest.Item]],
        numbers: int,
        directory: Path,
        others: list[_Worker],
    ) -> None:
        self._config, self._hook = session.config, session.config.hook
        self._at: _Place | None = (directory.name, ("", None, ""))  # nothing to run is left: None
        self.channel, far_end = Pipe(duplex=False)
        self._config.get_terminal_writer().flush()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            for one in (self, *others):  # who writes to them ends when nobody reads any more
                one.channel.close()
            _work(session, files, numbers, directory, far_end)
        far_end.close()

    def receive(self) -> None:
        """Pass on one thing that the worker says. If it died, the test that it was in has failed."""
        try:
            kind, *content = pickle.loads(self.channel.recv_bytes())
        except EOFError:
            if self._at is not None:
                self._fail("the worker process ended")
            self.channel.close()
            return
        if kind == "start":
            self._at = (content[0], content[1])
            self._hook.pytest_runtest_logstart(nodeid=content[0], location=content[1])
        elif kind == "report":
            report = self._hook.pytest_report_from_serializable(config=self._config, data=content[0])
            self._hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            self._hook.pytest_runtest_logfinish(nodeid=content[0], location=content[1])
        elif kind == "warning":
            text, category, file, line, when, nodeid, location = content
            message = warnings.WarningMessage(text, type(category, (Warning,), {}), file, line)
            told = {"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
            self._hook.pytest_warning_recorded.call_historic(kwargs=told)
        else:
            if kind == "error":
                self._fail(content[0])
            self._at = None

    def end(self) -> None:
        """Wait for its end; bring that about if it still has something to say."""
        if not self.channel.closed:
            os.kill(self._pid, signal.SIGKILL)
            self.channel.close()
        os.waitpid(self._pid, 0)

    def _fail(self, why: str) -> None:
        """The test that ran, or ran last."""
        assert self._at is not None
        report = pytest.TestReport(*self._at, {}, "failed", why, "call")
        self._hook.pytest_runtest_logreport(report=report)


class _Sender:
    """The plugin of a worker that says what happens."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self._config, self._channel = config, channel

    def send(self, *content: Any) -> None:
        self._channel.send_bytes(pickle.dumps(content))

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.send("start", nodeid, location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.send("report", data)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.send("finish", nodeid, location)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if when == "runtest":  # others were said before
            one = warning_message
            text, category = str(one.message), one.category.__name__
            self.send("warning", text, category, one.filename, one.lineno, when, nodeid, location)


def _work(
    session: pytest.Session, files: list[list[pytest.Item]], numbers: int, directory: Path, channel: Connection
) -> None:
    """The whole life of a worker."""
    sender = _Sender(session.config, channel)
    try:
        _settle(session.config, directory)
        session.config.pluginmanager.register(sender)
        within = SimpleNamespace(listchain=lambda: [session])  # after a file what the session shares stays
        for file in _taken(files, numbers):
            for item, following in zip(file, [*file[1:], within], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        session._setupstate.teardown_exact(None)
        sender.send("end")
    except BaseException:
        sender.send("error", traceback.format_exc())
    finally:
        channel.close()
        os._exit(0)


def _settle(config: pytest.Config, directory: Path) -> None:
    """Have what the processes would fight for: a temporary directory, files of captured output, the terminal."""
    directory.mkdir(mode=0o700)
    _factory(config)._basetemp = directory
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        reporter._tw._file = io.StringIO()
    # Another process than its parent may not ask after the server. It runs as long as this process can be forked from.
    server: Any = forkserver._forkserver
    server.ensure_running = resource_tracker.ensure_running


def _factory(config: pytest.Config) -> Any:
    return config._tmp_path_factory  # type: ignore[attr-defined]


def _taken(files: list[list[pytest.Item]], numbers: int) -> Iterator[list[pytest.Item]]:
    """The files that this worker takes, until none is left."""
    while number := os.read(numbers, 4):
        yield files[int.from_bytes(number, "big")]
