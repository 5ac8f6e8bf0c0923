"""Where and by whom an export is written: object stores, several processes, little memory."""

import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load

from nxd_ckpt import convert
from nxd_ckpt.errors import DtypeMismatch
from nxd_ckpt.output.locations import Location
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, save_job, weights, write_config
from tests.support.processes import run_ranks
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal

JOB = Job(Model(heads=8), tp=4, qkv="linear", copies=2)

MEMBER = """
import sys
from nxd_ckpt import convert

done = convert(
    sys.argv[1], sys.argv[2], to="hf", config=sys.argv[3], kv_size_multiplier=2, size_per_shard="1kB", all_ranks=True,
    timeout=600,
)
print(len(done.files))
"""


def stored(url: str) -> State:
    """All tensors below a URL of the store in memory."""
    files = fsspec.filesystem("memory")
    state: State = {}
    for path in files.glob(f"{url.removeprefix('memory:/')}/*.safetensors"):
        state |= load(files.cat_file(path))
    return state


@pytest.mark.parametrize("size_per_shard", ["1kB", "1GB"])
def test_an_export_goes_to_an_object_store(tmp_path: Path, size_per_shard: str) -> None:
    """Straight to a URL, from a tag in another; a second one replaces it on request."""
    url = f"memory://{uuid.uuid4().hex}"
    config = write_config(tmp_path / "config", JOB.model.config)
    how: dict[str, Any] = {"config": config, "kv_size_multiplier": 2, "size_per_shard": size_per_shard}
    tag = save_job(tmp_path / "run", JOB, JOB.model.state())
    convert(tag, f"{url}/hf", to="hf", **how)
    assert [] == differences(JOB.model.state(), stored(f"{url}/hf"))
    convert(tag, f"{url}/hf", to="hf", overwrite=True, **{**how, "size_per_shard": "2kB"})
    assert [] == differences(JOB.model.state(), stored(f"{url}/hf"))


def test_on_a_store_the_index_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds it finds everything; what fails before leaves nothing."""
    log: list[Operation] = []
    opened = Location.open
    monkeypatch.setattr(Location, "open", lambda place, durable=True: _recording(opened(place, durable), log))
    config = write_config(tmp_path / "config", JOB.model.config)
    tag = save_job(tmp_path / "run", JOB, JOB.model.state())
    url = f"memory://{uuid.uuid4().hex}/hf"
    convert(tag, url, to="hf", config=config, kv_size_multiplier=2, size_per_shard="1kB")
    written = [one.key for one in log if one.name in ("write", "close") and one.key.startswith("hf/")]
    assert ["hf/config.json", "hf/model.safetensors.index.json"] == written[-2:]

    state = {name: tensor * 1e30 for name, tensor in JOB.model.state().items()}
    large = save_job(tmp_path / "large", JOB, state)
    with pytest.raises(DtypeMismatch):
        convert(large, f"{url}2", to="hf", config=config, kv_size_multiplier=2, dtype="float16")
    assert {} == stored(f"{url}2")


def _recording(storage: Storage, log: list[Operation]) -> Storage:
    return HookedStorage(storage, log.append)


def test_processes_share_the_files(tmp_path: Path) -> None:
    """With all_ranks each writes some; the result is that of one."""
    config = write_config(tmp_path / "config", JOB.model.config)
    tag = save_job(tmp_path / "run", JOB, JOB.model.state())
    ended = run_ranks(MEMBER, *[[tag, tmp_path / "out", config]] * 2)
    assert [0, 0] == [one.returncode for one in ended]
    counts = [int(one.stdout.split()[-1]) for one in ended]  # gloo prints too
    assert counts == [len(list((tmp_path / "out").iterdir()))] * 2
    assert [] == differences(JOB.model.state(), weights(tmp_path / "out"))


def exported(rank: int, tag: Path, config: Path, out: Path, how: dict[str, Any]) -> str:
    """The refusal of an export of which rank 1 has no config.json."""
    mine = config.with_name("absent") if rank == 1 else config
    return refusal(lambda: convert(tag, out, config=mine, kv_size_multiplier=2, all_ranks=True, timeout=600, **how))


@pytest.mark.parametrize("how", [{"to": "hf"}, {"to": "tag", "names": "hf"}], ids=["hf", "tag"])
def test_what_one_process_lacks_is_told_to_all(gloo_ranks: RankPool, tmp_path: Path, how: dict[str, Any]) -> None:
    """At once: the others waited for it until the timeout, and told of that."""
    config = write_config(tmp_path / "config", JOB.model.config)
    tag = save_job(tmp_path / "run", JOB, JOB.model.state())
    told = gloo_ranks.run(exported, tag, config, tmp_path / "out" / "a", how)
    assert all("absent" in said for said in told)
