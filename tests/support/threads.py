"""Calls that are made at the same time, each in a thread of its own."""

import threading
from collections.abc import Callable
from typing import Any


def in_threads(*calls: Callable[[], Any]) -> None:
    """Make all of them at once, and raise what the first one raised, once all have ended."""
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
