"""What S3 has beyond the contract: options, parts, memory, listings of many pages, processes."""

import multiprocessing
import os
import re
import subprocess
import sys
import threading
import tracemalloc
import uuid
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.s3 import upload
from nxd_ckpt.storage.s3.bucket import S3Options
from nxd_ckpt.storage.s3.upload import MOST_PARTS, PART, part_nbytes
from nxd_ckpt.storage.urls import open_storage
from tests.conftest import BUCKET
from tests.storage.storages import s3
from tests.support.processes import FORKED
from tests.support.s3_server import S3Server, options_for


@pytest.fixture
def storage(s3_server: S3Server) -> Storage:
    return s3(s3_server)


@pytest.mark.parametrize("nbytes", [1, PART, PART * MOST_PARTS, PART * MOST_PARTS + 1, 5 * 2**40])
def test_no_file_has_too_many_parts(nbytes: int) -> None:
    """S3 takes 10,000 of at least 5 MiB and at most 5 GiB."""
    assert -(-nbytes // part_nbytes(nbytes)) <= 10_000
    assert 5 * 2**20 <= part_nbytes(nbytes) <= 5 * 2**30


def _peaks(storage: Storage) -> tuple[int, int]:
    """Bytes of memory that Python allocated at most for an upload and for a download, beyond those of the caller."""
    memory = memoryview(bytearray(6 * PART))
    storage.write("warm", b"")  # the library's own data
    tracemalloc.start()
    writer = storage.create("key", len(memory))
    writer.write_at(0, memory)
    writer.close()
    upload = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    storage.read_into("key", 0, memory)
    return upload, tracemalloc.get_traced_memory()[1]


def test_bytes_are_not_copied(storage: Storage) -> None:
    """A file of six parts goes out of the memory that was handed over, and comes into it, without a block between."""
    with FORKED.Pool(1) as pool:  # the server has its own copies, in this process
        upload, download = pool.apply(_peaks, (storage,))
    assert upload < PART
    assert download < 2**20


def test_no_more_parts_are_on_their_way_than_there_may_be(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all writers of the process; who writes more than that waits."""
    lock, now, most = threading.Lock(), 0, 0
    upload_part = upload.S3Writer._upload_part

    def counted(self: upload.S3Writer, number: int, views: list[memoryview]) -> dict[str, object]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        try:
            return upload_part(self, number, views)
        finally:
            with lock:
                now -= 1

    monkeypatch.setattr(upload.S3Writer, "_upload_part", counted)
    data = bytes(upload.IN_FLIGHT // 2 * PART)
    writers = [storage.create(f"key{number}", len(data)) for number in range(3)]
    threads = [threading.Thread(target=writer.write_at, args=(0, data)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
    assert 1 < most <= upload.IN_FLIGHT
    assert [len(data)] * 3 == [storage.size(f"key{number}") for number in range(3)]


def test_more_keys_than_a_page_holds_are_listed_and_removed(storage: Storage, s3_server: S3Server) -> None:
    storage.write("folder/0000", b"")
    (first,) = (key for key in s3_server.keys(BUCKET) if key.endswith("folder/0000"))
    for number in range(1, 1100):
        s3_server.put(BUCKET, f"{first[:-4]}{number:04}")
    assert [f"{number:04}" for number in range(1100)] == [entry.name for entry in storage.list("folder")]
    storage.remove("folder")
    assert [] == storage.list("folder")


def test_only_what_is_asked_for_is_downloaded(storage: Storage, s3_server: S3Server) -> None:
    writer = storage.create("key", 4 * PART)
    writer.write_at(0, bytes(4 * PART))
    writer.close()
    sent = sum(s3_server.sent.values())
    storage.read_into("key", PART, memoryview(bytearray(1_000_000)))
    assert 1_000_000 == sum(s3_server.sent.values()) - sent


def _read(storage: Storage) -> bytes:
    return storage.read("key")


def test_a_connection_is_used_again() -> None:
    """A reply of which all was read leaves it open: many reads need one."""
    data, connections = os.urandom(3_000_000), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        log_message = lambda *_: None  # noqa: E731

        def setup(self) -> None:
            connections.append(self.client_address)
            super().setup()

        def do_HEAD(self) -> None:
            begin, end = re.findall(r"\d+", self.headers.get("Range", f"0-{len(data) - 1}"))
            self.send_response(206)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", str(int(end) + 1 - int(begin)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            begin, end = re.findall(r"\d+", self.headers["Range"])
            self.wfile.write(data[int(begin) : int(end) + 1])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, name="s3-keeping", daemon=True).start()
        storage = open_storage("s3://bucket", storage_options=options_for(("127.0.0.1", server.server_port)))
        with closing(storage.open("key")) as reader:
            for begin in range(0, len(data), 100_000):
                memory = bytearray(100_000)
                reader.read_ranges([(begin, memoryview(memory))])
                assert data[begin : begin + 100_000] == memory
        server.shutdown()
    assert 1 == len(connections)


@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), FORKED], ids=["forked", "sent"])
def test_a_storage_works_in_other_processes(storage: Storage, context: BaseContext) -> None:
    """A storage that was used already works in a process that was forked, or that it was sent to."""
    storage.write("key", b"data")
    with context.Pool(1) as pool:
        assert b"data" == pool.apply(_read, (storage,))


def test_secrets_are_not_shown(s3_server: S3Server) -> None:
    """In the representation of options or storage, or in what is said about wrong ones."""
    options = {**s3_server.options, "token": "not-so-secret"}
    assert "not-so-secret" not in repr(S3Options.of(options, "s3://bucket"))
    with pytest.raises(
        InvalidArgument, match=r"unknown storage_options \['passwort'\]; known are key, secret"
    ) as caught:
        open_storage("s3://bucket", storage_options={**options, "passwort": "not-so-secret"})
    assert "not-so-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("s3://", {}, "expected s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/x", {}, "without credentials"),
        ("s3://bucket", {"retries": -1}, "retries is -1"),
        ("nope://bucket", {}, "nope"),
        ("oci://bucket", {}, "ocifs"),
        ("memory://bucket", {"retries": -1}, "retries is -1"),
        ("file://host/x", {}, "expected an absolute path of this host"),
        ("some/dir", {"key": "x"}, "takes no storage_options, found key"),
    ],
)
def test_wrong_urls_and_options(url: str, options: dict[str, object], text: str) -> None:
    """Are refused before anything is asked of a network, and the error says what is missing."""
    with pytest.raises(InvalidArgument, match=text):
        open_storage(url, storage_options=options)


@pytest.mark.parametrize("name", ["client_kwargs", "config_kwargs"])
def test_options_that_botocore_does_not_know(name: str) -> None:
    storage = open_storage("s3://bucket", storage_options={name: {"regoin_name": "eu-central-1"}})
    with pytest.raises(InvalidArgument, match="regoin_name"):
        storage.read("key")


def test_places_that_are_not_there(s3_server: S3Server) -> None:
    """A missing bucket is not a missing file; an endpoint where nobody listens is said so."""
    nowhere = open_storage("s3://no-such-bucket/x", storage_options=s3_server.options)
    for call in (nowhere.read, nowhere.list, nowhere.is_file, nowhere.is_dir, nowhere.size):
        with pytest.raises(OSError, match="the bucket 'no-such-bucket' does not exist") as caught:
            call("key")
        assert not isinstance(caught.value, FileNotFoundError)
    options = {**s3_server.options, "endpoint_url": "http://127.0.0.1:1", "retries": 0}
    with pytest.raises(ConnectionError, match=r"s3://bucket/key: .*check endpoint_url"):
        open_storage(f"s3://{BUCKET}", storage_options=options).read("key")
    with pytest.raises(OSError, match="endpoint"):
        open_storage(f"s3://{BUCKET}", storage_options={**options, "endpoint_url": "nonsense"}).read("key")


def printed(program: str, environment: dict[str, str] | None = None) -> str:
    """What an interpreter of its own prints."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_credentials_come_from_the_usual_places(s3_server: S3Server, tmp_path: Path) -> None:
    """The environment's; without any, an error says where they may come from."""
    program = f"""
from nxd_ckpt.storage.urls import open_storage
storage = open_storage("s3://{BUCKET}/{uuid.uuid4().hex}", storage_options={{"retries": 0}})
try:
    storage.write("key", b"1")
    print(storage.read("key"))
except PermissionError as error:
    print(error)
"""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    bare |= {
        "HOME": str(tmp_path),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": s3_server.options["endpoint_url"],
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}

    assert "b'1'\n" == printed(program, bare | keys)
    assert "pass key and secret, a profile, or anon=True" in printed(program, bare)


def test_nothing_is_imported_before_it_is_needed() -> None:
    """Not by importing the package, nor by opening a directory."""
    program = """
import sys
import nxd_ckpt
from nxd_ckpt.storage.urls import open_storage
open_storage(".")
print([name for name in ("boto3", "botocore", "fsspec", "moto") if name in sys.modules])
"""
    assert "[]\n" == printed(program)


@pytest.mark.parametrize(("url", "module"), [("s3://b", "boto3"), ("gs://b", "fsspec")])
def test_a_library_that_is_missing(url: str, module: str) -> None:
    program = f"""
import sys
sys.modules[{module!r}] = None
from nxd_ckpt.storage.urls import open_storage
try:
    open_storage({url!r})
except ValueError as error:
    print(error)
"""
    assert f"pip install {module}" in printed(program)
