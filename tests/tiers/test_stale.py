"""A network file system that answers with ESTALE from one moment on, or once: as after its server was replaced."""

import errno
import os
from pathlib import Path

import pytest

from nxd_ckpt import Checkpointer, Tier
from nxd_ckpt.commit import voting
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from nxd_ckpt.tiers import drain
from tests.tiers.saving import damaged, save, tags_in

LOOKS = ("read", "open", "size", "is_dir", "is_file", "list", "time")


class Stale:
    """A hook that fails ``times`` operations of these names, from the next but so many on, once it was armed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.met = self._left = self._times = 0

    def arm(self, after: int, times: int) -> None:
        self.met, self._left, self._times = 0, after, times

    def __call__(self, operation: Operation) -> None:
        if self._times > 0 and operation.name in self._names:
            self._left -= 1
            if self._left < 0:
                self._times -= 1
                self.met += 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), operation.key)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("times", [1, 10**9])
@pytest.mark.parametrize("names", [LOOKS, (*LOOKS, "write", "create", "link_new", "make_dir", "sync_dir", "rename")])
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.one_in(3)
def test_a_stale_handle(
    tmp_path: Path, is_first: bool, times: int, names: tuple[str, ...], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever operation of a save: what is said to be saved is there, bit for bit, all else is said to have failed,
    and as soon as the place answers, saves go on."""
    monkeypatch.setattr(drain, "_PAUSE", 0.01)
    monkeypatch.setattr(voting, "_PAUSES", (0.01, 0.01))
    stale, places = Stale(names), [tmp_path / "near", tmp_path / "far"]
    storages = [LocalStorage(place) for place in places]
    hooked = HookedStorage(storages[not is_first], stale)
    tiers = [
        Tier(place, storage=hooked if number != is_first else storage)
        for number, (place, storage) in enumerate(zip(places, storages, strict=True))
    ]
    after, step, outcomes = 0, 1, set[bool]()
    with Checkpointer(tiers=tiers) as saver:
        save(saver, step)
        saver.wait(tier=1)
        while after == 0 or stale.met:
            stale.arm(after, times)
            step, after = step + 1, after + stride
            try:
                save(saver, step)
                saver.wait(tier=1)
                saved = True
            except CheckpointError:
                saved = False
            met = stale.met
            stale.arm(0, 0)
            outcomes.add(saved)
            if saved:
                assert all(f"step_{step}" in tags_in(place) for place in places)
            step += 1
            save(saver, step)
            saver.wait(tier=1)
            stale.met = met
    assert False in outcomes, "no save met it"
    assert [] == damaged(places)
    assert all(f"step_{step}" in tags_in(place) for place in places)
