"""Names and filters on checkpoints that neuronx-distributed wrote, into dicts."""

import json
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import load_checkpoint
from tests.golden.checkpoints import Saved
from tests.tag.equality import difference


@pytest.mark.parametrize(
    "name", ["a_dp2_zero1_pt", "h_tp2_pp2_zero1_xser", "i_dp4_ep2_zero1_pt", "l_dp2_zero1_dcp_async"]
)
def test_a_foreign_tag_is_renamed_and_filtered(golden: Path, name: str) -> None:
    """Each rank gets what it gets without filters, less what is left out, under its other name."""
    saved = Saved(golden / name, json.loads((golden / name / "config.json").read_text()))
    for topology in saved.topologies[-2:]:
        whole: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        load_checkpoint(saved.directory, None, *whole, topology=topology)
        first, *_, last = whole[0]
        left: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        options: dict[str, Any] = {"key_mapping": {"renamed": first}, "ignore_keys": [f"model/{last}", "*/exp_avg_sq"]}
        load_checkpoint(saved.directory, None, *left, topology=topology, **options)
        model = {"renamed" if key == first else key: value for key, value in whole[0].items() if key != last}
        for entries in whole[1]["base_state"].values():
            entries.pop("exp_avg_sq", None)
        assert None is difference(model, left[0])
        assert None is difference(whole[1], left[1])
