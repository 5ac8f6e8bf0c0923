"""What the caller says of a tag of neuronx-distributed's: a cut, or names, that cannot be right are refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Partition, Topology, convert, load_checkpoint, open_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch
from tests.golden.checkpoints import saved
from tests.reshard.golden import TAG, GoldenModel

CONVERSIONS: dict[str, Callable[..., Any]] = {form: partial(convert, to=form) for form in ("tag", "files", "dcp")}


@pytest.fixture(scope="module")
def model(golden: Path) -> GoldenModel:
    """Two tensor-parallel ranks."""
    return GoldenModel(saved(golden, "c_dp2_tp2_zero1_xser"))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_cut_into_one_partition_is_refused(
    model: GoldenModel, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Taken as it stands, all but the first rank's part would be lost; in Python, and on the command line."""
    options: dict[str, Any] = {"partitions": {"embed.weight": Partition(0)}}
    with pytest.raises(InvalidArgument, match=r"embed.weight is cut along dimension 0, but .* num_partitions=2 if"):
        CONVERSIONS[name](model.saved.directory / TAG, tmp_path / "out", **options)
    with pytest.raises(InvalidArgument, match="num_partitions=2 if"):
        open_checkpoint(model.saved.directory, **options).read("model/embed.weight")
    file = tmp_path / "cuts.json"
    file.write_text(json.dumps({"embed.weight": {"partition_dim": 0}}))
    words = ["convert", model.saved.directory / TAG, tmp_path / "out", "--to", name, "--partitions", file]
    assert 1 == main([*map(str, words)])
    assert "--partitions says that embed.weight is cut" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({"embed.weight": {"partition_dim": 7, "num_partitions": 2}}, "embed.weight: its partition cuts dimension 7,"),
        ({"embed.wieght": {"partition_dim": 0, "num_partitions": 2}}, "'embed.wieght' (did you mean 'embed.weight'?)"),
        ({"embed.weight": {"partition_dim": -1}}, "embed.weight: partition: partition_dim, counted from"),
        ({"embed.weight": {"partition_dims": 0}}, "embed.weight: 'partition_dims' (did you mean 'partition_dim'?)"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(
    model: GoldenModel, name: str, cut: Any, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cuts.json").write_text(json.dumps(cut))
    options = ["--to", name, "--partitions", tmp_path / "cuts.json"]
    words = ["convert", model.saved.directory / TAG, tmp_path / "out", *options]
    assert 1 == main([*map(str, words)])
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_template_is_filled_in(model: GoldenModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names what is missing, and the command that prints it; blanks and misspelt names are refused."""
    tag, out = str(model.saved.directory / TAG), str(tmp_path / "out")
    assert 1 == main(["convert", "--to", "tag", tag, out, "--tp", "1"])
    error = capsys.readouterr().err
    for said in ("embed.weight, blocks.0.up.weight", "--template partitions > FILE", "--template saved-param-names >"):
        assert said in error
    files = {kind: tmp_path / f"{kind}.json" for kind in ("partitions", "saved-param-names")}
    for kind, file in files.items():
        assert 0 == main(["inspect", tag, "--template", kind])
        file.write_text(capsys.readouterr().out)
        assert 1 == main(["convert", "--to", "tag", tag, out, "--tp", "1", f"--{kind}", str(file)])
        error = capsys.readouterr().err
        assert "embed.weight: partition_dim is still '?'" in error or "still to be filled in: ? [" in error
    cuts, names = (json.loads(file.read_text()) for file in files.values())
    assert [[len(group) for group in stage] for stage in model.saved_names] == [[*map(len, stage)] for stage in names]
    assert all(name.startswith("? [") for stage in names for group in stage for name in group)
    for name, cut in cuts.items():
        cut["partition_dim"] = int(name.endswith("down.weight"))
    files["partitions"].write_text(json.dumps(cuts))
    misspelt = [[[name.replace("embed", "emebd") for name in group] for group in stage] for stage in model.saved_names]
    words = ["convert", "--to", "tag", tag, out, "--tp", "1", *(f"--{kind}={file}" for kind, file in files.items())]
    for listed, code in ((misspelt, 1), (model.saved_names, 0)):
        files["saved-param-names"].write_text(json.dumps(listed))
        assert code == main(words)
        assert (code == 1) == ("'emebd.weight' (did you mean 'embed.weight'?)" in capsys.readouterr().err)
    expected = model.tensors(0)["embed.weight"]["model"]
    assert torch.equal(expected, open_checkpoint(tmp_path, "out").read("model/embed.weight"))
    assert 1 == main(["inspect", out, "--template", "partitions"]), "a tag that records all of it needs none"


def test_a_live_model_says_which_dimension_is_not_there(model: GoldenModel) -> None:
    """A load with ``partitions=`` into a live model, and one into a dict."""
    cut: dict[str, Any] = {"partitions": {"embed.weight": Partition(2, num_partitions=2)}}
    live = torch.nn.ModuleDict({"embed": torch.nn.Embedding(*model.tensors(0)["embed.weight"]["model"].shape)})
    for target, topology in ((live, Topology()), ({}, Topology(dp=2, tp=1, rank=0))):
        with pytest.raises(InvalidArgument, match=r"partitions= of embed.weight: its partition cuts dimension 2"):
            load_checkpoint(model.saved.directory, model=target, topology=topology, strict=False, **cut)


def test_names_in_another_order_are_refused(model: GoldenModel, tmp_path: Path) -> None:
    """If shapes show it: the optimizer of NxD's records its parameters' shapes."""
    names = [[list(reversed(group)) for group in stage] for stage in model.saved_names]
    with pytest.raises(OptimizerMismatch, match=r"is called .* has shape .* in the optimizer, expected"):
        convert(model.saved.directory / TAG, tmp_path / "out", to="tag", dp=1, saved_param_names=names)
