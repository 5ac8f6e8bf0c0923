"""Hooks of the storage that hold a save."""

import threading

from nxd_ckpt.testing.storage import Operation
from tests.protocol.job import HANGS


class Gate:
    """A hook that holds every write of a data file until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, operation: Operation) -> None:
        if operation.name == "create" and not self.open.wait(HANGS):
            raise TimeoutError("the test never opened the gate")
