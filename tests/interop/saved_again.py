"""What NxD 0.18 saved, saved again by nxd_ckpt."""

from pathlib import Path
from typing import Any

from nxd_ckpt import Partition
from tests.golden.checkpoints import Saved
from tests.interop.saving import save_as_every_rank

REFERENCES = [
    "b_dp2_zero1_xser",
    "c_dp2_tp2_zero1_xser",
    "d_dp4_zero1_xser",
    "g_dp2_tp2_nozero1_xser",
    "h_tp2_pp2_zero1_xser",
    "i_dp2_tp2_ep2_nozero1_xser",
]

PARTS = ("model", "optimizer", "scheduler", "user_content")


def save_again(golden_one: Saved, directory: Path, **options: Any) -> Path:
    """Save what every rank held, as dicts; the tag's directory."""

    def what(rank: int) -> dict[str, Any]:
        held = golden_one.held("step_3", rank)
        return {**{part: held[part] for part in PARTS}, **how_it_is_cut(held)}

    use_xser = golden_one.config["use_xser"]
    save_as_every_rank(directory, "step_3", golden_one.topologies, what, use_xser=use_xser, **options)
    return directory / "step_3"


def how_it_is_cut(held: dict[str, Any]) -> dict[str, Any]:
    """What dicts do not tell: the optimizer's names, and NxD's attributes of the model's parameters."""
    cut = {
        about["name"]: Partition(
            about["partition_dim"],
            about["partition_stride"] or 1,
            about["num_partitions"] or 1,
            expert=about["expert_model_parallel"],
        )
        for about in held["params"]
    }
    names = held["optimizer_param_names"]
    if "ep_param_group_offset" in held["optimizer"]:  # NxD: the groups once without experts, once with experts only
        names = [
            [name for name in group if cut[name].expert is experts] for experts in (False, True) for group in names
        ]
    return {"partitions": cut, "param_names": names}
