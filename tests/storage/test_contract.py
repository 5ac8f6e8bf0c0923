"""What ``nxd_ckpt.storage.base`` promises, of every storage there is."""

import time
from contextlib import closing
from pathlib import Path

import pytest

from nxd_ckpt.storage.base import Storage
from nxd_ckpt.testing.contract import StorageContract
from tests.storage.storages import MAKERS
from tests.support.s3_server import S3Server

# What "hooked s3" adds to "s3" is what "slow local" adds to "local".
KINDS = [
    pytest.param(name, marks=[pytest.mark.soak] if name == "hooked s3" else []) for name in MAKERS if name != "fsspec"
]


class TestEveryStorage(StorageContract):
    """But fsspec's, which has a class of its own."""

    @pytest.fixture(params=KINDS)
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server) -> Storage:
        return MAKERS[request.param](tmp_path / "run", s3_server)


class TestFsspec(StorageContract):
    notices_a_taken_large_key = False  # they are streamed

    @pytest.fixture
    def storage(self, tmp_path: Path, s3_server: S3Server) -> Storage:
        return MAKERS["fsspec"](tmp_path, s3_server)


@pytest.mark.parametrize("name", ["local", "memory", "fsspec", "s3"])
def test_a_reader_whose_file_was_replaced_goes_on_or_says_so(name: str, tmp_path: Path, s3_server: S3Server) -> None:
    """On a disk it goes on with the file that it opened; in a store, where that is gone, it says so."""
    storage = MAKERS[name](tmp_path / "run", s3_server)
    storage.write("file", b"a" * 100)
    memory = bytearray(100)
    with closing(storage.open("file")) as reader:
        time.sleep(0.002)  # some tell versions apart by the time of writing
        storage.write("file", b"b" * 100)
        if name in ("fsspec", "s3"):
            with pytest.raises(OSError, match="replaced"):
                reader.read_ranges([(0, memoryview(memory))])
            return
        reader.read_ranges([(0, memoryview(memory))])
    assert b"a" * 100 == memory
