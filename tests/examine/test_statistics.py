"""A tag in numbers: right, of every dtype, in windows, and kept beside the tag for this save only."""

from __future__ import annotations

import json
import math
import shutil
import sys
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nxd_ckpt import (
    Checkpointer,
    Partition,
    checkpoint_statistics,
    open_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.coordination.paths import SUMMARIES
from nxd_ckpt.examine.statistics import Statistics
from nxd_ckpt.reshard.summary import Summary
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.golden.checkpoints import CONFIGURATIONS, saved
from tests.reshard.ranks import save_job
from tests.reshard.transformer import layout_of, weights_of

pytestmark = [pytest.mark.plain, pytest.mark.once]


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
    found = checkpoint_statistics(open_checkpoint(saved(golden, CONFIGURATIONS[0]).directory), cache=False)
    assert {} == found.problems
    assert all(one.norm > 0 for name, one in found.tensors.items() if name.startswith("model/"))


def _same(counted: Statistics, read: Statistics) -> None:
    """Whether nothing was read for the one, and it has the numbers of the other."""
    assert (True, False) == (counted.cached, read.cached)
    assert read.tensors.keys() == counted.tensors.keys()
    for name, told in read.tensors.items():
        now = counted.tensors[name]
        counts = [(one.numel, one.nans, one.infs, one.zeros, one.absmax) for one in (told, now)]
        assert counts[0] == counts[1], name
        assert (told.norm, told.mean) == pytest.approx((now.norm, now.mean), rel=1e-5, abs=1e-7, nan_ok=True), name


@pytest.mark.parametrize(("options", "cap"), [({}, None), ({"use_xser": True}, None), ({}, 8192)])
def test_a_save_counts_what_it_writes(tmp_path: Path, options: dict[str, Any], cap: int | None) -> None:
    """Beside the tag, not in it: also of a tensor that is as large as the memory; those of removed tags go."""
    model = torch.nn.Linear(24, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 24)).sum().backward()
    optimizer.step()
    state = {**model.state_dict(), "bad": torch.tensor([1.0, math.nan, math.inf, 0.0]), "none": torch.ones(0)}
    state |= {"half": torch.ones(3).bfloat16(), "complex": torch.tensor([1 + 2j]), "count": torch.tensor([0, -7])}
    for tag in ("old", "t"):
        with Checkpointer(tmp_path, durable=False, memory_cap=cap) as saver:
            saver.save(tag, state, optimizer, param_names=[["weight", "bias"]], stats=True, num_kept_ckpts=1, **options)
    assert not [path.name for path in (tmp_path / "t").iterdir() if "stat" in path.name or "summar" in path.name]
    assert ["t"] == [path.name for path in (tmp_path / ".nxd_ckpt" / "summaries").iterdir()]
    _same(*(checkpoint_statistics(open_checkpoint(tmp_path), cache=cache) for cache in (True, False)))


@pytest.mark.parametrize("sizes", ["dp2tp2", "tp2pp2"])
def test_ranks_count_what_is_put_together(tmp_path: Path, sizes: str) -> None:
    """ZeRO-1 shards with padding, and replicas. If one rank's numbers are damaged or lost, the tag is read."""
    weights = weights_of()
    save_job(tmp_path, weights, layout_of(sizes, weights), stats=True)
    _same(*(checkpoint_statistics(open_checkpoint(tmp_path), cache=cache) for cache in (True, False)))

    (tmp_path / ".nxd_ckpt" / "statistics" / "step_1.json").unlink()
    counted = tmp_path / ".nxd_ckpt" / "summaries" / "step_1" / "rank_00001.json"
    for damage in (lambda: counted.write_text(counted.read_text().replace(",0,0,", ",9,-1,")), counted.unlink):
        damage()
        assert not checkpoint_statistics(open_checkpoint(tmp_path)).cached
        (tmp_path / ".nxd_ckpt" / "statistics" / "step_1.json").unlink()


def test_counts_that_cannot_be_true_are_reported_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone may have written the file of a rank: then the tensors are read. Files of ranks that never were are not."""
    with Checkpointer(tmp_path, durable=False) as saver:
        saver.save("t", {"w": torch.tensor([[3.0], [4.0]]), "c": torch.tensor([1j])}, stats=True)
    file = tmp_path / ".nxd_ckpt" / "summaries" / "t" / "rank_00000.json"
    good = json.loads(file.read_text())
    whole, complex_one = good["tensors"]["model/w"], good["tensors"]["model/c"]
    assert [[[0, 0], [2, 1], [2, 0, 0, 2, *whole[0][2][4:]]]] == whole
    halves = [[[0, 0], [1, 1], [1, 0, 0, 1, 1, 1, 1]], [[0, 0], [1, 1], [1, 0, 0, 1, 1, 1, 1]]]
    overlapping = [[[0, 0], [2, 1], [2, 0, 0, 2, 1, 1, 1]], [[1, 0], [1, 1], [1, 0, 0, 1, 1, 1, 1]]]
    lies = [
        {"model/w": [[[0, 0], [2, 1], [4, 0, 0, 4, 1, 1, 1]]]},  # two numbers for an element, which is not complex
        {"model/c": [[[0], [1], [1, 0, 0, 1, 1, 1, 1]]]},  # one number for an element that is complex
        {"model/w": halves},
        {"model/w": overlapping},
        {"model/w": [[[0, 1], [2, 1], whole[0][2]]]},
        {"model/w": [[[0], [2], whole[0][2]]]},
        {"model/w": [[[-1, 0], [2, 1], whole[0][2]]]},
        *({"model/w": [[[0, 0], [2, 1], [2, 0, 0, 2, *bad]]]} for bad in ([1, -5, 4], [1, 5, -4], [1, 5], ["1", 5, 4])),
        {"model/w": [[[0, 0], [2, 1], [2, 0, 0, 2, 10**400, 5, 4]]]},
        {"model/w": 5},
        [],
    ]
    told = [{**good["tensors"], **lie} if isinstance(lie, dict) else lie for lie in lies]
    texts = [json.dumps({**good, "tensors": tensors}) for tensors in told]
    for text in (*texts, "[" * 100_000, "\0", json.dumps({**good, "kind": "manifest"})):
        file.write_text(text)
        caplog.clear()
        found = checkpoint_statistics(open_checkpoint(tmp_path))
        assert (False, 5.0, 2) == (found.cached, found.tensors["model/w"].norm, found.tensors["model/c"].numel), text
        assert ["WARNING"] == [record.levelname for record in caplog.records], text
        (tmp_path / ".nxd_ckpt" / "statistics" / "t.json").unlink()

    file.write_text(json.dumps(good))
    for stranger in ("rank_00001.json", "rank_0.json", "notes"):
        (file.parent / stranger).write_text("{")
    caplog.clear()
    assert (True, []) == (checkpoint_statistics(open_checkpoint(tmp_path)).cached, caplog.records)
    assert [[[0], [1], [2, 0, 0, 1, *complex_one[0][2][4:]]]] == complex_one


def test_no_save_and_no_end_after_an_exception_waits_until_counts_are_kept(tmp_path: Path) -> None:
    """Though the store hangs that takes them: the next save goes on, and so does what is left by an exception."""
    goes_on, log = threading.Event(), list[Operation]()

    def hook(operation: Operation) -> None:
        log.append(operation)
        if operation.name == "write" and operation.key.startswith(SUMMARIES):
            goes_on.wait()

    for tag in ("a", "b", "c"):
        (tmp_path / SUMMARIES / tag).mkdir(parents=True)
    storage = HookedStorage(LocalStorage(tmp_path, durable=False), hook)
    saver = Checkpointer("", storage=storage)
    for tag in ("first", "second", "third"):
        saver.save(tag, {"w": torch.ones(4)}, stats=True)
    saver.abandon()  # as after an exception
    assert ["first", "second", "third"] == [info.tag for info in list_tags(LocalStorage(tmp_path))]

    goes_on.set()
    with Checkpointer("", storage=storage) as saver:
        saver.save("fourth", {"w": torch.ones(4)}, stats=True)
    assert checkpoint_statistics(open_checkpoint(tmp_path, "fourth")).cached
    lost = {"a", "b", "c"}
    assert set() == lost & {path.name for path in (tmp_path / SUMMARIES).iterdir()}
    assert set() == lost & {operation.key for operation in log if operation.name == "is_dir"}


def test_a_save_never_waits_for_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own end nor the next save, which takes the memory: what was not counted by then is read later."""
    needed, add = threading.Event(), Summary.add

    def slow(self: Summary, values: torch.Tensor) -> None:
        needed.wait()
        add(self, values)

    def waited(tasks: list[Future[bool]]) -> None:
        needed.set()
        wait(tasks)

    monkeypatch.setattr(Summary, "add", slow)
    monkeypatch.setattr("nxd_ckpt.save.counting.wait", waited)
    with Checkpointer(tmp_path, durable=False) as saver:
        for tag in ("first", "second"):
            saver.save(tag, {"v": torch.ones(3), "w": torch.ones(4)}, async_save=True, stats=True).wait()
    assert ["second"] == [path.name for path in (tmp_path / ".nxd_ckpt" / "summaries").iterdir()]
    assert [False, True] == [checkpoint_statistics(open_checkpoint(tmp_path, t)).cached for t in ("first", "second")]
