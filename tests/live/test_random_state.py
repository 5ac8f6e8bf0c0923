"""Random state as plain data."""

import random

import numpy
import pytest
import torch

from nxd_ckpt.live.data_position import capture_random_state, restore_random_state


def _draw():
    return random.random(), random.gauss(0, 1), numpy.random.standard_normal(3).tolist(), torch.rand(3).tolist()


@pytest.mark.both
def test_the_same_numbers_follow(tmp_path):
    """After a restore, through a safe load, every generator continues as it did after the capture."""
    _draw()  # a pending Gaussian is part of the state
    torch.save(capture_random_state(), tmp_path / "state.pt")
    expected = _draw()
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert expected == _draw()


@pytest.mark.both
def test_lists_in_place_of_tuples_are_accepted():
    """What a checkpoint's type rewriting makes of the state restores as well."""
    state = capture_random_state()
    expected = _draw()
    restore_random_state({key: list(value) if isinstance(value, tuple) else value for key, value in state.items()})
    assert expected == _draw()


@pytest.mark.xla
def test_device_numbers_follow_too():
    """torch-xla's generator is part of the state of a process that uses it."""
    import torch_xla

    device = torch_xla.device()
    torch.randn(2, device=device).cpu()
    state = capture_random_state()
    expected = torch.randn(3, device=device).cpu().tolist()
    restore_random_state(state)
    assert expected == torch.randn(3, device=device).cpu().tolist()


@pytest.mark.xla
def test_device_numbers_of_later_steps_follow_too():
    """Captured in the middle of a step: the rest of it draws the same numbers again, and so does the next step."""
    import torch_xla

    def draw():
        numbers = torch.randn(3, device=device).cpu().tolist()
        torch_xla.sync()  # as a data loader does before each batch: the seed moves on
        return numbers, torch.randn(3, device=device).cpu().tolist()

    device = torch_xla.device()
    torch.randn(2, device=device).cpu()
    state = capture_random_state()
    expected = draw()
    restore_random_state(state)
    assert expected == draw()
