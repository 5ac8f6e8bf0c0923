"""A tag in numbers: right, of every dtype, in windows, and kept beside the tag for this save only."""

import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nxd_ckpt import (
    Partition,
    checkpoint_statistics,
    open_checkpoint,
    save_checkpoint,
)
from tests.golden.checkpoints import CONFIGURATIONS, saved
from tests.reshard.ranks import save_job
from tests.reshard.transformer import layout_of, weights_of


def test_numbers_are_those_of_numpy(tmp_path: Path) -> None:
    """Of tensors that are counted in several parts, with NaN and infinities, and of whole numbers."""
    drawn = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
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


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
SIZES = (0, 1, 2, 1023, 1025, 5000)


def _drawn(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of a dtype: of every bit pattern that it has, or of many, with and without those that are not finite;
    one-sided, all alike, of both zeros, the smallest and the largest numbers."""
    numbers = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (4096 * dtype.itemsize,), generator=numbers, dtype=torch.uint8).view(dtype)
    finite = raw[raw.double().isfinite()]
    limits, tiny = torch.finfo(dtype), torch.finfo(dtype).smallest_normal / 2
    drawn = {f"drawn {size}": torch.randn(size, generator=numbers).to(dtype) for size in SIZES}
    drawn |= {"raw": raw, "finite": finite, "positive": finite.double().abs().to(dtype), "one": raw[:1].view(())}
    drawn |= {"negative": (-finite.double().abs()).to(dtype), "alike": torch.full((70_000,), 0.1).to(dtype)}
    drawn |= {"zeros": torch.tensor([0.0, -0.0] * 700).to(dtype), "bad": torch.full((3,), -math.nan).to(dtype)}
    drawn |= {"most": torch.tensor([limits.max, limits.min] * 9, dtype=torch.float64).to(dtype)}
    return drawn | {"tiny": torch.tensor([tiny, -tiny, 0.0] * 500, dtype=torch.float64).to(dtype)}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 50))])
def test_numbers_of_every_form_are_counted(tmp_path: Path, seed: int) -> None:
    """As float64 has them: counts and the largest one exactly, the norm and the mean to six digits."""
    numbers = torch.Generator().manual_seed(seed)
    whole = {str(kind): torch.randint(-9, 9, (1025,), generator=numbers).to(kind) for kind in (torch.int64, torch.int8)}
    model = {f"{dtype} {name}": one for dtype in FLOATS for name, one in _drawn(dtype, seed).items()}
    model |= {**whole, "bool": torch.rand(1025, generator=numbers) > 0.5, "large": torch.randn(2**18 + 1)}
    model |= {"complex": torch.randn(1025, dtype=torch.complex64, generator=numbers)}
    save_checkpoint(tmp_path, "t", model)

    found = checkpoint_statistics(open_checkpoint(tmp_path)).tensors

    for name, tensor in model.items():
        exact = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        values, told = exact.double().numpy(), found[f"model/{name}"]
        finite = values[np.isfinite(values)]
        assert (values.size, np.isnan(values).sum(), np.isinf(values).sum()) == (told.numel, told.nans, told.infs), name
        largest = np.abs(finite).max(initial=0)
        assert ((values == 0).sum(), largest) == (told.zeros, told.absmax), name
        scaled = finite / (largest or 1)
        norm = min(float(np.linalg.norm(scaled)) * float(largest), sys.float_info.max)
        assert told.norm == pytest.approx(norm, rel=1e-6), name
        error = 1e-6 * np.abs(scaled).mean() * largest if finite.size else 0
        assert (not finite.size) == math.isnan(told.mean), name
        assert not finite.size or abs(told.mean - scaled.mean() * largest) <= error, name


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


def test_views_are_counted_as_they_are(tmp_path: Path) -> None:
    """Of what torch.save stored as views: the elements of each, and none beside them."""
    whole = torch.arange(60.0).reshape(6, 10)
    views = {"turned": whole.t(), "every other": whole[:, ::2], "part": whole[2:4], "one": whole[3, 3]}
    file = tmp_path / "pretrained" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    file.parent.mkdir(parents=True)
    torch.save(views, file)
    found = checkpoint_statistics(open_checkpoint(tmp_path, "pretrained")).tensors
    for name, view in views.items():
        told = found[f"model/{name}"]
        assert (view.numel(), view.mean(), view.max()) == pytest.approx((told.numel, told.mean, told.absmax)), name
        assert told.norm == pytest.approx(float(view.norm())), name


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
    found = checkpoint_statistics(open_checkpoint(saved(golden, CONFIGURATIONS[0]).directory))
    assert {} == found.problems
    assert all(one.norm > 0 for name, one in found.tensors.items() if name.startswith("model/"))
