"""On XLA devices."""

from pathlib import Path

import pytest

from tests.drop_in import ranks
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.xla


def test_save_xser(xla_ranks: RankPool, package: Path, tmp_path: Path):
    """A file for each tensor of a device, which torch-xla's own reader loads too; the rest is in the rank's file."""
    assert [[[float(tp)] * 3] * 2 for tp in (0, 1, 0, 1)] == xla_ranks.run(ranks.on_device, package, tmp_path)
    assert ["tensor_0.pt"] == [path.name for path in (tmp_path / "tp_rank_00_pp_rank_00.tensors").iterdir()]
