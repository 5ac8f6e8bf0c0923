"""A scheduler with a clock of its own: tasks run one at a time, in an order and at times that a seed decides.

Tasks are greenlets. One runs until it waits: for time to pass, or for another task. Whatever takes time on a real host
takes simulated seconds here, so that the order of events is the order of the times at which they end; waiting itself
costs nothing. A process is what dies as one: its tasks never run again.
"""

import threading
import traceback
from collections.abc import Callable
from heapq import heappop, heappush
from math import log
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet


class Killed(BaseException):
    """What is thrown into the tasks of a process that died: no code of ours may catch it and go on."""


class Stuck(AssertionError):
    """Tasks wait for ever, or for longer than the world lasts; the message holds their stacks."""


class Process:
    """What dies as one. ``machine`` tells processes that see each other's pids; ``skew`` is its wall clock's error in
    seconds; it does nothing before ``stalled_until``."""

    def __init__(self, pid: int, machine: str) -> None:
        self.pid, self.machine = pid, machine
        self.alive = True
        self.skew = 0.0
        self.stalled_until = 0.0
        self.when_killed: list[Callable[[], None]] = []
        """Called once it is dead."""


class Task:
    """One thread of a process. ``error`` is what it ended with."""

    def __init__(self, number: int, name: str, process: Process, run: Callable[[], Any]) -> None:
        self.number, self.name, self.process = number, name, process
        self.ended = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.thread: Any = None
        self.locals: dict[int, dict[str, Any]] = {}
        self.turn = 0
        """Goes up whenever the task runs: what was to wake it before counts no more."""
        self.woken = False
        self.awaiting: list[Task] = []
        self._run = run
        self.greenlet: greenlet | None = None
        """What runs it, once its turn has come."""

    @property
    def over(self) -> bool:
        """Whether it will never run again."""
        return self.ended or not self.process.alive

    def stack(self) -> str:
        """Where it waits."""
        frame = self.greenlet.gr_frame if self.greenlet is not None else None
        lines = traceback.format_stack(frame)[-6:] if frame is not None else []
        return f"{self.name} of process {self.process.pid}:\n{''.join(lines)}"

    def run(self) -> None:
        try:
            self.result = self._run()
        except BaseException as error:
            self.error = error
        self.ended = True


class World:
    """Processes, their tasks, and the time. Everything random is drawn from ``random``, which ``seed`` starts.

    ``lasts`` is when it ends, in simulated seconds: what has not ended by then is stuck.
    """

    def __init__(self, seed: int | str, lasts: float = 3600.0) -> None:
        self.seed, self.random, self.lasts = seed, Random(seed), lasts
        self.now = 0.0
        self.tasks: list[Task] = []
        self.processes: list[Process] = []
        self.current: Task | None = None
        self.hub = getcurrent()
        """Who runs when no task does."""
        self._due: list[tuple[float, int, int, Task]] = []
        self._pushed = 0

    def start_process(self, machine: str = "machine") -> Process:
        process = Process(1000 + len(self.processes), machine)
        self.processes.append(process)
        return process

    def spawn(self, process: Process, run: Callable[[], Any], name: str = "main") -> Task:
        """A task that begins as soon as its turn comes."""
        task = Task(len(self.tasks) + 1, name, process, run)
        self.tasks.append(task)
        self._push(task, self.now + self.duration(1e-4))
        return task

    def run(self, *tasks: Task) -> None:
        """Until these have ended, or their processes have died. Raises Stuck."""
        while any(not task.ended and task.process.alive for task in tasks):
            following = self._next()
            if following is None or self.now > self.lasts:
                stacks = "\n".join(task.stack() for task in self.tasks if not task.over)
                raise Stuck(f"after {self.now:.0f} simulated seconds tasks are still waiting:\n{stacks}")
            self._switch_to(following)
            self.current = None

    def duration(self, mean: float) -> float:
        """How long something takes that takes ``mean`` seconds on average; once in a while far longer."""
        drawn = self.random.random()
        return -log(1.0 - drawn) * (mean if drawn < 0.996 else 20.0 * mean)

    def pause(self, seconds: float) -> None:
        """Let simulated seconds pass for the running task."""
        task = self.current
        if task is None:  # whoever looks at the world from outside takes no time
            return
        process, due, ends = task.process, self._due, self.now + seconds
        if not process.alive:
            raise Killed
        if (due and due[0][0] <= ends) or process.stalled_until > ends or ends > self.lasts:
            self._pushed += 1
            heappush(due, (ends, self._pushed, task.turn, task))
            self._leave(task)
        else:  # it is the next itself
            self.now = ends

    def park(self, timeout: float | None) -> bool:
        """Wait to be woken; whether that was before ``timeout`` seconds had passed."""
        task = self.current
        if task is None:
            raise Stuck("waiting outside of any task, for what no task will do")
        if not task.process.alive:
            raise Killed
        task.woken = False
        if timeout is not None:
            self._push(task, self.now + max(timeout, 0.0))
        self._leave(task)
        return task.woken

    def wake(self, task: Task) -> None:
        task.woken = True
        self._push(task, self.now + self.duration(1e-5))

    def kill(self, process: Process) -> None:
        """Nothing of it runs any more, from the next moment on."""
        process.alive = False
        for tell in process.when_killed:
            tell()

    def close(self) -> None:
        """End all tasks."""
        for process in self.processes:
            process.alive = False
        for task in self.tasks:
            if not task.ended and task.greenlet is not None:
                self.current = task
                task.greenlet.throw(Killed)
        self.current = None

    def _push(self, task: Task, when: float) -> None:
        self._pushed += 1
        heappush(self._due, (when, self._pushed, task.turn, task))

    def _next(self) -> Task | None:
        due = self._due
        while due:
            when, _, turn, task = heappop(due)
            if turn != task.turn or not task.process.alive or task.ended:
                continue
            if task.process.stalled_until > when:
                self._push(task, task.process.stalled_until)
                continue
            if when > self.now:
                self.now = when
            task.turn += 1
            return task
        return None

    def _leave(self, task: Task) -> None:
        """Run others until it is the turn of ``task`` again."""
        following = self._next() if self.now <= self.lasts else None
        if following is None:
            self.hub.switch()
        elif following is not task:
            self._switch_to(following)
        if not task.process.alive:
            raise Killed

    def _switch_to(self, task: Task) -> None:
        self.current = task
        if task.greenlet is None:
            task.greenlet = _idle.greenlets.pop() if _idle.greenlets else greenlet(_run_tasks, self.hub)
            task.greenlet.switch(self, task)
        else:
            task.greenlet.switch()


class _Idle(threading.local):
    """The greenlets of a thread that have no task. A new one, with a stack of its own, takes longer to make than most
    tasks to run."""

    def __init__(self) -> None:
        self.greenlets: list[greenlet] = []


_idle = _Idle()


def _run_tasks(world: World, task: Task) -> None:
    while True:
        task.run()
        task.greenlet = None
        _idle.greenlets.append(getcurrent())
        hub = world.hub
        del world, task
        world, task = hub.switch()
