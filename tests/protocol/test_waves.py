"""State that is larger than the staging memory goes in waves, and nobody can tell from the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.errors import StagingTooLarge
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, recording

MIB = 2**20


def state() -> dict[str, torch.Tensor]:
    """Tensors from nothing to 10 MiB, one in another order of dimensions, one tied."""
    torch.manual_seed(0)
    large = torch.randn(10, MIB // 4)
    return {
        "large": large,
        "tied": large,
        "transposed": torch.randn(700, 1000).t(),
        "half": torch.randn(3 * MIB // 2).bfloat16(),
        "small": torch.randn(7),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
    }


def files_of(path: Path, memory_cap: int | None, use_xser: bool, async_save: bool = False) -> dict[str, bytes]:
    """Every file of a save with this cap that holds state or says where it lies."""
    with Checkpointer(path, memory_cap=memory_cap) as saver:
        saver.save("t", state(), async_save=async_save, use_xser=use_xser)
    assert () == verify_checkpoint(path, "t").problems
    return {
        str(file.relative_to(path)): file.read_bytes()
        for folder in ("model", "index")
        for file in (path / "t" / folder).rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize("use_xser", [False, True])
def test_files_written_in_waves_are_bit_identical(tmp_path: Path, use_xser: bool) -> None:
    """A cap of 4 MiB with a tensor of 10 MiB, against all at once."""
    at_once = files_of(tmp_path / "at_once", None, use_xser)
    in_waves = files_of(tmp_path / "in_waves", 4 * MIB, use_xser)
    assert at_once.keys() == in_waves.keys()
    assert [] == [name for name in at_once if at_once[name] != in_waves[name]]


def test_waves_into_a_store_wait_for_their_uploads() -> None:
    """Uploads of a whole wave go on side by side; they are waited for before the next wave takes their memory."""
    log: list[Operation] = []
    state = {f"tensor.{number}": torch.full((256 * 1024,), float(number)) for number in range(20)}
    storage = HookedStorage(MemoryStorage(), recording(log))
    with Checkpointer("unused", storage=storage, memory_cap=8 * MIB) as saver:
        saver.save("t", state)
        model: dict[str, torch.Tensor] = {}
        saver.load("t", model)
    assert [] == [name for name in state if not torch.equal(state[name], model[name])]
    assert 2 == [operation.name for operation in log].count("settle")  # 20 MiB, 8 at a time; the last end the file


def test_an_async_save_in_waves_is_the_same(tmp_path: Path) -> None:
    """All waves but the last are written during the call, so that later changes are not seen."""
    at_once = files_of(tmp_path / "at_once", None, False)
    assert at_once == files_of(tmp_path / "in_waves", 4 * MIB, False, async_save=True)


def test_the_cap_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save asks the arena for more than the cap, whatever the state's size."""
    from nxd_ckpt.storage.arena import Arena

    asked: list[int] = []
    reserve = Arena.reserve

    def noted(self: Arena, nbytes: int) -> memoryview:
        asked.append(nbytes)
        return reserve(self, nbytes)

    monkeypatch.setattr(Arena, "reserve", noted)
    files_of(tmp_path, 4 * MIB, False)
    assert len(asked) > 3
    assert max(asked) <= 4 * MIB


def test_a_tensor_that_fits_in_no_wave(tmp_path: Path) -> None:
    """Below a digest's block of 4 MiB a larger tensor cannot be cut; the message names the remedy."""
    saver = Checkpointer(tmp_path / "ckpt", memory_cap=MIB)
    with pytest.raises(StagingTooLarge, match="raise memory_cap"):
        saver.save("t", state())
    saver.close()
    assert not (tmp_path / "ckpt").exists()
