"""Tasks run in order on a few threads and the caller's; the first error of them is raised, and nothing is left over."""

import threading

import pytest

from nxd_ckpt.tag.range_reader import ReadPool


@pytest.mark.parametrize("threads", [1, 2])
def test_who_waits_for_the_first_needs_only_those(threads: int) -> None:
    """Only those need to be done; with no other thread, only those are."""
    done: list[int] = []
    with ReadPool(threads) as pool:
        for number in range(10):
            pool.submit(lambda scratch, number=number: done.append(number))  # type: ignore[misc]
        pool.wait_for(3)
        assert {0, 1, 2} <= set(done)
        if threads == 1:
            assert [0, 1, 2] == done
        pool.wait_for(pool.submitted)
        assert list(range(10)) == sorted(done)


def test_the_error_of_the_first_task_is_raised() -> None:
    """Though a later one fails earlier; what has not started never does, and the pool can be used again."""
    second_failed = threading.Event()
    later: list[int] = []

    def first(scratch: memoryview) -> None:
        assert second_failed.wait(600)
        raise ValueError("first")

    def second(scratch: memoryview) -> None:
        second_failed.set()
        raise ValueError("second")

    with ReadPool(2) as pool:
        pool.submit(first)
        pool.submit(second)
        with pytest.raises(ValueError, match="first"):
            pool.wait_for(2)
        pool.submit(lambda scratch: later.append(1))
        pool.wait_for(3)
    assert [1] == later
