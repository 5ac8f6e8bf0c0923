"""What the files that NxD 0.18 wrote tell of themselves; tests/golden loads them, for every configuration and rank."""

from pathlib import Path

import pytest
import torch

from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.formats.optimizer_trees import restore_types
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import lost_files, lost_names
from tests.golden.checkpoints import CONFIGURATIONS, saved
from tests.tag.equality import difference
from tests.tag.layouts import open_tag, whole


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_sizes_and_parts_come_from_the_files(golden: Path, name: str) -> None:
    """Without a manifest, the topology and what was saved are worked out; dp only where something tells it."""
    golden_one = saved(golden, name)
    config = golden_one.config
    tag = open_tag(LocalStorage(golden_one.directory), config["tags"][-1])
    dp = config["dp"] if config["zero1"] else config["ep"]
    assert {"dp": dp, **{key: config[key] for key in ("tp", "pp", "ep")}} == tag.topology().sizes
    parts = tag.parts()
    kind = "zero1_dcp" if config["dcp"] else "zero1" if config["zero1"] else "plain"
    assert (True, kind, True, True) == (parts.model, parts.optimizer, parts.scheduler, parts.user_content)
    assert config["use_xser"] == parts.use_xser
    assert config["master_in_ckpt"] == parts.master_weights
    assert config["avoid_lp"] == (not parts.lower_precision_weights)
    assert (None, None) == (lost_names(tag.files.storage, tag.files.tag), lost_files(tag.files.storage, tag.files.tag))


@pytest.mark.parametrize("form", ["pt", "xser"])
@pytest.mark.parametrize(("output", "dp"), [("full_to_dp4", 4), ("sharded_to_dp3", 3)])
def test_the_converters_shards_are_read(golden: Path, form: str, output: str, dp: int) -> None:
    """What the converter sharded anew reads as any optimizer: inline tensors, no info, an empty ``.tensors``."""
    tag = open_tag(LocalStorage(golden / "k_convert" / form), output)
    assert {"dp": dp, "tp": 1, "pp": 1, "ep": 1} == tag.topology().sizes
    for rank in range(dp):
        file = golden / "k_convert" / form / output / f"optim/dp_rank_{rank:02d}_tp_rank_00_pp_rank_00.pt"
        expected = restore_types(torch.load(file, weights_only=True))
        assert difference(expected, whole(tag, tag.optimizer_tree(Coordinates(dp_rank=rank)))) is None
