"""Jobs that save to a real S3 server and resume on other sizes: they read no more than they need."""

import uuid

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import Checkpointer, Topology
from tests.support.s3_server import S3Server

MIB = 2**20


def live(value: float, tp: int, rank: int) -> torch.nn.Module:
    """A column of 16 MiB that is cut over tensor-parallel ranks, and 2 MiB that all have."""
    module = torch.nn.Module()
    rows = 4 * 1024 // tp
    column = torch.nn.Parameter(torch.arange(rows * 1024.0).reshape(rows, 1024) + rows * 1024 * rank + value)
    module.column = column
    for name, attribute in {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}.items():
        setattr(column, name, attribute)
    module.everywhere = torch.nn.Parameter(torch.arange(0.5 * MIB) + value)
    return module


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 4])
def test_a_rank_downloads_what_it_needs(s3_server: S3Server, tp: int) -> None:
    """On the same and on other sizes, digests included: 1.1 times the bytes of its own part at most."""
    bucket = f"bytes-{uuid.uuid4().hex}"
    s3_server.make_bucket(bucket)
    url, options = f"s3://{bucket}", s3_server.options
    saves = []
    for rank in range(2):
        saver = Checkpointer(
            url, topology=Topology(tp=2, rank=rank), storage_options=options, run_id="save", timeout=600.0
        )
        saves.append((saver, saver.save("step_1", live(0.0, 2, rank), async_save=True)))
    for _, pending in saves:
        pending.wait()
    for saver, _ in saves:
        saver.close()
    for rank in range(tp):
        module, expected = live(1.0, tp, rank), live(0.0, tp, rank)
        before = sum(s3_server.sent.values())
        nxd_ckpt.load_checkpoint(url, "step_1", module, topology=Topology(tp=tp, rank=rank), storage_options=options)
        sent = sum(s3_server.sent.values()) - before
        pairs = zip(module.parameters(), expected.parameters(), strict=True)
        assert all(torch.equal(loaded, saved) for loaded, saved in pairs)
        assert sent <= 1.1 * sum(parameter.nbytes for parameter in module.parameters())
