"""The threads, locks and times of :mod:`nxd_ckpt.effects`, in a simulated world."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import _base as futures
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from nxd_ckpt import effects
from tests.simulation.world.world import Process, Task, World

EPOCH = 1_700_000_000.0
"""What the wall clock shows when a world begins, in seconds."""


class Thread:
    """As ``threading.Thread``."""

    def __init__(
        self,
        world: World,
        *,
        target: Callable[..., Any],
        name: str = "thread",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool = True,
    ) -> None:
        self.name, self.daemon = name, daemon
        self._world = world
        self._call = partial(target, *args, **(kwargs or {}))
        self._task: Task | None = None

    def start(self) -> None:
        running = self._world.current
        assert running is not None, "a thread is started by a task"
        self._task = self._world.spawn(running.process, self._run, self.name)
        self._task.thread = self

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        task, running = self._task, self._world.current
        assert task is not None
        assert running is not None
        while not task.ended:
            task.awaiting.append(running)
            if not self._world.park(timeout):
                return

    def _run(self) -> None:
        try:
            self._call()
        finally:
            assert self._task is not None
            self._task.ended = True
            for waiting in self._task.awaiting:
                self._world.wake(waiting)


class _Awaited:
    """What tasks wait for, one behind the other."""

    def __init__(self, world: World) -> None:
        self._world, self._waiting = world, deque[Task]()

    def _wait(self, timeout: float | None = None) -> None:
        assert self._world.current is not None
        self._waiting.append(self._world.current)
        self._world.park(timeout)

    def _wake(self, count: int = 1) -> None:
        for _ in range(min(count, len(self._waiting))):
            self._world.wake(self._waiting.popleft())


class Lock(_Awaited):
    """As ``threading.Lock``."""

    _held = False

    def acquire(self, blocking: bool = True) -> bool:
        while self._held:
            if not blocking:
                return False
            self._wait()
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        self._wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """As ``threading.Condition``, whose lock is not to be taken twice."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._notified = deque[Task]()

    def wait(self, timeout: float | None = None) -> bool:
        running = self._world.current
        assert running is not None
        self._notified.append(running)
        self.release()
        try:
            return self._world.park(timeout)
        finally:
            if running in self._notified:
                self._notified.remove(running)
            self.acquire()

    def wait_for(self, is_so: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else self._world.now + timeout
        while not is_so():
            if not self.wait(None if until is None else max(until - self._world.now, 0.0)):
                return is_so()
        return True

    def notify(self, count: int = 1) -> None:
        for _ in range(min(count, len(self._notified))):
            self._world.wake(self._notified.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._notified))


class Semaphore(_Awaited):
    """As ``threading.Semaphore``."""

    def __init__(self, world: World, value: int = 1) -> None:
        super().__init__(world)
        self._value = value

    def acquire(self) -> None:
        while not self._value:
            self._wait()
        self._value -= 1

    def release(self) -> None:
        self._value += 1
        self._wake()


class Event(_Awaited):
    """As ``threading.Event``."""

    _set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._wake(len(self._waiting))

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._wait(timeout)
        return self._set


class SimpleQueue(_Awaited):
    """As ``queue.SimpleQueue``."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._items = deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._wake()

    def get(self) -> Any:
        while not self._items:
            self._wait()
        return self._items.popleft()


class AtOnce(Executor):
    """Does what is submitted before it returns."""

    def __init__(self, workers: int, name: str, initializer: Any = None, arguments: tuple[Any, ...] = ()) -> None:
        if initializer is not None:
            initializer(*arguments)

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Local:
    """As ``threading.local``."""

    def __init__(self, world: World) -> None:
        self.__dict__["_world"] = world

    def __getattr__(self, name: str) -> Any:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._own()[name] = value

    def _own(self) -> dict[str, Any]:
        running = self.__dict__["_world"].current
        own: dict[str, Any] = self.__dict__ if running is None else running.locals.setdefault(id(self), {})
        return own


@contextmanager
def inhabited(world: World) -> Iterator[None]:
    """Within, :mod:`nxd_ckpt.effects` is that of the world, and futures are waited for in it; in the end all tasks."""
    replaced = _host_of(world)
    real, real_threading = {name: getattr(effects, name) for name in replaced}, futures.threading  # type: ignore[attr-defined]
    for name, value in replaced.items():
        setattr(effects, name, value)
    futures.threading = SimpleNamespace(**replaced)  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        try:
            world.close()
        finally:
            futures.threading = real_threading  # type: ignore[attr-defined]
            for name, value in real.items():
                setattr(effects, name, value)


def _host_of(world: World) -> dict[str, Any]:
    def process() -> Process | None:
        return world.current.process if world.current is not None else None

    def time() -> float:
        return EPOCH + world.now + (found.skew if (found := process()) else 0.0)

    def born(pid: int) -> str | None:
        return next((str(pid) for other in world.processes if other.pid == pid and other.alive), None)

    classes = (Thread, Lock, Condition, Semaphore, Event, SimpleQueue)
    return {
        **{kind.__name__: partial(kind, world) for kind in classes},
        "local": partial(Local, world),
        "monotonic": lambda: world.now,
        "monotonic_ns": lambda: int(world.now * 1e9),
        "time": time,
        "sleep": world.pause,
        "uniform": world.random.uniform,
        "get_ident": lambda: world.current.number if world.current is not None else 0,
        "current_thread": lambda: world.current.thread if world.current is not None else None,
        "pid": lambda: found.pid if (found := process()) else 1,
        "processes": lambda: found.machine if (found := process()) else "outside",
        "born": born,
        "yield_disk_to_others": lambda: None,
        "yield_processor_to_others": lambda: None,
    }
