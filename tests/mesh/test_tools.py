"""Whatever reads tags reads those of a mesh: the tools know nothing of meshes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import convert, copy_checkpoint, open_checkpoint, unshard_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.mesh import jobs
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference


@pytest.fixture
def tag(gloo_ranks: RankPool, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A tag of FSDP x TP, and what torch gathered of the job."""
    return tmp_path / "run" / "step_1", gloo_ranks.run(jobs.save, tmp_path / "run", "fsdp x tp")[0]


def whole(directory: Path) -> dict[str, Any]:
    """All tensors of the latest tag, as jobs.whole_state has them."""
    checkpoint = open_checkpoint(directory)
    return {name: checkpoint.read(name) for name in sorted(checkpoint.metadata)}


def test_every_reader_takes_it_as_any_tag(
    tag: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tensors are those of the job; copies, archives and other forms of it hold the same, and verify."""
    path, expected = tag
    found = whole(path.parent)
    expected.pop("param_groups")
    assert None is difference(expected, found)

    assert () == verify_checkpoint(path.parent).problems
    copy_checkpoint(path, tmp_path / "copy" / "step_1")
    assert None is difference(found, whole(tmp_path / "copy"))
    convert(path, tmp_path / "step_1.tar", to="tar")
    assert None is difference(found, whole(tmp_path / "step_1.tar"))
    cuts = {name: Partition(0) for name in ("blocks.0.up.weight", "blocks.1.up.weight")}
    convert(path, tmp_path / "tp2" / "step_1", to="tag", dp=1, tp=2, partitions=cuts)
    assert None is difference(found, whole(tmp_path / "tp2"))
    unshard_checkpoint(path, tmp_path / "whole")
    model = torch.load(tmp_path / "whole" / "model.pt", weights_only=True)
    assert all(torch.equal(found[f"model/{name}"], value) for name, value in model.items())
    assert {name for name in found if name.startswith("model/")} == {f"model/{name}" for name in model}
    convert(path, tmp_path / "dcp", to="dcp")
    assert (tmp_path / "dcp" / ".metadata").is_file()

    for command in (["inspect", str(path), "--tensors"], ["diff", str(path), str(tmp_path / "tp2" / "step_1")]):
        assert main(command) == 0
        assert "blocks" in capsys.readouterr().out or command[0] == "diff"
    assert main(["inspect", str(path)]) == 0
    assert "fsdp=2 tp=2\n" in capsys.readouterr().out


def test_damage_is_found(tag: tuple[Path, dict[str, Any]]) -> None:
    """A changed byte of a shard, of the structure or of a leader's index is named."""
    path, _ = tag
    index = "index/dp_rank_00_tp_rank_00_pp_rank_00.json"
    for file in ("model/shard_rank_00001.pt", "optim/structure_rank_00000.pt", index):
        whole = (path / file).read_bytes()
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 1
        (path / file).write_bytes(changed)
        assert any(file in problem for problem in verify_checkpoint(path.parent).problems)
        (path / file).write_bytes(whole)
    assert () == verify_checkpoint(path.parent).problems


def test_a_report_shows_ranks_in_their_mesh(
    tag: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == main(["report", str(tag[0]), "--json", "--count", "0"])
    places = [rank["place"] for rank in json.loads(capsys.readouterr().out)["ranks"]]
    assert [{"fsdp": rank // 2, "tp": rank % 2} for rank in range(4)] == places


def test_inspect_shows_what_each_rank_held(
    tag: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """9 rows of embeddings are 5 and 4; the weights of tensor parallelism are cut along both dimensions of the mesh."""
    found = []
    for rank in range(4):
        assert 0 == main(["inspect", str(tag[0]), "--rank", str(rank), "--json"])
        parameters = {one["name"]: one for one in json.loads(capsys.readouterr().out)["parameters"]}
        found.append([parameters[name]["shape"] for name in ("embed.weight", "blocks.0.up.weight")])
    assert [[[5, 6], [3, 6]], [[5, 6], [3, 6]], [[4, 6], [2, 6]], [[4, 6], [2, 6]]] == found
    assert ("dim 0 in 2 (fsdp)", [9, 6]) == tuple(parameters["embed.weight"][key] for key in ("cut", "global_shape"))
    assert "dim 0 in 2 (fsdp), dim 0 in 2 (tp)" == parameters["blocks.0.up.weight"]["cut"]
