"""Jobs that save to a real S3 server: killed at any moment, resumed on other sizes, reading no more than they need."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.coordination.paths import STAGING, TRASH
from nxd_ckpt.core import names
from nxd_ckpt.storage.s3 import upload
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.opened import open_complete_tag
from tests.protocol.job import Job
from tests.support.s3_server import SMALLEST_PART, S3Server

pytestmark = [pytest.mark.plain, pytest.mark.once]

WORLD = 2
KILLS = 30
MIB = 2**20


def model_of(value: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's state in save number ``value``: a tensor that goes up in several parts, and a small one."""
    return {"large": torch.full((2 * MIB,), 10.0 * value + rank), "small": torch.arange(5.0) + value}


def train(rank: int, url: str, options: dict[str, Any], number: int, begun: str) -> bool:
    """A run: a new tag, then one that is saved anew in every run."""
    upload.PART = SMALLEST_PART
    saver = Checkpointer(
        url, topology=Topology(tp=WORLD, rank=rank), storage_options=options, run_id=f"run{number}", timeout=600.0
    )
    saver.save(f"step_{number}", model_of(2 * number, rank), user_content={"value": 2 * number}, num_kept_ckpts=2)
    Path(f"{begun}.{rank}").touch()
    value = 2 * number + 1
    saver.save("again", model_of(value, rank), user_content={"value": value}, overwrite=True, async_save=True)
    saver.close()
    return True


def values(url: str, options: dict[str, Any]) -> dict[str, int]:
    """Which save every visible tag holds; each is complete, verified, and of one save on all ranks."""
    found: dict[str, int] = {}
    for info in list_tags(open_storage(url, storage_options=options)):
        if not info.complete:
            continue
        for rank in range(WORLD):
            model: dict[str, torch.Tensor] = {}
            content = nxd_ckpt.load_checkpoint(
                url, info.tag, model, topology=Topology(tp=WORLD, rank=rank), storage_options=options
            )
            expected = model_of(content["value"], rank)
            assert all(torch.equal(expected[name], model[name]) for name in expected)
            assert found.setdefault(info.tag, content["value"]) == content["value"]
    return found


def strays(server: S3Server, bucket: str, prefix: str, url: str) -> list[str]:
    """Objects and unfinished uploads that no complete tag names, but for the job's own small files."""
    storage = open_storage(url, storage_options=server.options)
    named = set()
    for info in list_tags(storage):
        opened = open_complete_tag(storage, info.tag)
        places = [opened.topology.coordinates_of(rank) for rank in range(WORLD)]
        files = {file for at in places for file in (names.index_file(at), *opened.index(at).files)}
        named |= {f"{info.tag}/{file}" for file in (names.MARKER, names.MANIFEST, names.DONE, *files)}
    keys = [key.removeprefix(prefix) for key in server.keys(bucket)]
    left = [key for key in keys if key.startswith((STAGING, TRASH)) or not key.startswith(".")]
    return [key for key in left if key not in named] + server.unfinished(bucket)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_after_a_kill_all_that_is_visible_is_complete(s3_server: S3Server, tmp_path: Path) -> None:
    """After each kill all that is visible is complete; the next run leaves neither objects nor uploads of the dead."""
    seed = time.time_ns()
    print("seed", seed)
    random, bucket = Random(seed), f"kills-{uuid.uuid4().hex}"
    s3_server.make_bucket(bucket)
    url, options = f"s3://{bucket}/run", s3_server.options
    started = time.monotonic()
    Job(WORLD, train, url, options, 1, str(tmp_path / "1")).values()
    lasts = time.monotonic() - started
    assert {"step_1": 2, "again": 3} == values(url, options)
    again = 3
    for number in range(2, KILLS + 2):
        begun = tmp_path / str(number)
        job = Job(WORLD, train, url, options, number, str(begun))
        victim = random.randrange(WORLD)
        while not begun.with_name(f"{number}.{victim}").exists() and job.alive(victim):
            time.sleep(0.001)
        time.sleep(random.uniform(0.0, lasts / 2))
        job.kill_all()
        found = values(url, options)
        assert 2 * number == found[f"step_{number}"]
        assert found.get("again") in (None, again, 2 * number + 1)
        again = found.get("again", again)
    last = KILLS + 2
    Job(WORLD, train, url, options, last, str(tmp_path / str(last))).values()
    assert {f"step_{last}": 2 * last, "again": 2 * last + 1}.items() <= values(url, options).items()
    assert [] == strays(s3_server, bucket, "run/", url)


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
