"""On torch-xla's devices, with its own ZeRO-1: what one job saved, every rank of another gets its part of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, close_checkpointers, save_checkpoint
from tests.reshard.ranks import Live, fresh, load_rank, mark, save_job
from tests.reshard.transformer import layout_of, weights_of
from tests.reshard.whole import OPTIONS, Layout, Weight, expected
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference
from tests.training.model import _cpu, zero1

pytestmark = pytest.mark.xla


class OnDevice(Live):
    """The same with its parameters on this process's device."""

    def __init__(self, weights: Sequence[Weight], layout: Layout, at: Topology) -> None:
        self._layout = layout
        super().__init__(weights, layout, at)

    def held(self) -> dict[str, Any]:
        found: dict[str, Any] = _cpu(super().held())
        return found

    def _optimizer(self, names: list[list[str]], master_weights: bool) -> Any:
        import torch_xla

        self.stage.to(torch_xla.device())
        for name, tensor in self.stage.state_dict(keep_vars=True).items():
            mark(tensor, self._layout.cuts[name])  # .to(xla) drops attributes
        groups = [
            {"params": [self._trained[name] for name in group], **OPTIONS[self._options[group[0]]]} for group in names
        ]
        settings = {"lr": 1.0, "grad_clipping": False, "save_master_weights": master_weights, "pin_layout": False}
        return zero1(groups, self.at, settings)


def moved(rank: int, directory: Path, weights: list[Weight], layout: Layout, share_reads: bool | None) -> str | None:
    """Where this rank is not what it should be after a load; what it has then is saved again."""
    live = OnDevice(weights, layout, layout.topology.at(rank))
    live.scramble(stepped=rank % 2 == 1)
    options: dict[str, Any] = {"partitions": layout.partitions, "timeout": 600.0}
    load_rank(directory, live, share_reads=share_reads, **options)
    wrong = difference(expected(weights, layout, live.at), live.held())
    objects = {"model": live.model, "optimizer": live.optimizer, "user_content": {"saved": 1}}
    save_checkpoint(directory / "again", "step_1", **objects, topology=live.at, **options)
    close_checkpointers()
    return wrong


@pytest.mark.parametrize(
    ("sizes", "dtype", "experts", "share_reads"),
    [
        (("dp2tp2", "dp4", "dp3"), torch.float32, False, None),
        (("dp4", "tp2pp2", "dp3"), torch.bfloat16, False, None),
        (("dp4ep2", "dp2ep2tp2", "dp4"), torch.float32, True, True),
    ],
    ids=["replicas", "master weights and stages", "experts, shared reads"],
)
def test_devices_get_their_parts_and_give_them_back(
    xla_ranks: RankPool,
    tmp_path: Path,
    sizes: tuple[str, str, str],
    dtype: torch.dtype,
    experts: bool,
    share_reads: bool | None,
) -> None:
    """Weights, moments, master weights and options; of the first sizes on the second, and from there on the third."""
    weights = weights_of(dtype, experts=experts)
    first, second, third = (layout_of(each, weights) for each in sizes)
    save_job(tmp_path, weights, first)
    assert [None] * 4 == xla_ranks.run(moved, tmp_path, weights, second, share_reads)
    for at in third.ranks:
        rank = fresh(weights, third, at)
        load_rank(tmp_path / "again", rank, partitions=third.partitions)
        assert None is difference(expected(weights, third, at), rank.held())
