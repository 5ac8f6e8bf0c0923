"""What two tags differ in: of any sizes, in every number, and with what is missing on either side."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt import (
    Topology,
    convert,
    diff_checkpoints,
    list_checkpoints,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.errors import DigestMismatch, InvalidArgument
from nxd_ckpt.prune import pin_checkpoint
from nxd_ckpt.reshard.summary import Tally
from nxd_ckpt.tag import side_by_side
from tests.cli.checkpoints import CUTS, PLACES, held, save_examples
from tests.golden.checkpoints import CONFIGURATIONS, saved
from tests.interop.saving import save_as_every_rank
from tests.reshard.ranks import save_job
from tests.reshard.transformer import layout_of, weights_of


def save_one(directory: Path, tag: str, model: dict[str, torch.Tensor], **parts: Any) -> None:
    save_as_every_rank(directory, tag, [Topology()], lambda _: {"model": model, **parts})


@pytest.mark.parametrize("to", [{"dp": 3, "tp": 1}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2, "use_xser": True}])
def test_a_tag_and_the_same_on_other_sizes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: dict[str, Any]
) -> None:
    """Model, moments, master weights, options: nothing differs, also where windows cut tensors in two."""
    monkeypatch.setattr(side_by_side, "_MEMORY", 512)
    weights = weights_of(torch.bfloat16)
    save_job(tmp_path, weights, layout_of("dp2tp2", weights, zero1=True))
    convert(tmp_path / "step_1", tmp_path / "other", to="tag", **to, durable=False)
    a, b = (open_checkpoint(tmp_path, tag) for tag in ("step_1", "other"))

    found = diff_checkpoints(a, b, full=True)

    assert (not found, len(a.metadata), 0) == (True, found.same_tensors, found.same_digests), found
    assert sum(told.nbytes or 0 for told in a.metadata.values()) == found.nbytes
    assert not diff_checkpoints(a, b)


def test_what_differs_is_told(tmp_path: Path) -> None:
    """Changed, missing, reshaped tensors and other dtypes; values; and how many are the same."""
    same = {"same": torch.rand(9, 4), "nan": torch.tensor([1.0, float("nan")])}
    one = {**same, "changed": torch.tensor([3.0, 4.0, 0.0]), "gone": torch.ones(1), "flat": torch.ones(6)}
    one |= {"cast": torch.tensor([1.0, 2.0]), "count": torch.tensor([2**60, 1])}
    other = {**same, "changed": torch.tensor([3.0, 4.0, 1.0]), "new": torch.ones(2), "flat": torch.ones(2, 3)}
    other |= {"cast": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "count": torch.tensor([2**60 + 1, 1])}
    save_one(tmp_path, "a", one, scheduler={"last_epoch": 1, "base": [1.0]}, user_content={"steps": 1, "x": None})
    save_one(tmp_path, "b", other, scheduler={"last_epoch": 2, "base": [1.0]}, user_content={"steps": 1, 3: "y"})

    found = diff_checkpoints(open_checkpoint(tmp_path, "a"), open_checkpoint(tmp_path, "b"))

    kinds = {difference.name: difference.kind for difference in found.tensors}
    assert kinds == {
        "model/changed": "values",
        "model/gone": "only in a",
        "model/flat": "shape",
        "model/cast": "dtype",
        "model/count": "values",
        "model/new": "only in b",
    }
    changed = found.tensors[0]
    assert (1, 0, 1.0, 0.2) == (changed.differing, changed.nans, changed.max_difference, changed.relative_norm)
    assert ["scheduler/last_epoch", "user_content/x", "user_content/3"] == [value.name for value in found.values]
    assert (2, 2) == (found.same_tensors, found.same_digests)

    with pytest.raises(InvalidArgument, match="layers"):
        diff_checkpoints(open_checkpoint(tmp_path, "a"), open_checkpoint(tmp_path, "b"), prefix="layers")


@given(
    values=st.lists(
        st.tuples(*[st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, float("inf"), -float("inf"), float("nan")])] * 2),
        min_size=1,
        max_size=12,
    ),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float64])] * 2),
)
def test_numbers_are_compared_as_numpy_would(
    values: list[tuple[float, float]], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Count, largest difference and relative norm, with infinities and NaN on one side or both."""
    a, b = (np.array(side) for side in zip(*values, strict=True))
    tally = Tally()
    tally.add(*(torch.tensor(side).to(dtype) for side, dtype in zip((a, b), dtypes, strict=True)))
    alone, both = np.isnan(a) ^ np.isnan(b), np.isnan(a) & np.isnan(b)
    equal = (a == b) | both
    with np.errstate(all="ignore"):
        distance = np.where(equal | alone, 0, np.abs(a - b))
        norm = np.sqrt(np.sum(np.where(np.isfinite(a), a, 0) ** 2))
        apart = np.sqrt(np.sum(distance**2))
        relative = 0.0 if not apart else float("inf") if not norm or np.isinf(apart) else apart / norm
    assert (int((~equal).sum()), int(alone.sum())) == (tally.differing, tally.nans)
    assert distance.max() == tally.max_difference
    assert tally.relative_norm == pytest.approx(relative)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e30])
def test_numbers_of_any_size_are_compared(dtype: torch.dtype, scale: float) -> None:
    """Whose squares float32 does not hold, or holds badly: to six digits as float64 has it, over several chunks."""
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randn(200_000, generator=drawn, dtype=torch.float64).mul(scale).to(dtype) for _ in range(2))
    b[:100_000] = a[:100_000]
    tally = Tally()
    tally.add(a, b)
    distance = a.double() - b.double()
    assert int((distance != 0).sum()) == tally.differing
    assert tally.max_difference == pytest.approx(float(distance.abs().max()), rel=1e-6, abs=0)
    assert tally.relative_norm == pytest.approx(float(distance.norm() / a.double().norm()), rel=1e-6, abs=0)


def changed_in(name: str) -> Callable[[int], dict[str, Any]]:
    """The ranks of the tag ``cut``, the first of which holds another first element."""

    def cut(rank: int) -> dict[str, Any]:
        model = {each: held(each, PLACES[rank]) for each in CUTS}
        if PLACES[rank].coordinates == PLACES[0].coordinates:
            model[name] = model[name].clone()
            model[name].view(-1)[0] += 0.5
        return {"model": model, "partitions": {each: partition for each, (partition, _) in CUTS.items()}}

    return cut


def test_one_changed_element_says_which_tensor(tmp_path: Path) -> None:
    """Of a cut tensor, and of one whose cut nobody knows: then ranks are compared, one by one."""
    save_examples(tmp_path)
    for name in ("column", "lost"):
        save_as_every_rank(tmp_path, name, PLACES, changed_in(name), use_xser=True)
        found = diff_checkpoints(open_checkpoint(tmp_path, "cut"), open_checkpoint(tmp_path, name))
        [difference] = found.tensors
        assert (f"model/{name}", "values", 1, 0.5) == (
            difference.name, difference.kind, difference.differing, difference.max_difference
        )


def test_what_cannot_be_compared_is_no_equality(tmp_path: Path) -> None:
    """An unknown cut on other sizes is reported with its reason; a damaged tensor is an error."""
    save_examples(tmp_path)
    one = {name: torch.zeros(2) for name in ("lost", "norm")}
    save_one(tmp_path, "one", one)
    found = diff_checkpoints(open_checkpoint(tmp_path, "cut"), open_checkpoint(tmp_path, "one"), prefix="model/lost")
    [difference] = found.tensors
    assert "not compared" == difference.kind
    assert str(difference.problem).startswith("its cut over 4 tensor-parallel ranks is not known")
    assert "partitions=" in str(difference.problem)

    shutil.copytree(tmp_path / "one", tmp_path / "copied")
    b = open_checkpoint(tmp_path, "copied")
    stub = b.opened.model_tree(b.topology.coordinates)["norm"]
    with (tmp_path / "copied" / stub.file).open("r+b") as file:
        file.seek(stub.offset)
        file.write(b"\x01")
    with pytest.raises(DigestMismatch, match="norm"):
        diff_checkpoints(open_checkpoint(tmp_path, "one"), b, full=True)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.one_in(3)
def test_tags_of_nxd_are_compared_as_they_are(golden: Path, configuration: str) -> None:
    """With themselves nothing differs, also where nobody told how they are cut, or whose state is whose."""
    source = saved(golden, configuration)
    tags = [open_checkpoint(source.directory, source.tags[-1]) for _ in range(2)]
    found = diff_checkpoints(*tags, full=True)
    missing = {one.name for one in found.tensors if "no file holds" in str(one.problem)}
    assert {one.name for one in found.tensors} == missing
    assert ((), bool(missing)) == (found.values, configuration.startswith("f_"))
    assert found.same_tensors + len(missing) == len(tags[0].metadata)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_large_integers_that_float64_rounds_are_not_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    """They differ by one."""
    for tag, value in (("a", 2**60), ("b", 2**60 + 1)):
        save_one(tmp_path, tag, {"count": torch.tensor([value, 1]).view(dtype)})
    a, b = (open_checkpoint(tmp_path, tag) for tag in ("a", "b"))
    [difference] = diff_checkpoints(a, b).tensors
    assert (1, 1.0) == (difference.differing, difference.max_difference)


def test_values_in_any_container_are_compared(tmp_path: Path) -> None:
    """Tensors in namespaces, at the end of a list that holds itself, and in empty containers beside them."""
    for tag, last in (("a", 1.0), ("same", 1.0), ("b", 2.0)):
        endless: list[Any] = [torch.tensor([1.0, last])]
        endless.append(endless)
        content = {"plain": SimpleNamespace(weights=torch.tensor([3.0, last])), "endless": endless, "none": ({}, [])}
        save_one(tmp_path, tag, {"x": torch.ones(1)}, user_content=content)
    a, same, b = (open_checkpoint(tmp_path, tag) for tag in ("a", "same", "b"))
    assert not diff_checkpoints(a, same)
    assert ["user_content/plain/weights", "user_content/endless/0"] == [
        value.name for value in diff_checkpoints(a, b).values
    ]


class Views:
    """A scheduler of sorts, whose state dict shows views of what it holds."""

    def __init__(self, value: float) -> None:
        self.rows, self.numbers = torch.full((1, 2), value), torch.full((1,), complex(value, value))

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": 1, "column": self.rows[:, 0], "conjugate": self.numbers.conj()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows[:, 0] = state["column"]
        self.numbers.copy_(state["conjugate"].conj())


def test_views_are_compared_by_their_values(tmp_path: Path) -> None:
    """By a load that is to be proved, too: a column of one row, and numbers that are conjugated as they are read."""
    model = torch.nn.Linear(2, 2)
    for number in (1, 2):
        save_checkpoint(tmp_path, number, model, scheduler=Views(number))
    load_checkpoint(tmp_path, 1, model, scheduler=Views(0), prove=True)
    a, b = (open_checkpoint(tmp_path, number) for number in (1, 2))
    assert not diff_checkpoints(a, a)
    assert ["scheduler/column", "scheduler/conjugate"] == [value.name for value in diff_checkpoints(a, b).values]


def test_the_tags_of_a_directory_are_listed(tmp_path: Path) -> None:
    """With their state; one that is not complete says what it lacks."""
    for tag in ("<b>1", "step_2"):
        save_checkpoint(tmp_path, tag, {"w": torch.ones(2)})
    pin_checkpoint(tmp_path, "<b>1")
    (tmp_path / "<b>1" / "done").unlink()
    tags = list_checkpoints(tmp_path)
    assert [("<b>1", False, False), ("step_2", True, True)] == [(one.tag, one.complete, one.latest) for one in tags]
    assert tags[0].pinned
    assert tags[0].problems[0].startswith("it lacks its 'done' marker")
    assert tags[1].saved is not None
    assert tags[1].problems == ()
