"""Trying again, and going slower."""

from pathlib import Path

import pytest

from nxd_ckpt import effects
from nxd_ckpt.storage import wrapper
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.transfer import Throttle
from nxd_ckpt.storage.wrapper import RetryingStorage
from nxd_ckpt.testing.storage import Hook, HookedStorage, Operation


def failing_first(times: int, error: OSError) -> tuple[list[str], Hook]:
    """A hook that raises ``error`` the first times, and the operations that it saw."""
    seen: list[str] = []

    def hook(operation: Operation) -> None:
        seen.append(operation.name)
        if len(seen) <= times:
            raise error

    return seen, hook


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError("slow")])
def test_what_may_go_away_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    (tmp_path / "key").write_bytes(b"data")
    seen, hook = failing_first(3, error)
    waits: list[float] = []
    monkeypatch.setattr(effects, "sleep", waits.append)
    storage = RetryingStorage(HookedStorage(LocalStorage(tmp_path), hook), retries=3)
    assert b"data" == storage.read("key")
    assert ["read"] * 4 == seen
    assert 3 == len(waits)
    assert all(0 <= wait <= 20 for wait in waits)


def test_it_gives_up_with_the_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, hook = failing_first(100, ConnectionResetError("reset"))
    monkeypatch.setattr(wrapper, "pause_after", lambda tries: 0.0)
    storage = RetryingStorage(HookedStorage(LocalStorage(tmp_path), hook), retries=2)
    with pytest.raises(ConnectionResetError, match="reset"):
        storage.list()
    assert 3 == len(seen)


@pytest.mark.parametrize("error", [PermissionError("denied"), FileNotFoundError("missing"), OSError(28, "full")])
def test_what_stays_is_not_tried_again(tmp_path: Path, error: OSError) -> None:
    seen, hook = failing_first(100, error)
    storage = RetryingStorage(HookedStorage(LocalStorage(tmp_path), hook))
    with pytest.raises(type(error)):
        storage.read("key")
    assert ["read"] == seen


def test_conditional_writes_are_not_tried_again(tmp_path: Path) -> None:
    """The first try may have arrived, and the second would say that somebody else was faster."""
    seen, hook = failing_first(1, ConnectionResetError("reset"))
    storage = RetryingStorage(HookedStorage(LocalStorage(tmp_path), hook))
    with pytest.raises(ConnectionResetError):
        storage.link_new("key", b"data")
    assert ["link_new"] == seen


def test_a_throttle_lets_bytes_through_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, and a pause is not made up for."""
    now = 100.0
    monkeypatch.setattr(effects, "monotonic", lambda: now)
    throttle = Throttle(1000.0)
    assert [(0.0, 0.5), (0.5, 1.5), (1.5, 3.5)] == [throttle.schedule(nbytes) for nbytes in (500, 1000, 2000)]
    now += 50
    assert [(0.0, 1.0), (1.0, 1.5)] == [throttle.schedule(nbytes) for nbytes in (1000, 500)]
