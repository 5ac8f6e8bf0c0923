"""A tag in numbers: right, of every dtype, in windows, and kept beside the tag for this save only."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from nxd_ckpt import Partition, checkpoint_statistics, open_checkpoint, save_checkpoint
from nxd_ckpt.runtime.compare import side_by_side
from tests.elastic.ranks import save_job
from tests.elastic.transformer import layout_of, weights_of
from tests.golden.checkpoints import CONFIGURATIONS, saved

pytestmark = [pytest.mark.plain, pytest.mark.once]


def test_numbers_are_those_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that are cut into windows, with NaN and infinities, and of whole numbers."""
    monkeypatch.setattr(side_by_side, "_MEMORY", 4096)
    drawn = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    bad = drawn.clone()
    bad[:5], bad[5:8], bad[8:20] = float("nan"), -float("inf"), 0.0
    model = {"good": drawn, "bad": bad, "half": drawn.bfloat16(), "count": torch.tensor([0, -7]), "none": torch.ones(0)}
    save_checkpoint(tmp_path, "t", model)

    found = checkpoint_statistics(open_checkpoint(tmp_path)).tensors

    for name, tensor in model.items():
        values = tensor.double().numpy()
        finite, told = values[np.isfinite(values)], found[f"model/{name}"]
        assert (values.size, np.isnan(values).sum(), np.isinf(values).sum()) == (told.numel, told.nans, told.infs)
        assert ((values == 0).sum(), np.abs(finite).max(initial=0)) == (told.zeros, told.absmax)
        assert told.norm == pytest.approx(np.linalg.norm(finite))
        assert math.isnan(told.mean) if not finite.size else told.mean == pytest.approx(finite.mean(), abs=1e-7)


def test_they_are_kept_for_one_save(tmp_path: Path) -> None:
    """A second look reads no tensor; another save under the same name is counted anew; those of lost tags go."""
    save_checkpoint(tmp_path, "t", {"w": torch.tensor([3.0, 4.0])})
    first = checkpoint_statistics(open_checkpoint(tmp_path))
    again = checkpoint_statistics(open_checkpoint(tmp_path))
    assert (False, True, first.tensors) == (first.cached, again.cached, again.tensors)
    held = ["checkpoint", "done", "index", "manifest.json", "model"]
    assert held == sorted(path.name for path in (tmp_path / "t").iterdir())

    save_checkpoint(tmp_path, "t", {"w": torch.tensor([5.0, 12.0])})
    anew = checkpoint_statistics(open_checkpoint(tmp_path))
    assert (False, 13.0) == (anew.cached, anew.tensors["model/w"].norm)

    save_checkpoint(tmp_path, "u", {"w": torch.ones(1)}, num_kept_ckpts=1)
    checkpoint_statistics(open_checkpoint(tmp_path))
    assert ["u.json"] == [path.name for path in (tmp_path / ".nxd_ckpt" / "statistics").iterdir()]

    kept = tmp_path / ".nxd_ckpt" / "statistics" / "u.json"
    good = kept.read_text()
    numbers = "[1,0,0,0,1.0,1.0,1.0]"
    assert numbers in good
    lies = ("[1,1,1,0,1,1,1]", "[1,0,0,0,1e999,1,1]", f"[1,0,0,0,1,{10**400},1]", f"[{10**400},0,0,0,1,1,1]", "[1,0]")
    for bad in ('{"format_version": 1, "kind": []}', *(good.replace(numbers, lie) for lie in lies)):
        kept.write_text(bad)
        assert not checkpoint_statistics(open_checkpoint(tmp_path)).cached, bad
        assert good == kept.read_text()


def test_the_largest_numbers_are_counted(tmp_path: Path) -> None:
    """Though sums of float64 overflow: what is kept is JSON, and used again."""
    most = torch.finfo(torch.float64).max
    values = {"high": [1e200] * 100_000, "most": [most] * 3, "low": [-most] * 2}
    save_checkpoint(tmp_path, "t", {name: torch.tensor(held, dtype=torch.float64) for name, held in values.items()})
    found = checkpoint_statistics(open_checkpoint(tmp_path)).tensors
    assert found["model/high"].norm == pytest.approx(1e200 * math.sqrt(100_000))
    assert found["model/high"].mean == pytest.approx(1e200)
    assert (most, most) == (found["model/most"].mean, found["model/most"].norm)
    assert -most == found["model/low"].mean
    again = checkpoint_statistics(open_checkpoint(tmp_path))
    assert (True, found) == (again.cached, again.tensors)


def test_nothing_is_kept_where_nothing_marks_the_save(tmp_path: Path) -> None:
    """NxD 0.6 writes no markers: what is written over its files is counted anew."""
    file = tmp_path / "pretrained" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    file.parent.mkdir(parents=True)
    (tmp_path / "newest").write_text("pretrained")
    for norm in (2.0, 3.0):
        torch.save({"w": torch.tensor([norm])}, file)
        found = checkpoint_statistics(open_checkpoint(tmp_path, "pretrained"))
        assert (False, norm) == (found.cached, found.tensors["model/w"].norm)


def test_nothing_is_kept_of_what_the_caller_says(golden: Path, tmp_path: Path) -> None:
    """How NxD's tensors are cut changes what is counted: then nothing that is kept is used, and nothing is kept."""
    source = saved(golden, "c_dp2_tp2_zero1_xser")
    directory = tmp_path / "run"
    shutil.copytree(source.directory, directory)
    as_held = checkpoint_statistics(open_checkpoint(directory))
    cuts = {name: Partition() for name in open_checkpoint(directory).model_state()}

    found = checkpoint_statistics(open_checkpoint(directory, partitions=cuts))

    assert not found.cached
    assert found.tensors != as_held.tensors
    again = checkpoint_statistics(open_checkpoint(directory))
    assert (True, as_held.tensors) == (again.cached, again.tensors)


def test_sizes_do_not_matter(tmp_path: Path) -> None:
    """Of a job with tp=2 and ZeRO-1 every tensor is counted as a whole, with no padding."""
    weights = weights_of()
    save_job(tmp_path, weights, layout_of("dp2tp2", weights))
    checkpoint = open_checkpoint(tmp_path)
    found = checkpoint_statistics(checkpoint)
    assert {} == found.problems
    assert {name: math.prod(told.shape or ()) for name, told in checkpoint.metadata.items()} == {
        name: one.numel for name, one in found.tensors.items()
    }


def test_tags_of_nxd_are_counted(golden: Path) -> None:
    """As its ranks hold their tensors, since it does not say how they are cut."""
    found = checkpoint_statistics(open_checkpoint(saved(golden, CONFIGURATIONS[0]).directory), cache=False)
    assert {} == found.problems
    assert all(one.norm > 0 for name, one in found.tensors.items() if name.startswith("model/"))
