"""What live objects see of a save or a load, in orders and modes that threads and reused memory must not change."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.support.stateful import Extra


class Summed(torch.nn.Module):
    """Sums its weights when it is given its extra state, as a module that repacks them would."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((300, 1000), value))
        self.seen: float | None = None

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        self.seen = float(self.weight.detach().sum())


@pytest.mark.parametrize("verify", [True, "reading", False])
def test_extra_state_comes_after_the_weights(tmp_path: Path, verify: Any) -> None:
    """As with torch's own load_state_dict."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save("one", Summed(1.0))
        live = Summed(0.0)
        checkpointer.load("one", live, verify=verify)
        filled: dict[str, Any] = {}
        checkpointer.load("one", filled, verify=verify)
    assert 300_000 == live.seen
    assert ["weight", "_extra_state"] == list(filled)


@pytest.mark.parametrize("use_xser", [False, True])
def test_extra_state_comes_back_in_its_own_types(tmp_path: Path, use_xser: bool) -> None:
    """An OrderedDict came back as a dict, and a tuple called betas as a list, as NxD has them in its own states."""
    model = Extra(OrderedDict(b=1, a=OrderedDict(t=torch.ones(2)), betas=(0.9, 0.95)))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save("one", model, use_xser=use_xser)
        live = Extra()
        checkpointer.load("one", live)
    assert repr(model.state) == repr(live.state)


def test_a_save_in_inference_mode_does_not_hinder_later_ones(tmp_path: Path) -> None:
    """A save in an evaluation loop leaves nothing behind that later saves could not write to."""
    with Checkpointer(tmp_path) as checkpointer:
        for step, inside in enumerate([True, False, True, False]):
            with torch.inference_mode(inside):
                checkpointer.save(f"step_{step}", {"weight": torch.full((3,), float(step))}, async_save=True)
        checkpointer.wait()
        for step in range(4):
            loaded: dict[str, torch.Tensor] = {}
            checkpointer.load(f"step_{step}", loaded)
            assert [float(step)] * 3 == loaded["weight"].tolist()


def test_what_cannot_be_tidied_up_is_no_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error after a save was settled is logged; the next save works."""
    broken = False

    def refuse(operation: Operation) -> None:
        if broken and operation.name == "list" and operation.key.endswith("staging"):
            raise RuntimeError("the client broke")

    checkpointer = Checkpointer(tmp_path, storage=HookedStorage(LocalStorage(tmp_path), refuse))
    with checkpointer:
        checkpointer.save("zero", {"weight": torch.ones(3)})
        broken = True
        checkpointer.save("one", {"weight": torch.ones(3)})
        checkpointer.save("two", {"weight": torch.ones(3)}, async_save=True).wait(600)
        broken = False
    assert "the client broke" in caplog.text


def test_an_error_while_state_is_being_changed_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The system's own error is raised, and the log says that the state is not what it was."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save("one", {"weight": torch.ones(2**21)})
    reads = 0

    def fail(operation: Operation) -> None:
        nonlocal reads
        reads += operation.nbytes >= LocalStorage.read_nbytes
        if reads > 2**23 // LocalStorage.read_nbytes:  # all pieces are verified, then read again
            raise OSError(5, "Input/output error")

    storage = HookedStorage(LocalStorage(tmp_path), fail)
    with pytest.raises(OSError, match="Input/output error"):
        Checkpointer(tmp_path, storage=storage).load("one", {"weight": torch.zeros(2**21)})
    assert "partly overwritten" in caplog.text
