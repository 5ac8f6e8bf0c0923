"""docs/format.md, docs/directory.md and docs/protocol.md: every key that others read, the containers, the digests."""

import json
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Partition
from nxd_ckpt.commit.session import Session
from nxd_ckpt.core import limits
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.examine.stored_statistics import statistics_text
from nxd_ckpt.storage.base import Writer
from nxd_ckpt.storage.local import LocalStorage
from tests.docs.markdown import DOCS, FORMAT, code_blocks, tables, unquoted
from tests.support.damage import flip

TABLES = {**tables(FORMAT), **tables(DOCS / "directory.md"), **tables(DOCS / "protocol.md")}
CUT = Partition(partition_dim=1, partition_stride=2, num_partitions=2, rank_ordering=(1, 0), expert=True, known=False)


class KeepingStorage(LocalStorage):
    """A directory that remembers what was last written to each small file, also after it is gone."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.kept: dict[str, bytes] = {}

    def write(self, key: str, data: bytes) -> None:
        self.kept[key] = data
        super().write(key, data)

    def link_new(self, key: str, data: bytes) -> bool:
        self.kept[key] = data
        return super().link_new(key, data)

    def create(self, key: str, nbytes: int) -> Writer:
        writer = super().create(key, nbytes)
        return _KeepingWriter(writer, self.kept, key) if key.endswith(".json") else writer


@dataclass
class _KeepingWriter:
    """A writer that remembers the last bytes that it wrote: those of a file that is written at once."""

    inner: Writer
    kept: dict[str, bytes]
    key: str

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self.kept[self.key] = bytes(data)
        self.inner.write_at(offset, data)

    def settle(self) -> None:
        self.inner.settle()

    def close(self) -> None:
        self.inner.close()

    def abort(self) -> None:
        self.inner.abort()


@dataclass
class Written:
    """A fresh tag, the JSON of every document by file name, and the live state."""

    tag: Path
    documents: dict[str, Any]
    model: torch.nn.Module


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """One tag, saved twice, so that the second save replaces the first; a record above and others below 64 KiB."""
    storage = KeepingStorage(tmp_path_factory.mktemp("format") / "ckpt")
    model = torch.nn.Sequential(torch.nn.Linear(128, 130), torch.nn.Linear(130, 2))
    model[1].weight = torch.nn.Parameter(torch.zeros(2, 130))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 128)).sum().backward()
    optimizer.step()
    with pytest.MonkeyPatch.context() as patched, Checkpointer("", storage=storage) as checkpointer:
        patched.setattr(Session, "is_alone", False)  # with votes, as several ranks write them
        for _ in range(2):
            checkpointer.save(
                "step_1", model, optimizer, user_content={"steps": 1}, rank_content={}, partitions={"1.weight": CUT},
                metrics={"loss": 2.5},
            )
    documents = {Path(key).name: json.loads(data) for key, data in storage.kept.items() if key.endswith(".json")}
    return Written(storage.root / "step_1", documents, model)


INDEX = "dp_rank_00_tp_rank_00_pp_rank_00.json"
VOTE = "rank_00000.vote.json"


def specification_of(name: str, found: dict[str, Any]) -> dict[str, Any]:
    manifest = found["manifest.json"]
    wanted: dict[str, Any] = manifest["specifications"][manifest["parameters"][name]]
    return wanted


DOCUMENTED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "`manifest.json`": lambda found: found["manifest.json"],
    "`manifest.json`: `topology`": lambda found: found["manifest.json"]["topology"],
    "`manifest.json`: `parts`": lambda found: found["manifest.json"]["parts"],
    "`manifest.json`: `timings`": lambda found: found["manifest.json"]["timings"],
    "`specifications`": lambda found: specification_of("1.weight", found),
    "`specifications`: `partition`": lambda found: specification_of("1.weight", found)["partition"],
    "`index/*.json`": lambda found: found[INDEX],
    "`index/*.json`: `tensors`": lambda found: found[INDEX]["tensors"],
    "`dcp_names.json`": lambda found: json.loads(DcpNames().to_json()),
    "`lease.json`": lambda found: found["lease.json"],
    "`heartbeat.json`": lambda found: found["heartbeat.json"],
    "`journal.json`": lambda found: found["journal.json"],
    "`statistics/TAG.json`": lambda found: json.loads(statistics_text("a save", {})),
}


@pytest.mark.parametrize("heading", DOCUMENTED)
def test_documented_keys_are_those_that_are_written(written: Written, heading: str) -> None:
    """Each table of keys lists what a fresh checkpoint holds, in the same order."""
    documented = [unquoted(row[0]) for row in TABLES[heading]]
    assert list(DOCUMENTED[heading](written.documents)) == documented


def test_every_json_document_is_described(written: Written) -> None:
    """No other JSON file is written, and no other table of keys stands in the document."""
    described = {"manifest.json", INDEX, "lease.json", "heartbeat.json", VOTE, "verdict.json", "journal.json"}
    assert described == written.documents.keys()
    with_keys = {heading for heading in TABLES if heading.startswith("`")}
    assert DOCUMENTED.keys() == with_keys


def test_versions_are_those_that_are_named(written: Written) -> None:
    """``versions`` holds Python's and torch's, and no name that the document does not give."""
    (row,) = [row for row in TABLES["`manifest.json`"] if row[0] == "`versions`"]
    versions = written.documents["manifest.json"]["versions"]
    assert {"python", "torch"} <= versions.keys()
    assert [] == [name for name in versions if f"`{name}`" not in row[2]]


def test_containers_are_as_described(written: Written) -> None:
    """Records in order, stored, aligned to 64 bytes or, from 64 KiB on, to 4,096; every CRC-32 right."""
    others = [unquoted(row[0]) for row in TABLES["Torch files"][1:]]
    files = sorted(written.tag.rglob("*.pt"))
    assert len(files) == 4
    for file in files:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            assert archive.testzip() is None
        data = [f"archive/data/{index}" for index in range(len(records) - len(others))]
        assert [*data, *others] == [record.filename for record in records]
        assert {zipfile.ZIP_STORED} == {record.compress_type for record in records}
    tensors = written.documents[INDEX]["tensors"]
    nbytes = [tensors["forms"][form][0] for form in tensors["form"]]
    places = zip(tensors["offset"], nbytes, strict=True)
    assert {0} == {offset % (4096 if size >= 64 * 1024 else 64) for offset, size in places}
    assert max(nbytes) >= 64 * 1024


def test_file_digests_are_of_all_bytes(written: Written) -> None:
    """``files`` names every file of the rank, and zlib gives the same sizes and CRC-32 for their bytes."""
    listed = written.documents[INDEX]["files"]
    contents = {path.relative_to(written.tag).as_posix(): path.read_bytes() for path in written.tag.rglob("*.pt")}
    assert {file: [len(data), zlib.crc32(data)] for file, data in contents.items()} == listed


def test_the_reader_in_the_document_reads(written: Written, tmp_path: Path) -> None:
    """The example needs the standard library only, gives the bytes of the live tensor, and refuses one flipped bit of
    it or of an index."""
    namespace: dict[str, Any] = {}
    for block in code_blocks(FORMAT, "python"):
        exec(compile(block, str(FORMAT), "exec"), namespace)
    live = written.model.state_dict()["0.weight"]
    expected = ("float32", [130, 128], live.numpy().tobytes())
    assert expected == namespace["read_tensor"](written.tag, 0, "model/0.weight")
    tensors = written.documents[INDEX]["tensors"]
    at = tensors["name"].index("model/0.weight")
    place = tensors["files"][tensors["file"][at]], tensors["offset"][at]
    for number, (file, offset) in enumerate([place, (f"index/{INDEX}", 100)]):
        copy = shutil.copytree(written.tag, tmp_path / str(number))
        flip(copy / file, offset)
        with pytest.raises(ValueError, match="changed"):
            namespace["read_tensor"](copy, 0, "model/0.weight")


def test_the_limits_are_those_of_the_code() -> None:
    listed = {unquoted(row[0]): int(row[1]) for row in TABLES["Limits of files"]}
    assert {name: getattr(limits, name) for name in listed} == listed
    assert "NOTE" in listed
