"""Whatever a damaged file is, and whoever reads it: errors of ours, in bounded time and memory."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

import nxd_ckpt
from nxd_ckpt import convert
from nxd_ckpt.core.topology import Topology
from tests.bad_input.live import jobs, topologies
from tests.interop.saving import save_as_every_rank
from tests.support.processes import Program

GOLDEN = {
    "a_dp2_zero1_pt": Topology(dp=2),
    "b_dp2_zero1_xser": Topology(dp=2),
    "l_dp2_zero1_dcp_async": Topology(dp=2),
    "i_dp4_ep2_zero1_pt": Topology(dp=4, ep=2),
}


def play_with(golden: Path, directory: Path) -> None:
    """A checkpoint of each kind: NxD's, ours, torch DCP's, Hugging Face's, an archive, and one of before tags."""
    for name, sizes in GOLDEN.items():
        shutil.copytree(golden / name / "ckpt", directory / name)
        (directory / name / "sizes").write_text(json.dumps(sizes.sizes))
    for name, use_xser in (("ours", False), ("ours_xser", True)):
        ranks = jobs(2, zero1=True, seed=1)
        content = {"step": 3, "order": [1, 2, 3], "at": {"epoch": 1.5}}
        save_as_every_rank(
            directory / name,
            "one",
            topologies(ranks),
            lambda rank: {**ranks[rank].parts, "user_content": content, "rank_content": ranks[rank].rank_content},  # noqa: B023
            use_xser=use_xser,
        )
        (directory / name / "sizes").write_text(json.dumps({"dp": 2}))
    convert(directory / "ours" / "one", directory / "ours.tar", to="tar")
    legacy = directory / "legacy" / "tp_rank_00_pp_rank_00" / "checkpoint.pt"
    legacy.parent.mkdir(parents=True)
    model = {"w": torch.ones(3, 2)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(3, 2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": model, "optimizer": optimizer, "step": 3}, legacy)
    (directory / "legacy" / "sizes").write_text("{}")
    state = {"model": {"a": torch.arange(6.0)}, "optim": {"state": {"a": {"step": torch.ones(1)}}}, "epoch": 3}
    torch.distributed.checkpoint.save(state, checkpoint_id=directory / "dcp")  # type: ignore[attr-defined]
    hugging_face = directory / "hugging_face"
    hugging_face.mkdir()
    tensors = {"model.layers.0.x": torch.ones(2, 3), "lm_head.weight": torch.ones(4)}
    save_file(tensors, hugging_face / "model.safetensors")
    (hugging_face / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    places = dict.fromkeys(tensors, "model.safetensors")
    (hugging_face / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    shutil.copy(Path(nxd_ckpt.__file__).parent / "mappings" / "llama.json", hugging_face / "mapping.json")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("seed", "cases"),
    [(0, 25), pytest.param(10_000, 5_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])],
    ids=["short", "long"],
)
def test_nothing_but_our_errors_leaves_a_reader(golden: Path, tmp_path: Path, seed: int, cases: int) -> None:
    """Seeded: a case that fails is run again by its number, with
    ``python -m tests.hostile.whole_checkpoints DIRECTORY NUMBER 1``."""
    play_with(golden, tmp_path)
    source = "import runpy\nrunpy.run_module('tests.hostile.whole_checkpoints', run_name='__main__')"
    with Program(source, tmp_path, seed, cases) as program:
        done = program.wait(7200)
    assert (0, "") == (done.returncode, done.stdout[-5000:]), done.stderr[-2000:]
