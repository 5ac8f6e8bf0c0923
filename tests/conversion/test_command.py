"""``nxd-ckpt convert --to tag``, and the script that stands in for NxD's converter."""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Topology, load_checkpoint, open_checkpoint
from nxd_ckpt.cli import convert_zero_checkpoints
from nxd_ckpt.cli.main import main
from tests.conversion.tags import optimizers, plainly, save_example, sharded, whole
from tests.tag.equality import difference

SCRIPT = Path(__file__).parents[2] / "tools" / "convert_zero_checkpoints.py"


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_reshard_keeps_the_sizes_that_are_not_given(tmp_path: Path) -> None:
    """Sizes that are not given stay; how parameters are cut, and stages, come from JSON files."""
    source = save_example(tmp_path, 2)
    cuts, stages = tmp_path / "cuts.json", tmp_path / "stages.json"
    cuts.write_text(json.dumps({"up.bias": {}}))
    stages.write_text(json.dumps([["embed.weight", "seen"], ["up.weight", "up.bias", "unused.weight", "scale"]]))

    facts = ("--partitions", cuts, "--stages", stages)
    code = command("convert", "--to", "tag", source, tmp_path / "pp2", "--pp", 2, *facts)

    assert 0 == code
    assert Topology(dp=2, pp=2) == open_checkpoint(tmp_path).topology
    first: dict[str, object] = {}
    load_checkpoint(tmp_path, "pp2", first, topology=Topology(dp=2, pp=2))
    assert ["embed.weight", "seen"] == list(first)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--partitions", "not JSON"),
        ("--partitions", '["embed.weight"]'),
        ("--partitions", '{"embed.weight": {"partition_dimension": 0}}'),
        ("--stages", '["embed.weight"]'),
        ("--param-names", '[["embed.weight"]]'),
    ],
)
def test_a_wrong_file_is_named(
    tmp_path: Path, option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "given.json"
    file.write_text(text)

    assert 1 == command("convert", "--to", "tag", tmp_path / "in", tmp_path / "out", option, file)
    assert str(file) in capsys.readouterr().err


def test_the_script_runs_from_a_checkout(tmp_path: Path) -> None:
    save_example(tmp_path, 2)
    flags = ["--input_dir", "step_3", "--output_dir", "dp3", "--convert_to_sharded", "--dp_size", "3"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    subprocess.run([sys.executable, str(SCRIPT), *flags], cwd=tmp_path, env=environment, check=True, timeout=600)

    assert None is difference(plainly(sharded(whole(), 3, 0)), plainly(optimizers(tmp_path / "dp3")[0]))


def nxds_command(*arguments: object) -> int:
    return convert_zero_checkpoints.main([str(argument) for argument in arguments])


def test_nxds_command_takes_what_its_parser_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Abbreviated flags, flags that nobody knows, a size that has no meaning, and our own flags; words may be equal."""
    source, full, dp3 = save_example(tmp_path, 2), tmp_path / "full", tmp_path / "dp3"
    unknown = ["--use_xser", "1", "--quiet", "--storage-option", "a=b", "a=b"]

    assert 0 == nxds_command("--in", source, "--out", full, "--convert_to_f", "--dp", 7, "--num", 1, *unknown)
    said = "nxd_convert_zero_checkpoints: ignored, as by NxD: --use_xser 1 a=b --dp_size 7\n"
    assert said == capsys.readouterr().err
    assert 0 == nxds_command("--input_dir", full, "--output_dir", dp3, "--convert_to_sharded", "--dp_size=3", "--json")
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert "ignored" not in err

    assert None is difference(plainly(whole()), plainly(optimizers(full)[0]))
    assert None is difference(plainly(sharded(whole(), 3, 2)), plainly(optimizers(dp3)[2]))


def test_nxds_command_replaces_its_output(tmp_path: Path) -> None:
    """A second conversion to the same place, as scripts do that are started again; also what NxD's tool has left."""
    source, out = save_example(tmp_path, 2), tmp_path / "out"
    for dp_size in (3, 4):
        to_shards = ("--convert_to_sharded", "--dp_size", dp_size)
        assert 0 == nxds_command("--input_dir", source, "--output_dir", out, *to_shards)
        assert dp_size == len(optimizers(out))
        assert None is difference(plainly(sharded(whole(), dp_size, 0)), plainly(optimizers(out)[0]))
    bare = tmp_path / "bare"
    (bare / "optim").mkdir(parents=True)
    torch.save({}, bare / "optim" / "full_tp_rank_00_pp_rank_00.pt")
    before = set(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="2"):
        nxds_command("--input_dir", source, "--output_dir", bare, "--convert_to_sharded")
    assert ["full_tp_rank_00_pp_rank_00.pt"] == [path.name for path in (bare / "optim").iterdir()]
    assert 0 == nxds_command("--input_dir", source, "--output_dir", bare, "--convert_to_sharded", "--dp_size", 1)
    assert None is difference(plainly(sharded(whole(), 1, 0)), plainly(optimizers(bare)[0]))
    assert before == set(tmp_path.iterdir())


def test_nxds_command_needs_what_nxds_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line is one by its own name, an error is one line, and an input is never its output."""
    with pytest.raises(SystemExit, match="2"):
        nxds_command("--input_dir", tmp_path, "--convert_to_full")
    assert "nxd_convert_zero_checkpoints: error: the following arguments are required: --output_dir" in (
        capsys.readouterr().err
    )
    source = save_example(tmp_path, 2)
    assert 1 == nxds_command("--input_dir", source, "--output_dir", source, "--convert_to_full")
    assert "inside the other" in capsys.readouterr().err


def test_nxds_command_is_installed_under_its_name() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10")
    scripts = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
    assert convert_zero_checkpoints.main is pkgutil.resolve_name(scripts["nxd_convert_zero_checkpoints"])
