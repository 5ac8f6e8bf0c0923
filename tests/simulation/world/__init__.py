"""A simulated world for tests of what happens when things go wrong; needs greenlet. docs/reliability.md.

========================  ==================================================================================
``World``                 a scheduler with a clock: tasks of processes, in an order that a seed decides
``inhabited``             within, time and threads of ``nxd_ckpt`` are those of a world
``Disk``, ``DiskStorage``  a POSIX file system that knows what a crash leaves of it, and a storage on it
``SystemCalls``           those that the real ``LocalStorage`` makes, on such a disk
``crash_states``          every state in which a loss of power may leave such a disk, each as ``Remains``; ``Seen``
``store.ObjectStore``,     a service like S3, and the product's own S3 storage on it, by way of a network that may lose
``store_client``          requests and replies; needs boto3
``Killed``, ``Stuck``     what a dead process's tasks get; what is raised where tasks wait for ever
========================  ==================================================================================
"""

from tests.simulation.world.crash_states import Remains, Seen, crash_states
from tests.simulation.world.disk import Change, Disk, File, Folder, Unanswered, contents
from tests.simulation.world.disk_storage import DiskStorage
from tests.simulation.world.system_calls import SystemCalls
from tests.simulation.world.threads import EPOCH, AtOnce, inhabited
from tests.simulation.world.world import Killed, Process, Stuck, Task, World

__all__ = [
    "EPOCH", "AtOnce", "Change", "Disk", "DiskStorage", "File", "Folder", "Killed", "Process", "Remains", "Seen",
    "Stuck", "SystemCalls", "Task", "Unanswered", "World", "contents", "crash_states", "inhabited",
]
