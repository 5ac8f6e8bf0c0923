"""torch-xla's own reader, on files that this package wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.formats.xser import normalise, split
from tests.formats.helpers import comparable, rendered

pytestmark = pytest.mark.xla


def test_xser_load_reads_our_files(tmp_path: Path) -> None:
    """A state split into references and tensor files comes back whole from torch_xla's xser.load."""
    import torch_xla.utils.serialization as xser

    tree = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4)}}, "betas": (0.9, 0.95)}
    references, tensors = split(tree)
    path = tmp_path / "model.pt"
    path.write_bytes(rendered(image_of(references)))
    folder = tmp_path / "model.pt.tensors"
    folder.mkdir()
    for tid, tensor in tensors:
        (folder / f"tensor_{tid}.pt").write_bytes(rendered(image_of(tensor)))
    assert comparable(normalise(tree)) == comparable(xser.load(str(path)))


def test_our_references_are_torch_xlas_once_loaded(tmp_path: Path) -> None:
    """torch.load gives torch-xla's class, with its attribute, where we wrote a reference."""
    import torch_xla.utils.serialization as xser

    path = tmp_path / "model.pt"
    path.write_bytes(rendered(image_of(split([torch.ones(1), torch.ones(2)])[0])))
    found = torch.load(path, weights_only=False)
    assert [(xser.TensorReference, 0), (xser.TensorReference, 1)] == [(type(ref), ref.tid) for ref in found]
