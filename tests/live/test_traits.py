"""What tells a plan of an earlier save from one that a state needs now."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from nxd_ckpt.live.dtensor import traits_of

pytestmark = pytest.mark.both


def test_a_strided_shard_is_no_plain_one() -> None:
    """Although torch 2.9 says that they are equal: a plan for one would save wrong rows of the other."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        plain, strided = (
            DTensor.from_local(torch.ones(2), mesh, [placement], run_check=False, shape=torch.Size([4]), stride=(1,))
            for placement in (Shard(0), _StridedShard(0, split_factor=2))
        )
        assert traits_of(plain) != traits_of(strided)
        assert traits_of(plain) == traits_of(plain.clone())
    finally:
        dist.destroy_process_group()
