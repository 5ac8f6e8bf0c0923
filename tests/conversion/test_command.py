"""``nxd-ckpt convert-zero1`` and ``reshard``, and the script that stands in for NxD's converter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nxd_ckpt import Topology, load_checkpoint, open_checkpoint
from nxd_ckpt.cli.main import main
from tests.conversion.tags import optimizers, plainly, save_example, sharded, whole
from tests.tag.equality import difference

pytestmark = [pytest.mark.plain, pytest.mark.once]

SCRIPT = Path(__file__).parents[2] / "tools" / "convert_zero_checkpoints.py"


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_nxds_flags_convert_to_full_and_to_shards(tmp_path: Path) -> None:
    """With the flags of NxD's tool."""
    source = save_example(tmp_path, 2)
    full, dp3 = tmp_path / "full", tmp_path / "dp3"

    assert 0 == command("convert-zero1", "--input_dir", source, "--output_dir", full, "--convert_to_full")
    sharding = ("--convert_to_sharded", "--dp_size", 3, "--num_workers", 1, "--optim_only")
    assert 0 == command("convert-zero1", "--input_dir", full, "--output_dir", dp3, *sharding)

    assert None is difference(plainly(whole()), plainly(optimizers(full)[0]))
    assert None is difference(plainly(sharded(whole(), 3, 2)), plainly(optimizers(dp3)[2]))
    assert not (dp3 / "model").exists()


@pytest.mark.parametrize("modes", [[], ["--convert_to_full", "--convert_to_sharded"]], ids=["neither", "both"])
def test_one_mode_is_needed(tmp_path: Path, modes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Neither or both is a wrong command line."""
    with pytest.raises(SystemExit, match="2"):
        command("convert-zero1", "--input_dir", tmp_path / "in", "--output_dir", tmp_path / "out", *modes)
    assert "--convert_to_full" in capsys.readouterr().err


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a traceback, and exit code 1."""
    source = save_example(tmp_path, 2)

    code = command("convert-zero1", "--input_dir", source, "--output_dir", source, "--convert_to_full")

    assert 1 == code
    assert "inside the other" in capsys.readouterr().err


def test_reshard_keeps_the_sizes_that_are_not_given(tmp_path: Path) -> None:
    """Sizes that are not given stay; how parameters are cut, and stages, come from JSON files."""
    source = save_example(tmp_path, 2)
    cuts, stages = tmp_path / "cuts.json", tmp_path / "stages.json"
    cuts.write_text(json.dumps({"up.bias": {}}))
    stages.write_text(json.dumps([["embed.weight", "seen"], ["up.weight", "up.bias", "unused.weight", "scale"]]))

    code = command("reshard", source, tmp_path / "pp2", "--pp", 2, "--partitions", cuts, "--stages", stages)

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
    """Not JSON, or not what the option takes."""
    file = tmp_path / "given.json"
    file.write_text(text)

    assert 1 == command("reshard", tmp_path / "in", tmp_path / "out", option, file)
    assert str(file) in capsys.readouterr().err


def test_the_script_runs_from_a_checkout(tmp_path: Path) -> None:
    """Without installation, and from any directory."""
    save_example(tmp_path, 2)
    flags = ["--input_dir", "step_3", "--output_dir", "dp3", "--convert_to_sharded", "--dp_size", "3"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    subprocess.run([sys.executable, str(SCRIPT), *flags], cwd=tmp_path, env=environment, check=True, timeout=600)

    assert None is difference(plainly(sharded(whole(), 3, 0)), plainly(optimizers(tmp_path / "dp3")[0]))
