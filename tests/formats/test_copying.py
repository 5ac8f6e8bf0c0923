"""Copies in parts: the values of torch's own copy, whatever the layouts."""

from __future__ import annotations

import pytest
import torch

from nxd_ckpt.formats.memory import copy_values


@pytest.mark.parametrize(
    ("shape", "saved", "wanted"),
    [
        ((512, 1280), torch.bfloat16, torch.bfloat16),
        ((300, 1280), torch.float32, torch.bfloat16),
        ((1, 3, 257, 1, 512), torch.int16, torch.int16),
        ((512, 300), torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("is_target", [True, False])
def test_a_transposed_copy_has_torchs_values(
    shape: tuple[int, ...], saved: torch.dtype, wanted: torch.dtype, is_target: bool
) -> None:
    """Either side is transposed, and the other a part of more columns; what is beside the target stays."""
    values = torch.arange(torch.Size(shape).numel()).remainder(251).view(shape)
    wide = torch.zeros(*shape[:-1], shape[-1] + 256, dtype=saved)
    wide[..., : shape[-1]] = values
    source = wide[..., : shape[-1]]
    around = torch.full((*shape[:-2], shape[-1], shape[-2] + 256), -1, dtype=wanted)
    target = around[..., : shape[-2]]
    if is_target:
        copy_values(target.mT, source)
    else:
        copy_values(target, source.mT)
    assert torch.equal(values.mT.to(wanted), target)
    assert (around[..., shape[-2] :] == -1).all()
