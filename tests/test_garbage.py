"""Python's collection of garbage, while much is made that is kept."""

import gc
import os
import threading

from nxd_ckpt.surroundings import gc_paused


def collects_in_child() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(int(gc.isenabled()))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_a_child_forked_beside_a_reader_collects_its_garbage() -> None:
    """A data loader's worker, while another thread reads a checkpoint; and where nobody collects, it does not."""
    inside, done = threading.Event(), threading.Event()

    def read() -> None:
        with gc_paused():
            inside.set()
            done.wait()

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    found = gc.isenabled(), collects_in_child()
    done.set()
    thread.join()
    assert (False, True) == found
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            assert not collects_in_child()
        assert not gc.isenabled()
    finally:
        gc.enable()
