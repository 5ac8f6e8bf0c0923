"""The functions, the command, copies and local copies against an S3 server: the same as with a directory."""

import json
import logging
import signal
import tempfile
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import (
    Checkpointer,
    convert,
    copy_checkpoint,
    has_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    unshard_checkpoint,
)
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.conversion.tags import optimizers, plainly, save_example, sharded, whole
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import save_job, write_config
from tests.support.processes import Program, run_program
from tests.support.s3_server import S3Server
from tests.tag.equality import difference

SECRET = "not-so-secret"
STATE = {"large": torch.arange(3 * 2**20, dtype=torch.float32), "small": torch.ones(3)}
NBYTES = sum(tensor.nbytes for tensor in STATE.values())

KILLED = """
import json, sys
from nxd_ckpt import copy_checkpoint
from nxd_ckpt.output import locations
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.testing.storage import HookedStorage, killing

hook = killing("create", "*/scheduler.pt")
locations.open_storage = lambda path, durable, options: HookedStorage(open_storage(path, durable, options), hook)
copy_checkpoint(sys.argv[1], sys.argv[2], num_workers=1, storage_options=json.loads(sys.argv[3]))
"""

LOADING = """
import json, sys
import torch
from nxd_ckpt import load_checkpoint

state = {}
options = json.loads(sys.argv[3])
load_checkpoint(sys.argv[1], model=state, pre_download=True, work_dir=sys.argv[2], storage_options=options)
assert torch.equal(torch.arange(3 * 2**20, dtype=torch.float32), state["large"])
"""


@dataclass(frozen=True)
class Bucket:
    """One of its own for each test."""

    server: S3Server
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/run"

    @property
    def options(self) -> dict[str, Any]:
        return self.server.options

    @property
    def words(self) -> list[str]:
        """The options as the command takes them."""
        given = self.options
        flat = {key: given[key] for key in ("key", "secret", "endpoint_url")}
        flat["client_kwargs.region_name"] = given["client_kwargs"]["region_name"]
        return [word for key, value in flat.items() for word in ("--storage-option", f"{key}={value}")]

    def sent(self) -> int:
        """Bytes of objects that were downloaded."""
        return sum(count for key, count in self.server.sent.items() if key.startswith(f"/{self.name}/"))


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    name = f"b{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(name)
    return Bucket(s3_server, name)


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}


def equal(state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in STATE.items())


def test_the_four_functions_take_urls(bucket: Bucket) -> None:
    """With options; a slash more or less names the same place, for which the process keeps one handle."""
    options = bucket.options
    assert not has_checkpoint(bucket.url, storage_options=options)
    try:
        save_checkpoint(bucket.url, "one", STATE, user_content={"steps": 1}, storage_options=options)
        save_checkpoint(f"{bucket.url}/", "two", STATE, user_content={"steps": 2}, async_save=True)
        nxd_ckpt.finalize_checkpoint()
        state = zeros()
        assert {"steps": 2} == load_checkpoint(bucket.url, model=state)  # through the handle that saves there
    finally:
        nxd_ckpt.close_checkpointers()
    assert equal(state)
    assert has_checkpoint(bucket.url, storage_options=options)
    assert ("two", {"steps": 2}) == (
        (opened := open_checkpoint(bucket.url, storage_options=options)).tag,
        opened.user_content(),
    )
    state = zeros()
    assert {"steps": 1} == load_checkpoint(bucket.url, "one", state, storage_options=options)
    assert equal(state)
    assert () == verify_checkpoint(bucket.url, storage_options=options).problems
    assert not Path("s3:").exists()


def test_secrets_stay_secret(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """Not in the log, not in errors, not in what is saved, not in what an object shows of itself."""
    caplog.set_level(logging.DEBUG, "nxd_ckpt")
    with Checkpointer(bucket.url, storage_options=bucket.options) as checkpointer:
        checkpointer.save("one", STATE, use_xser=True)
        shown = repr(checkpointer) + repr(vars(checkpointer)) + repr(checkpointer.storage)
        with pytest.raises(CheckpointError) as raised:
            checkpointer.load("absent", zeros())
    storage = open_storage(bucket.url, storage_options=bucket.options)
    saved = b"".join(
        storage.read(key.removeprefix("run/")) for key in bucket.server.keys(bucket.name) if not key.endswith(".pt")
    )
    for text in (shown, str(raised.value), caplog.text, saved.decode(errors="replace")):
        assert SECRET not in text


@pytest.mark.parametrize("use_xser", [False, True])
@pytest.mark.one_in(2)
def test_a_download_is_as_large_as_what_is_needed(bucket: Bucket, tmp_path: Path, use_xser: bool) -> None:
    """By default, and with ``pre_download``, where a second load needs hardly any."""
    options = bucket.options
    with Checkpointer(bucket.url, storage_options=options) as checkpointer:
        checkpointer.save("one", STATE, use_xser=use_xser)
    ways: list[dict[str, Any]] = [{}] + 2 * [{"pre_download": True, "work_dir": tmp_path}]
    shares = []
    for way in ways:
        before, state = bucket.sent(), zeros()
        load_checkpoint(bucket.url, model=state, storage_options=options, **way)
        assert equal(state)
        shares.append((bucket.sent() - before) / NBYTES)
    assert [True, True, True] == [1 <= shares[0] < 1.1, 1 <= shares[1] < 1.1, shares[2] < 0.1]


def test_processes_of_a_host_share_one_download(bucket: Bucket, tmp_path: Path) -> None:
    """Three that start at once download together what one needs."""
    with Checkpointer(bucket.url, storage_options=bucket.options) as checkpointer:
        checkpointer.save("one", STATE)
    before = bucket.sent()
    with ExitStack() as stack:
        program = partial(Program, LOADING, bucket.url, tmp_path, json.dumps(bucket.options))
        programs = [stack.enter_context(program()) for _ in range(3)]
        assert [0, 0, 0] == [program.wait().returncode for program in programs]
    assert 1 <= (bucket.sent() - before) / NBYTES < 1.1


def test_a_copy_that_is_killed_goes_on(bucket: Bucket, tmp_path: Path) -> None:
    """Nothing is visible meanwhile, and only what is missing is uploaded then."""
    source, target = save_example(tmp_path / "input", 2), f"{bucket.url}/step_3"
    assert -signal.SIGKILL == run_program(KILLED, source, target, json.dumps(bucket.options)).returncode
    assert not has_checkpoint(bucket.url, storage_options=bucket.options)
    copied = copy_checkpoint(source, target, storage_options=bucket.options)
    assert (2, copied.files) == (copied.copied, copied.copied + copied.kept)  # scheduler.pt and user_content.pt
    assert () == verify_checkpoint(bucket.url, storage_options=bucket.options).problems


def test_conversions_go_from_url_to_url(bucket: Bucket, tmp_path: Path) -> None:
    """Shards cut on the server are those that are cut on a disk."""
    source, options = save_example(tmp_path / "input", 2), bucket.options
    convert(source, f"{bucket.url}/full", to="tag", optimizer_form="zero1_full", storage_options=options)
    convert(f"{bucket.url}/full", f"{bucket.url}/dp3", to="tag", dp=3, storage_options=options)
    copy_checkpoint(f"{bucket.url}/dp3", tmp_path / "dp3", storage_options=options)
    expected = [sharded(whole(), 3, rank) for rank in range(3)]
    assert None is difference(plainly(expected), plainly(optimizers(tmp_path / "dp3")))


@pytest.mark.usefixtures("forked_workers")
def test_worker_processes_get_the_options(bucket: Bucket, tmp_path: Path) -> None:
    """In memory only."""
    source = save_example(tmp_path / "input", 2)
    words = ["convert", "--quiet", str(source), f"{bucket.url}/dp4", "--to", "tag"]
    words += ["--optimizer-form", "zero1", "--dp", "4", "--num-workers", "2", *bucket.words]
    assert 0 == main(words)
    assert () == verify_checkpoint(bucket.url, "dp4", storage_options=bucket.options).problems


def test_the_command_takes_urls(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options on the command line, or from the environment as everything that uses AWS takes them."""
    source = save_example(tmp_path / "input", 2)
    assert 0 == main(["cp", str(source), f"{bucket.url}/step_3", "--quiet", *bucket.words])
    capsys.readouterr()
    assert 0 == main(["list", bucket.url, "--json", *bucket.words])
    assert [("step_3", True)] == [(t["tag"], t["complete"]) for t in json.loads(capsys.readouterr().out)["tags"]]
    for name, value in bucket.server.environment.items():
        monkeypatch.setenv(name, value)
    for arguments in (["inspect", f"{bucket.url}/step_3"], ["verify", bucket.url, "step_3"]):
        assert 0 == main([*arguments, "--json"])
        assert [] == json.loads(capsys.readouterr().out)["problems"]


def test_options_are_for_what_is_a_url(bucket: Bucket, tmp_path: Path) -> None:
    """Beside them a tag, an output, config and tokenizer may be local, or URLs too."""
    job = Job(Model(heads=4))
    config = write_config(tmp_path / "config", job.model.config)
    (tmp_path / "config" / "tokenizer.json").write_text("{}")
    tag, url, options = save_job(tmp_path / "run", job, job.model.state()), bucket.url, bucket.options
    convert(tag, f"{url}/hf", to="hf", config=config, tokenizer=config.parent, storage_options=options)
    convert(tag, tmp_path / "hf", to="hf", config=f"{url}/hf", tokenizer=f"{url}/hf", storage_options=options)
    names: dict[str, Any] = {"to": "tag", "names": "nxd", "storage_options": options}
    convert(f"{url}/hf", tmp_path / "run" / "back", config=f"file://{config}", **names)
    convert(tmp_path / "hf", f"{url}/imported", config=config, **names)
    assert 0 == main(["diff", str(tmp_path / "run" / "back"), f"{url}/imported", *bucket.words])
    assert 0 == main(["diff", f"{url}/imported", f"file://{tmp_path}/run/back", *bucket.words])
    convert(tag, f"{url}/dcp", to="dcp", storage_options=options)
    convert(f"{url}/dcp", tmp_path / "run" / "from_dcp", to="tag", storage_options=options)
    unshard_checkpoint(f"{url}/imported", tmp_path / "unsharded", storage_options=options)
    for copy in ("back", "from_dcp"):
        assert () == verify_checkpoint(tmp_path / "run", copy).problems


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
@pytest.mark.one_in(2)
def test_an_archive_of_many_files_is_opened_by_few_requests(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Its list says where they lie; loading asks once for each, and not before whether it is there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    state = {f"layer.{number}": torch.full((160, 160), number) for number in range(60)}  # too large to come along
    save_checkpoint(tmp_path / "run", "one", state, use_xser=True, durable=False)
    url, options = f"{bucket.url}/one{suffix}", bucket.options
    convert(tmp_path / "run" / "one", url, to="tar", output_options=options)
    counts = []
    loaded: dict[str, torch.Tensor] = {}
    for use in (
        lambda: open_checkpoint(url, storage_options=options),
        lambda: load_checkpoint(url, model=loaded, storage_options=options),
    ):
        before = bucket.server.requests.total()
        use()
        counts.append(bucket.server.requests.total() - before)
    assert counts[0] < 15
    assert counts[1] < (100 if suffix == ".tar" else 15)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in state.items())
