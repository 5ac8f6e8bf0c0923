"""Jobs on an S3 server that refuses them, at the start or in the middle, and places that are easily confused."""

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology, has_checkpoint, load_checkpoint
from nxd_ckpt.errors import CheckpointError, StorageError
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import list_tags
from tests.protocol.job import outcome_of
from tests.protocol.states import PATIENCE, lose_patience
from tests.support.processes import run_program
from tests.support.s3_proxy import Fault, S3Proxy
from tests.support.s3_server import S3Server, options_for
from tests.support.threads import in_threads

FOR_EVER = 10**6
MIB = 2**20

EXITING = """
import json, sys
import torch
from nxd_ckpt import save_checkpoint

state = {"large": torch.full((5 * 2**20,), 7.0)}
save_checkpoint(sys.argv[1], "t", state, async_save=True, storage_options=json.loads(sys.argv[2]))
"""


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.address) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    name = f"b{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(name)
    return name


def through(proxy: S3Proxy) -> dict[str, Any]:
    return {**options_for(proxy.address), "retries": 0}


def rank_of_two(rank: int, url: str, options: dict[str, Any], timeout: float = 2.0) -> Checkpointer:
    return Checkpointer(url, topology=Topology(tp=2, rank=rank), storage_options=options, run_id="run", timeout=timeout)


def state_of(value: float) -> dict[str, torch.Tensor]:
    """Some of it goes up in several parts."""
    return {"large": torch.full((2 * MIB,), value), "small": torch.full((3,), value)}


def small(value: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3,), value)}


def errors_of(*calls: Callable[[], Any]) -> list[BaseException | None]:
    """What each raises; all run at once."""
    found: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        found[number] = outcome_of(calls[number])

    in_threads(*(partial(run, number) for number in range(len(calls))))
    return found


REFUSALS = {
    "denied": Fault("", "refuse", FOR_EVER, 403, "AccessDenied"),
    "no bucket": Fault("", "refuse", FOR_EVER, 404, "NoSuchBucket"),
}
SAID = {"denied": "do not allow", "no bucket": "does not exist"}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_store_that_refuses_everything(proxy: S3Proxy, s3_server: S3Server, bucket: str, why: str) -> None:
    """Says so on every rank, to whoever saves, loads or looks; nothing is written, nothing loaded."""
    proxy.faults.append(replace(REFUSALS[why]))
    url, options, state = f"s3://{bucket}/run", through(proxy), state_of(1.0)
    savers = [rank_of_two(rank, url, options) for rank in range(2)]
    calls = [lambda saver=saver: saver.save("t", state) for saver in savers]
    calls += [lambda saver=saver: saver.load(None, state) for saver in savers]
    for error in errors_of(*calls, lambda: has_checkpoint(url, storage_options=options)):
        assert SAID[why] in str(error)
        assert isinstance(error, (OSError, CheckpointError))
    assert [] == s3_server.keys(bucket)
    assert all(torch.equal(state_of(1.0)[name], state[name]) for name in state)


def test_an_endpoint_where_nobody_answers_is_named(bucket: str) -> None:
    """Is an error that says what to check."""
    options = {**options_for(("127.0.0.1", 9)), "retries": 0}
    url = f"s3://{bucket}/run"
    savers = [rank_of_two(rank, url, options) for rank in range(2)]
    calls = [lambda saver=saver: saver.save("t", state_of(1.0)) for saver in savers]
    for error in errors_of(*calls, lambda: has_checkpoint(url, storage_options=options)):
        assert "check endpoint_url" in str(error)


def test_a_bucket_that_is_read_only_is_loaded_from(proxy: S3Proxy, s3_server: S3Server, bucket: str) -> None:
    """Refuses saves, and is loaded from."""
    url, state = f"s3://{bucket}/run", small(0)
    with Checkpointer(url, storage_options=s3_server.options) as saver:
        saver.save("t", small(1))
    before = s3_server.keys(bucket)
    proxy.faults.append(Fault("^(PUT|POST|DELETE)", "refuse", FOR_EVER, 403, "AccessDenied"))
    options = through(proxy)
    with pytest.raises(StorageError, match="do not allow"):
        Checkpointer(url, storage_options=options).save("u", state)
    load_checkpoint(url, model=state, storage_options=options)
    assert 1 == int(state["weight"].max())
    assert before == s3_server.keys(bucket)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_credentials_that_expire_in_the_middle_fail_the_save(s3_server: S3Server, bucket: str, victim: int) -> None:
    """Of one rank's part of an async save: it fails on both, nothing is seen, and renewed ones save again."""
    url = f"s3://{bucket}/run"
    with S3Proxy(s3_server.address) as one, S3Proxy(s3_server.address) as other:
        proxies = [one, other]
        savers = [rank_of_two(rank, url, through(proxy), PATIENCE) for rank, proxy in enumerate(proxies)]
        assert [None, None] == errors_of(*(lambda saver=saver: saver.save("t", state_of(1.0)) for saver in savers))
        pending = []
        for saver in savers:
            lose_patience(saver)
            # From the second part on, nothing at all.
            begun = Fault("partNumber=2", "refuse", FOR_EVER, 400, "ExpiredToken")
            proxies[victim].faults[:] = [begun]
            pending.append(saver.save("u", state_of(2.0), async_save=True))
        while not begun.hits:
            threading.Event().wait(0.01)
        proxies[victim].faults.append(Fault("", "refuse", FOR_EVER, 400, "ExpiredToken"))
        errors = errors_of(*(save.wait for save in pending))
        assert "renew" in str(errors[victim])
        assert isinstance(errors[1 - victim], CheckpointError)
        one.faults.clear()
        other.faults.clear()
        for saver in savers:
            lose_patience(saver, PATIENCE)
        assert ["t"] == [info.tag for info in list_tags(savers[0].storage) if info.complete]
        assert [None, None] == errors_of(*(lambda saver=saver: saver.save("u", state_of(3.0)) for saver in savers))
        errors_of(*(saver.close for saver in savers))
    assert [] == s3_server.unfinished(bucket)
    for rank in range(2):
        model: dict[str, torch.Tensor] = {}
        load_checkpoint(url, "u", model, topology=Topology(tp=2, rank=rank), storage_options=s3_server.options)
        assert 3.0 == float(model["large"].max())


@pytest.mark.parametrize("prefix", ["", "/run 7/a+b%20c/é~&=#?'()"])
@pytest.mark.one_in(2)
def test_names_of_all_kinds_are_kept(s3_server: S3Server, bucket: str, prefix: str) -> None:
    """The root of a bucket, and characters that URLs and XML treat specially, in directories and tags."""
    url, options, tags = f"s3://{bucket}{prefix}", s3_server.options, ["a b", "1+1%3D2", "<é>&\"'?#"]
    with Checkpointer(url, storage_options=options) as saver:
        for value, tag in enumerate(tags):
            saver.save(tag, small(value), num_kept_ckpts=2)
        saver.save(tags[-1], small(9), overwrite=True)
    assert sorted(tags[1:]) == [info.tag for info in list_tags(open_storage(url, storage_options=options))]
    for chosen, value in ((tags[1], 1), (None, 9)):
        model = small(0)
        load_checkpoint(url, chosen, model, storage_options=options)
        assert value == int(model["weight"].max())
    assert [] == [key for key in s3_server.keys(bucket) if tags[0] in key] + s3_server.unfinished(bucket)


def test_names_that_begin_alike_are_different(s3_server: S3Server, bucket: str) -> None:
    """``run7`` has nothing to do with ``run70``, nor ``step_1`` with ``step_10``."""
    options = s3_server.options
    for run in ("run7", "run70"):
        with Checkpointer(f"s3://{bucket}/{run}", storage_options=options) as saver:
            saver.save("step_1", small(1))
            saver.save("step_10", small(10))
    left = open_storage(f"s3://{bucket}/run70", storage_options=options).create("step_10/unfinished", 15 * MIB)
    left.write_at(0, bytes(6 * MIB))
    left.settle()
    with Checkpointer(f"s3://{bucket}/run7", storage_options=options) as saver:
        saver.save("step_1", small(2), overwrite=True)
        saver.save("step_100", small(3), num_kept_ckpts=2)
    tags = {
        run: [info.tag for info in list_tags(open_storage(f"s3://{bucket}/{run}", storage_options=options))]
        for run in ("run7", "run70")
    }
    assert {"run7": ["step_1", "step_100"], "run70": ["step_1", "step_10"]} == tags
    assert ["run70/step_10/unfinished"] == s3_server.unfinished(bucket)
    left.abort()


def test_a_process_that_ends_during_an_upload(s3_server: S3Server, bucket: str) -> None:
    """Finishes it first."""
    url, options = f"s3://{bucket}/run", s3_server.options
    ended = run_program(EXITING, url, json.dumps(options))
    assert (0, "") == (ended.returncode, ended.stderr)
    model: dict[str, torch.Tensor] = {}
    load_checkpoint(url, "t", model, storage_options=options)
    assert 7.0 == float(model["large"].min())
