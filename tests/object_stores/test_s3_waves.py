"""A state that is larger than the staging memory goes up in waves, each from the memory of the one before."""

from __future__ import annotations

import uuid

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.storage.s3 import upload
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.conftest import BUCKET
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.plain, pytest.mark.once]

MIB = 2**20


@pytest.mark.parametrize("cap", [4 * MIB, pytest.param(20 * MIB, marks=pytest.mark.soak)])
def test_a_save_to_s3_in_waves_arrives_bit_for_bit(s3_server: S3Server, cap: int) -> None:
    """A tensor that is larger than the staging memory and than a part, between small ones, arrives bit for bit."""
    url, options = f"s3://{BUCKET}/{uuid.uuid4().hex}", s3_server.options
    small = {f"small.{number}": torch.rand(MIB // 8 + number) for number in range(12)}
    large = torch.rand((2 * upload.PART + 5 * MIB) // 4)
    state = {**small, "large": large, "empty": torch.empty(0), "last": torch.rand(3)}
    with Checkpointer(url, storage_options=options, memory_cap=cap) as saver:
        for tag in ("first", "second"):
            pending = saver.save(tag, state, async_save=True)
            for tensor in state.values():
                tensor += 1.0  # the staging memory holds what was there at the call
            pending.wait()
            loaded: dict[str, torch.Tensor] = {}
            saver.load(tag, loaded)
            assert all(torch.equal(tensor, loaded[name] + 1.0) for name, tensor in state.items())
    assert () == verify_checkpoint(url, "second", storage_options=options).problems
    assert [] == s3_server.unfinished(BUCKET)
