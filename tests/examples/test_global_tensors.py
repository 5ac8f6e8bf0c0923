"""Global tensors put together by hand: parts in their places, padding dropped, every bit compared."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import nxd_ckpt

EXAMPLES = Path(__file__).parents[2] / "examples"
EMBED, NORM, DOWN, HEAD = "embed.weight", "layers.0.mlp_norm.weight", "layers.0.mlp.down.weight", "head.weight"
ORDER = [EMBED, DOWN, NORM]
EMBEDDING, DOWN_WEIGHT = torch.arange(24.0).reshape(6, 4), torch.arange(100.0, 112.0).reshape(3, 4)
WHOLE = {EMBED: EMBEDDING, NORM: torch.tensor([1.0, 2.0, 3.0]), DOWN: DOWN_WEIGHT, HEAD: EMBEDDING}
# For two tensor-parallel ranks. Each local tensor has three rows: over two replicas, one is padding.
HALVES = [
    {EMBED: EMBEDDING[:3], NORM: WHOLE[NORM], DOWN: DOWN_WEIGHT[:, :2], HEAD: EMBEDDING[:3]},
    {EMBED: EMBEDDING[3:], NORM: WHOLE[NORM], DOWN: DOWN_WEIGHT[:, 2:], HEAD: EMBEDDING[3:]},
]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("global_tensors")


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("demo_compare")


def write_tag(tag: Path, models: Sequence[Mapping[str, Tensor]], dp: int) -> None:
    """Save each tensor-parallel rank's model, and as moments and master weights simple functions of it."""
    for tp_rank, model in enumerate(models):
        save(tag / "model" / f"dp_rank_00_tp_rank_{tp_rank:02d}_pp_rank_00.pt", dict(model))
        for dp_rank in range(dp):
            own = [zero1_shard(model[name], dp, dp_rank) for name in ORDER]
            optimizer = {
                "base_state": {
                    index: {"step": torch.tensor(7.0), "exp_avg": 2 * value, "exp_avg_sq": 3 * value}
                    for index, value in enumerate(own)
                },
                "sharded_master_weights": dict(enumerate(own)),
                "shape_info": {index: list(model[name].shape) for index, name in enumerate(ORDER)},
            }
            save(tag / "optim" / f"dp_rank_{dp_rank:02d}_tp_rank_{tp_rank:02d}_pp_rank_00.pt", optimizer)


def zero1_shard(tensor: Tensor, dp: int, dp_rank: int) -> Tensor:
    padding = tensor.new_zeros(-len(tensor) % dp, *tensor.shape[1:])
    return torch.cat([tensor, padding]).chunk(dp)[dp_rank]


def save(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file)


def test_parts_of_all_ranks_make_the_whole(by_hand: ModuleType, tmp_path: Path) -> None:
    """Row-parallel weights are joined along columns, others along rows; norms are taken once, padding not at all."""
    write_tag(tmp_path, HALVES, dp=2)
    expected = {f"model/{name}": value for name, value in WHOLE.items()}
    for name in ORDER:
        expected[f"optim/{name}/exp_avg"] = 2 * WHOLE[name]
        expected[f"optim/{name}/exp_avg_sq"] = 3 * WHOLE[name]
        expected[f"optim/{name}/master_weights"] = WHOLE[name]
        expected[f"optim/{name}/step"] = torch.tensor(7.0)
    found = by_hand.global_tensors(tmp_path, dp=2, tp=2)
    assert expected.keys() == found.keys()
    assert [] == [name for name, value in expected.items() if not torch.equal(value, found[name])]


def test_what_all_ranks_hold_must_be_the_same_on_all(by_hand: ModuleType, tmp_path: Path) -> None:
    """A norm that is another one on the second tensor-parallel rank is named, and not silently that of the first."""
    write_tag(tmp_path, [HALVES[0], HALVES[1] | {NORM: torch.tensor([1.0, 2.0, 4.0])}], dp=2)
    with pytest.raises(by_hand.ReplicasDiffer, match=NORM):
        by_hand.global_tensors(tmp_path, dp=2, tp=2)


def test_one_bit_is_found_across_sizes(compare: ModuleType, tmp_path: Path) -> None:
    """The same tensors on other sizes are equal; a zero that turned negative is not, wherever it shows."""
    sizes, other = nxd_ckpt.Topology(dp=2, tp=2), nxd_ckpt.Topology(dp=4, tp=1)
    changed = DOWN_WEIGHT - 100
    changed[0, 0] = -0.0
    write_tag(tmp_path / "saved", [half | {DOWN: half[DOWN] - 100} for half in HALVES], dp=2)
    write_tag(tmp_path / "same", [WHOLE | {DOWN: DOWN_WEIGHT - 100}], dp=4)
    write_tag(tmp_path / "changed", [WHOLE | {DOWN: changed}], dp=4)
    same, found = (
        compare.global_tensors_that_differ(tmp_path / "saved", sizes, tmp_path / name, other)
        for name in ("same", "changed")
    )
    assert (16, []) == same
    names = [f"model/{DOWN}", *(f"optim/{DOWN}/{state}" for state in ("exp_avg", "exp_avg_sq", "master_weights"))]
    assert (16, names) == found
