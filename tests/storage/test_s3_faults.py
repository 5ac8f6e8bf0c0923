"""S3 behind a network that breaks and a store that is busy: it succeeds, or fails clearly and leaves nothing behind."""

import os
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from nxd_ckpt import Checkpointer, load_checkpoint
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.s3 import upload as upload_module
from nxd_ckpt.storage.urls import open_storage
from tests.conftest import BUCKET
from tests.support.s3_proxy import Fault, S3Proxy
from tests.support.s3_server import SMALLEST_PART, S3Server, options_for

PART = SMALLEST_PART
DATA = os.urandom(2 * PART + 1000)
SMALL = DATA[:1000]
CREATE, PUT_PART, COMPLETE = r"POST .*\?uploads", "PUT .*partNumber=2", r"POST .*\?uploadId"
PUT, GET, HEAD, LIST, DELETE = "PUT .*/key$", "GET .*/key$", "HEAD .*/key$", "GET .*list-type", r"POST .*\?delete"
FOR_EVER = 10**6


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library waits for seconds before it tries again: not here. Little data goes up in several parts."""
    monkeypatch.setattr(upload_module, "PART", PART)
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.address) as proxy:
        yield proxy


@pytest.fixture
def storage(proxy: S3Proxy) -> Storage:
    return through(proxy)


def through(proxy: S3Proxy, retries: int = 3) -> Storage:
    options = {**options_for(proxy.address), "retries": retries}
    return open_storage(f"s3://{BUCKET}/{uuid.uuid4().hex}", storage_options=options)


def upload(storage: Storage, data: bytes) -> None:
    writer = storage.create("key", len(data))
    writer.write_at(0, data)
    writer.close()


PASSING = [
    Fault("", "refuse", times=2),
    Fault("", "refuse", times=2, status=500, code="InternalError"),
    Fault("", "delay", times=2, seconds=0.2),
    Fault("", "drop_reply", times=2),
    Fault("", "reset_request", times=2, nbytes=0),
]


def on(pattern: str, fault: Fault) -> Fault:
    return Fault(pattern, fault.kind, fault.times, fault.status, fault.code, fault.nbytes, fault.seconds)


@pytest.mark.parametrize("pattern", [CREATE, PUT_PART, COMPLETE])
@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: f"{fault.kind} {fault.status}")
@pytest.mark.one_in(2)
def test_an_upload_survives_failures(
    proxy: S3Proxy, s3_server: S3Server, storage: Storage, pattern: str, fault: Fault
) -> None:
    """Succeeds, whichever of its requests fails twice, and no unfinished upload is left."""
    proxy.faults.append(on(pattern, fault))
    upload(storage, DATA)
    assert 2 == proxy.faults[0].hits or pattern == CREATE or fault.kind == "delay"
    assert DATA == storage.read("key")
    assert [] == s3_server.unfinished(BUCKET)


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: f"{fault.kind} {fault.status}")
def test_requests_of_small_files_are_tried_again(proxy: S3Proxy, storage: Storage, fault: Fault) -> None:
    """Written by a writer, at once, conditionally, or exchanged; read, listed, removed: each request fails twice."""
    upload(storage, SMALL)
    proxy.faults += [on(pattern, fault) for pattern in (PUT, GET, HEAD, LIST, DELETE)]
    storage.write("folder/key", SMALL)
    assert SMALL == storage.read("folder/key")
    assert storage.exchange("folder/key", SMALL, b"other")
    proxy.faults.append(on(PUT, fault))
    assert storage.link_new("new/key", b"1")
    proxy.faults.append(on(PUT, fault))
    assert not storage.link_new("new/key", b"2")
    assert b"1" == storage.read("new/key")
    storage.remove("folder")
    assert ["key", "new"] == [entry.name for entry in storage.list()]


def test_a_small_file_is_read_by_one_request(proxy: S3Proxy, storage: Storage) -> None:
    for data in (b"small", b""):
        storage.write("key", data)
        proxy.requests.clear()
        assert data == storage.read("key")
        assert ["GET"] == [request.split()[0] for request in proxy.requests]


def test_a_download_that_ends_early(proxy: S3Proxy, s3_server: S3Server, storage: Storage) -> None:
    """Goes on from where it ended: nothing that arrived is asked for again."""
    upload(storage, DATA)
    proxy.faults.append(Fault(GET, "short_reply", times=5, nbytes=1_500_000))
    sent = sum(s3_server.sent.values())
    assert DATA == storage.read("key")
    # The server sends all of the rest each time, of which the proxy passes on 1,500,000 bytes.
    assert sum(len(DATA) - number * 1_500_000 for number in range(6)) == sum(s3_server.sent.values()) - sent


def test_a_download_that_breaks_off(proxy: S3Proxy, storage: Storage) -> None:
    """Is taken up again; a reset may take with it what the proxy had sent already."""
    upload(storage, DATA)
    proxy.faults.append(Fault(GET, "reset_reply", times=3, nbytes=1_500_000))
    assert DATA == storage.read("key")
    assert 3 == proxy.faults[0].hits


@pytest.mark.parametrize("pattern", [CREATE, PUT_PART, COMPLETE])
@pytest.mark.parametrize("kind", ["refuse", "reset_request"])
def test_an_upload_that_fails_for_good(proxy: S3Proxy, s3_server: S3Server, pattern: str, kind: str) -> None:
    """Says what the store said and how often it was tried, shows nothing, and leaves no unfinished upload."""
    storage = through(proxy, retries=1)
    proxy.faults.append(Fault(pattern, kind, times=FOR_EVER))  # type: ignore[arg-type]
    writer = storage.create("key", len(DATA))
    expected = "key: SlowDown: .*1 retries" if kind == "refuse" else "key: "
    with pytest.raises(ConnectionError, match=expected):  # noqa: PT012
        writer.write_at(0, DATA)
        writer.close()
    writer.abort()
    assert 2 == proxy.faults[0].hits
    assert not storage.is_file("key")
    assert [] == s3_server.unfinished(BUCKET)


def test_a_reply_that_is_lost_for_good(proxy: S3Proxy, storage: Storage) -> None:
    """Of the last request of an upload: the object is there and ours, so it succeeded."""
    proxy.faults.append(Fault(COMPLETE, "drop_reply", times=FOR_EVER))
    upload(storage, DATA)
    assert DATA == storage.read("key")


def test_a_download_that_fails_for_good(proxy: S3Proxy) -> None:
    storage = through(proxy, retries=1)
    upload(storage, SMALL)
    proxy.faults.append(Fault(GET, "reset_reply", times=FOR_EVER, nbytes=0))
    with pytest.raises(ConnectionError, match="key: broke off at byte 0 2 times"):
        storage.read("key")


@pytest.mark.parametrize("nbytes", [len(SMALL), len(DATA)])
def test_changed_bytes_are_refused(proxy: S3Proxy, s3_server: S3Server, storage: Storage, nbytes: int) -> None:
    """The store compares the digest that goes along, and refuses them; nothing is seen."""
    proxy.faults.append(Fault("PUT", "corrupt", nbytes=77))
    with pytest.raises(OSError, match=r"BadDigest.*changed on their way"):
        upload(storage, DATA[:nbytes])
    assert not storage.is_file("key")
    assert [] == s3_server.unfinished(BUCKET)


def test_a_store_that_loses_a_part(proxy: S3Proxy, s3_server: S3Server, storage: Storage) -> None:
    """Is told so by the store when the upload is completed; nothing is seen."""
    proxy.faults.append(Fault(COMPLETE, "refuse", status=400, code="InvalidPart"))
    with pytest.raises(OSError, match=r"key: InvalidPart: .*the store lost a part"):
        upload(storage, DATA)
    assert not storage.is_file("key")
    assert [] == s3_server.unfinished(BUCKET)


def test_unfinished_uploads_of_a_killed_writer(s3_server: S3Server, storage: Storage) -> None:
    """Are dropped by whoever comes next; those of other directories stay."""
    for key in ("tag/model/x", "tag-2/x"):
        writer = storage.create(key, len(DATA))
        writer.write_at(0, DATA)
        writer.settle()
    storage.discard_unfinished("tag")
    assert ["x"] == [name.rpartition("tag-2/")[2] for name in s3_server.unfinished(BUCKET)]
    storage.discard_unfinished("")
    assert [] == s3_server.unfinished(BUCKET)


def test_a_store_that_lists_no_unfinished_uploads(proxy: S3Proxy) -> None:
    """Saves, overwrites and retention go on without: the store has to free them by its own rules."""
    proxy.faults.append(Fault(r"GET .*[?&]uploads", "refuse", times=FOR_EVER, status=501, code="NotImplemented"))
    url, options = f"s3://{BUCKET}/{uuid.uuid4().hex}", options_for(proxy.address)
    with Checkpointer(url, storage_options=options) as job:
        for value, tag in enumerate(("one", "two", "two")):
            job.save(tag, {"w": torch.full((5,), value)}, num_kept_ckpts=1, overwrite=True)
    loaded: dict[str, torch.Tensor] = {}
    load_checkpoint(url, model=loaded, storage_options=options)
    assert [2] * 5 == loaded["w"].tolist()
    assert proxy.faults[-1].hits > 0


DENIED = [
    (403, "AccessDenied", {}, PermissionError, "AccessDenied.*do not allow"),
    (400, "ExpiredToken", {}, PermissionError, "expired; renew"),
    (403, "InvalidAccessKeyId", {}, PermissionError, "does not know this access key"),
    (403, "SignatureDoesNotMatch", {}, PermissionError, "secret key does not belong"),
    (301, "PermanentRedirect", {}, OSError, "endpoint_url"),
    (400, "AuthorizationHeaderMalformed", {"Region": "eu-west-1"}, OSError, "region eu-west-1; pass"),
    (404, "NoSuchBucket", {}, OSError, f"the bucket '{BUCKET}' does not exist"),
]


@pytest.mark.parametrize(("status", "code", "more", "kind", "text"), DENIED, ids=[case[1] for case in DENIED])
def test_what_the_store_refuses(
    proxy: S3Proxy, storage: Storage, status: int, code: str, more: dict[str, str], kind: type[OSError], text: str
) -> None:
    """Every operation says why, what to do, and never that a file is missing; no credentials in it."""
    proxy.faults.append(Fault("", "refuse", times=FOR_EVER, status=status, code=code, more=more))
    operations = {
        "read": lambda: storage.read("key"),
        "size": lambda: storage.size("key"),
        "is_file": lambda: storage.is_file("key"),
        "is_dir": lambda: storage.is_dir("key"),
        "list": lambda: storage.list("key"),
        "write": lambda: storage.write("key", b"1"),
        "link_new": lambda: storage.link_new("key", b"1"),
        "exchange": lambda: storage.exchange("key", b"1", b"2"),
        "create": lambda: upload(storage, SMALL),
        "create in parts": lambda: upload(storage, DATA),
        "remove": lambda: storage.remove("key"),
        "discard_unfinished": lambda: storage.discard_unfinished("key"),
    }
    for name, operation in operations.items():
        with pytest.raises(kind, match=text) as caught:
            operation()
        assert not isinstance(caught.value, FileNotFoundError), name
        assert f"s3://{BUCKET}/" in str(caught.value), name
        assert "not-so-secret" not in str(caught.value), name
