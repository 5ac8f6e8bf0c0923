"""torch-xla's own reader takes what nxd_ckpt writes."""

from pathlib import Path

import pytest

from tests.golden.checkpoints import saved
from tests.interop.saved_again import REFERENCES, save_again
from tests.tag.equality import difference

pytestmark = pytest.mark.xla


@pytest.mark.parametrize("name", REFERENCES)
def test_xser_loads_what_it_loads_of_nxd(golden: Path, tmp_path: Path, name: str) -> None:
    """``xser.load`` gives the same for our files as for NxD's; it cannot read those of ep_rank 1, NxD's neither."""
    import torch_xla.utils.serialization as xser

    golden_one = saved(golden, name)
    theirs = golden_one.directory / "step_3"
    ours = save_again(golden_one, tmp_path)
    files = [path.relative_to(theirs) for path in theirs.glob("*/*_pp_rank_??.pt") if "_ep_rank_01" not in path.name]
    assert len(files) >= 2
    for file in files:
        assert None is difference(xser.load(str(theirs / file)), xser.load(str(ours / file)), str(file))
