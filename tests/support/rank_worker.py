"""A rank of a `RankPool`: it runs calls, one after the other, until the pool closes the connection."""

import faulthandler
import importlib
import importlib.util
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, cast


def work(channel: Connection, rank: int, environment: dict[str, str], log: Path, stacks: Path) -> None:
    """The whole life of a rank, with this environment; what it prints goes to ``log``, its stacks to ``stacks``.

    Answers calls: (call id, True, pickled result) or (call id, False, (summary, traceback, exception)).
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    _answer_calls(channel, rank)


def _answer_calls(channel: Connection, rank: int) -> None:
    calls: queue.SimpleQueue[tuple[int, list[str], tuple[str, str, str], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, calls), name="calls", daemon=True).start()
    while True:
        call_id, import_path, address, arguments = calls.get()
        answer: tuple[int, bool, Any]
        try:
            sys.path[:] = import_path
            fn = _find(*address)
            answer = (call_id, True, pickle.dumps(fn(rank, *pickle.loads(arguments))))
        except Exception as error:
            answer = (call_id, False, (f"{type(error).__name__}: {error}", traceback.format_exc(), _pickled(error)))
        channel.send(answer)


def _receive(channel: Connection, calls: queue.SimpleQueue[Any]) -> None:
    """In a thread of its own: a pool that is gone ends this process even in the middle of a call."""
    try:
        while True:
            calls.put(channel.recv())
    except (EOFError, OSError):
        os._exit(0)


def _find(file: str, module_name: str, qualified_name: str) -> Callable[..., Any]:
    found: Any = _module(file, module_name)
    for name in qualified_name.split("."):
        found = getattr(found, name)
    return cast("Callable[..., Any]", found)


def _module(file: str, name: str) -> ModuleType:
    """The module ``name``, by import where that gives the parent's file, else from the file."""
    known = sys.modules.get(name)
    if known is None and name != "__main__":
        try:
            known = importlib.import_module(name)
        except ModuleNotFoundError:
            known = None
    if known is not None and Path(known.__file__ or "").resolve() == Path(file).resolve():
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module can be loaded from {file}")
    module = importlib.util.module_from_spec(spec)
    # Before execution, so that the arguments' classes, pickled by module name, are found in it.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _pickled(error: Exception) -> bytes | None:
    """The exception, if it survives the way to the parent."""
    try:
        dumped = pickle.dumps(error)
        pickle.loads(dumped)
    except Exception:
        return None
    return dumped

