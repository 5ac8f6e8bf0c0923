"""The staging memory: page aligned, reused, capped by what the host has left."""

import ctypes
from pathlib import Path

import pytest

from nxd_ckpt.storage import arena
from nxd_ckpt.storage.arena import PAGE, Arena, available_memory, default_cap

GIB = 2**30


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_memory_is_page_aligned_and_reused() -> None:
    """A smaller or equal request gets the same memory; its content is whatever was there."""
    arena = Arena(10 * PAGE)
    first = arena.reserve(3 * PAGE - 5)
    first[:3] = b"abc"
    assert 3 * PAGE - 5 == len(first)
    assert 0 == address(first) % PAGE
    again = arena.reserve(3 * PAGE)
    assert address(first) == address(again)
    assert b"abc" == bytes(again[:3])


def test_an_arena_grows_up_to_its_cap() -> None:
    """A larger request gets new memory, up to the cap; beyond it raises."""
    arena = Arena(10 * PAGE)
    del_me = arena.reserve(PAGE)
    del_me.release()
    assert 10 * PAGE == len(arena.reserve(10 * PAGE))
    with pytest.raises(MemoryError, match="cap"):
        arena.reserve(10 * PAGE + 1)


def test_nothing_is_a_size() -> None:
    """An empty wave needs no memory, and after a release there is some again."""
    arena = Arena(PAGE)
    assert 0 == len(arena.reserve(0))
    arena.release()
    assert PAGE == len(arena.reserve(PAGE))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        # A container's own root is its group.
        ({"sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/memory.current": f"{GIB}\n"}, 3 * GIB),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 8 * GIB),
        # Page cache gives way.
        (
            {
                "sys/fs/cgroup/memory.max": f"{4 * GIB}",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            },
            3 * GIB,
        ),
        # An unlimited group in a limited one.
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": "max",
                "sys/fs/cgroup/job/memory.max": f"{2 * GIB}",
                "sys/fs/cgroup/job/memory.current": f"{GIB}",
            },
            GIB,
        ),
        # Version 1.
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{5 * GIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
            },
            4 * GIB,
        ),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 8 * GIB),
        # More is used than allowed.
        ({"sys/fs/cgroup/memory.max": f"{GIB}", "sys/fs/cgroup/memory.current": f"{2 * GIB}"}, 0),
    ],
)
def test_the_room_is_the_smallest_of_all_limits(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    """The host's available memory, and what each control group has left."""
    write(tmp_path, MEMINFO | files)
    assert expected == available_memory(tmp_path)


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > 0


def test_the_default_cap_is_shared_by_the_host_s_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four fifths of the room, divided; but never less than 64 MiB."""
    assert default_cap(1) >= 64 * 2**20
    for room, expected in ((80 * GIB, int(80 * GIB * 0.8) // 32), (GIB, 64 * 2**20)):
        monkeypatch.setattr(arena, "available_memory", lambda room=room: room)
        assert expected == default_cap(32)
