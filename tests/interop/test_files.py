"""What nxd_ckpt writes is what NxD 0.18 writes for the same state: names, markers, structure, tensors."""

from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import load_checkpoint
from tests.golden.checkpoints import groups_like, module_like, saved, sharded
from tests.interop.files import names_below, torch_files, unpickled
from tests.interop.saved_again import REFERENCES, save_again
from tests.interop.saving import save_as_every_rank
from tests.live.doubles import ExpertShardedOptimizer
from tests.tag.equality import difference

WHOLE_TENSORS = ["a_dp2_zero1_pt", "e_dp2_tp2_bf16_master_pt", "i_dp4_ep2_zero1_pt", "s_tp2_stride2_nozero1_pt"]
LEFT_OUT = "f_dp2_tp2_bf16_master_avoid_lp_xser"


def contents_differ(theirs: Path, ours: Path) -> list[str]:
    """Where files of the same name in two tags hold something else."""
    found = (
        difference(unpickled(path), unpickled(ours / path.relative_to(theirs)), str(path.relative_to(theirs)))
        for path in torch_files(theirs)
    )
    return [text for text in found if text is not None]


@pytest.mark.parametrize("name", WHOLE_TENSORS + REFERENCES)
@pytest.mark.one_in(2)
def test_the_files_are_those_of_nxd(golden: Path, tmp_path: Path, name: str) -> None:
    """Dict for dict: file names, references, tids, info and every tensor's bits are the same. Of ``done`` NxD asks only
    whether it is there."""
    golden_one = saved(golden, name)
    theirs = golden_one.directory / "step_3"
    ours = save_again(golden_one, tmp_path)
    assert names_below(theirs) == names_below(ours)
    assert [] == contents_differ(theirs, ours)
    assert b"1" == (ours / "checkpoint").read_bytes()


@pytest.mark.parametrize("name", ["c_dp2_tp2_zero1_xser", "e_dp2_tp2_bf16_master_pt"])
def test_live_objects_are_saved_as_nxd_saves_them(golden: Path, tmp_path: Path, name: str) -> None:
    """Loaded into live modules and ZeRO-1 optimizers and saved from them, the model's and optimizer's files stay."""
    golden_one = saved(golden, name)

    def what(rank: int) -> dict[str, Any]:
        held = golden_one.held("step_3", rank)
        model = module_like(held)
        optimizer = sharded(golden_one, rank, held, model)
        topology = golden_one.topologies[rank]
        load_checkpoint(golden_one.directory, "step_3", model, optimizer, topology=topology)
        return {"model": model, "optimizer": optimizer}

    use_xser = golden_one.config["use_xser"]
    save_as_every_rank(tmp_path, "again", golden_one.topologies, what, use_xser=use_xser)
    theirs, ours = golden_one.directory / "step_3", tmp_path / "again"
    assert names_below(theirs) - {"scheduler.pt", "user_content.pt"} == names_below(ours)
    for part in ("model", "optim"):
        differing = contents_differ(theirs / part, ours / part)
        # The double's base optimizer lists its options in another order than NxD's.
        assert [] == [text for text in differing if "param_groups" not in text]


def test_weights_left_out_leave_only_what_no_master_weight_covers(golden: Path, tmp_path: Path) -> None:
    """NxD's references and info, with files for those three tensors alone, which NxD loses."""
    golden_one = saved(golden, LEFT_OUT)
    ours = save_again(golden_one, tmp_path, avoid_saving_lower_precision_weights=True)
    theirs = golden_one.directory / "step_3"
    held = list(golden_one.held("step_3", 0)["model"])
    lost = [held.index(name) for name in ("frozen_scale", "pos_scale", "tokens_seen")]
    extra = {
        f"model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt.tensors/tensor_{tid}.pt" for tp in (0, 1) for tid in lost
    }
    assert names_below(theirs) | extra == names_below(ours)
    assert [] == contents_differ(theirs, ours)
    for rank, topology in enumerate(golden_one.topologies):
        model: dict[str, Any] = {}
        load_checkpoint(tmp_path, "step_3", model, topology=topology)
        assert None is difference(golden_one.held("step_3", rank)["model"], model)


@pytest.mark.parametrize(
    ("name", "use_xser", "why"),
    [
        ("e_dp2_tp2_bf16_master_pt", False, "without use_xser=True"),
        ("g_dp2_tp2_nozero1_xser", True, "the optimizer holds no master weights"),
        ("i_dp4_ep2_zero1_pt", True, "with expert parallelism NxD loads no master weights"),
    ],
)
def test_weights_are_left_out_only_where_nxd_can_load_the_rest(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, use_xser: bool, why: str
) -> None:
    """Else all of them are saved, as by NxD, whose loader asks for each; a warning says why."""
    golden_one = saved(golden, name)

    def what(rank: int) -> dict[str, Any]:
        held = golden_one.held("step_3", rank)
        if golden_one.config["ep"] == 1:
            return {"model": held["model"], "optimizer": held["optimizer"]}
        model = module_like(held)
        groups = golden_one.config["dp_groups"], golden_one.config["edp_groups"]
        optimizer = ExpertShardedOptimizer(groups_like(held, model), rank, *groups, lr=0.1, save_master_weights=True)
        return {"model": model, "optimizer": optimizer}

    for tag, left_out in (("all", False), ("asked", True)):
        options = {"use_xser": use_xser, "avoid_saving_lower_precision_weights": left_out}
        save_as_every_rank(tmp_path, tag, golden_one.topologies, what, **options)
    assert names_below(tmp_path / "all") == names_below(tmp_path / "asked")
    assert [] == contents_differ(tmp_path / "all", tmp_path / "asked")
    [warning] = [text for text in caplog.messages if "avoid_saving_lower_precision_weights" in text]
    assert warning.startswith(f"avoid_saving_lower_precision_weights=True has no effect, all weights are saved: {why}")


@pytest.mark.parametrize("use_xser", [True, False])
def test_experts_in_bare_dicts_are_not_lost(golden: Path, tmp_path: Path, use_xser: bool) -> None:
    """Nothing says which tensors are experts', of which each ep rank has its own: then all of them write all. Without
    ZeRO-1 and xser, NxD loses the optimizer of ep ranks above 0: here each has its file."""
    golden_one = saved(golden, "i_dp2_tp2_ep2_nozero1_xser")
    held = [golden_one.held("step_3", rank) for rank in range(len(golden_one.topologies))]

    def what(rank: int) -> dict[str, Any]:
        return {part: held[rank][part] for part in ("model", "optimizer")}

    save_as_every_rank(tmp_path, "bare", golden_one.topologies, what, use_xser=use_xser)
    files = {f"dp_rank_00_ep_rank_{ep:02d}_tp_rank_{tp:02d}_pp_rank_00.pt" for ep in (0, 1) for tp in (0, 1)}
    for part in ("model", "optim"):
        written = [path.name for path in (tmp_path / "bare" / part).iterdir()]
        assert files == {name for name in written if not name.endswith((".info.pt", ".tensors"))}
    for rank, topology in enumerate(golden_one.topologies):
        loaded: dict[str, Any] = {"model": {}, "optimizer": {}}
        load_checkpoint(tmp_path, "bare", **loaded, topology=topology)
        assert None is difference(what(rank), loaded)


def test_num_workers_does_not_show_in_the_files(golden: Path, tmp_path: Path) -> None:
    """``num_workers`` limits who writes at once, not what is written."""
    golden_one = saved(golden, "a_dp2_zero1_pt")
    one = save_again(golden_one, tmp_path / "one", num_workers=1)
    other = save_again(golden_one, tmp_path / "other", num_workers=None)
    files = torch_files(one)
    assert [path.read_bytes() for path in files] == [(other / path.relative_to(one)).read_bytes() for path in files]
