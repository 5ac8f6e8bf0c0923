"""Tags in archives: packed as they are, read in place of a directory, and nothing in them is trusted."""

import io
import json
import tarfile
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from nxd_ckpt import (
    Topology,
    convert,
    copy_checkpoint,
    has_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    unshard_checkpoint,
)
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import CorruptCheckpoint, DigestMismatch, InvalidArgument, MalformedFile
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.conversion.tags import contents, model, optimizers, plainly, save_example
from tests.hugging_face.saved import differences, write_config
from tests.migrate.layouts import PLAIN, untrained
from tests.support.damage import flip
from tests.tag.equality import difference


@pytest.mark.parametrize(
    ("suffix", "use_xser"), [(".tar", False), (".tar", True), (".tar.zst", True), (".tar.gz", False)]
)
def test_an_archive_stands_for_a_directory(
    tmp_path: Path, suffix: str, use_xser: bool, work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever reads a directory reads the archive: load, open, verify, list, reshard, unshard, cp, the command."""
    tag = save_example(tmp_path, 2, use_xser=use_xser)
    archive = tmp_path / f"out{suffix}"
    done = convert(tag, archive, to="tar")
    assert archive.stat().st_size == done.nbytes
    assert [archive] == [path for path in tmp_path.iterdir() if "out" in path.name]

    state: dict[str, Any] = {}
    assert has_checkpoint(str(archive))
    assert {"steps": 3} == load_checkpoint(str(archive), model=state, topology=Topology(dp=2, rank=1))
    assert None is difference(model(), state)
    assert "step_3" == open_checkpoint(archive).tag
    assert () == verify_checkpoint(archive).problems
    assert list_tags(open_storage(tmp_path)) == list_tags(open_storage(archive))

    convert(archive, tmp_path / "three" / "step_3", to="tag", dp=3, durable=False)
    convert(tag, tmp_path / "expected" / "step_3", to="tag", dp=3, durable=False)
    found, expected = (optimizers(tmp_path / name / "step_3") for name in ("three", "expected"))
    assert None is difference(plainly(expected), plainly(found))
    unshard_checkpoint(archive, tmp_path / "whole", durable=False)
    assert None is difference(model(), torch.load(tmp_path / "whole" / "model.pt", weights_only=True))
    copy_checkpoint(archive / "step_3", tmp_path / "back" / "step_3")
    assert contents(tag) == contents(tmp_path / "back" / "step_3")
    assert list_tags(open_storage(tmp_path / "back")) == list_tags(open_storage(archive))
    for command in (["list"], ["inspect", "--tensors"], ["verify"]):
        assert 0 == main([command[0], str(archive), *command[1:]])
    assert "step_3" in capsys.readouterr().out


def test_an_archive_is_a_tar(tmp_path: Path) -> None:
    """Any tar unpacks it. What tells of the rest comes first, `done` last; bytes begin on pages; always the same."""
    tag = save_example(tmp_path, 2)
    convert(tag, tmp_path / "one.tar", to="tar")
    convert(tag, tmp_path / "two.tar", to="tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert contents(tag) == contents(tmp_path / "unpacked" / "step_3")
    assert {0} == {member.offset_data % 4096 for member in members}
    files = [member.name.removeprefix("step_3/") for member in members]
    first = [".nxd_ckpt/members.json", "manifest.json"]
    first += [f"index/dp_rank_0{rank}_tp_rank_00_pp_rank_00.json" for rank in range(2)]
    assert (first, ["checkpoint", "done"]) == (files[:4], files[-2:])


def test_an_archive_in_a_store_is_read_by_ranges(tmp_path: Path) -> None:
    """Packed from one URL to another, and loaded from there."""
    store = f"memory://{uuid.uuid4().hex}"
    save_checkpoint(f"{store}/run", "step_1", model(), user_content={"steps": 1}, run_id="one")
    convert(f"{store}/run/step_1", f"{store}/packed/one.tar", to="tar")
    state: dict[str, Any] = {}
    assert {"steps": 1} == load_checkpoint(f"{store}/packed/one.tar", model=state)
    assert None is difference(model(), state)
    with pytest.raises(InvalidArgument, match="overwrite=True"):
        convert(f"{store}/run/step_1", f"{store}/packed/one.tar", to="tar")
    convert(f"{store}/run/step_1", f"{store}/packed/one.tar", to="tar", overwrite=True)
    assert 1 == len(fsspec.filesystem("memory").find(f"{store.removeprefix('memory:/')}/packed"))


def test_damage_is_found_before_the_archive_appears(tmp_path: Path) -> None:
    """What was there stays; what was begun is gone."""
    tag = save_example(tmp_path, 2)
    (tmp_path / "out.tar").write_bytes(b"before")
    flip(tag / "optim" / "dp_rank_01_tp_rank_00_pp_rank_00.pt")
    with pytest.raises(DigestMismatch, match="dp_rank_01"):
        convert(tag, tmp_path / "out.tar", to="tar", overwrite=True)
    assert b"before" == (tmp_path / "out.tar").read_bytes()
    assert [] == [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_what_cannot_be_packed_or_named(tmp_path: Path) -> None:
    """Other names, directories. Of several tags in an archive the newest is meant, unless one is named."""
    tag = save_example(tmp_path, 1)
    for name, match in (("out.tar.7z", "ends in .tar"), ("out", "ends in .tar"), ("step_3.tar", "is a directory")):
        (tmp_path / "step_3.tar").mkdir(exist_ok=True)
        with pytest.raises(InvalidArgument, match=match):
            convert(tag, tmp_path / name, to="tar")
    save_example(tmp_path, 1, "step_4", step=4)
    with tarfile.open(tmp_path / "both.tar", "w") as archive:
        for name in ("step_3", "step_4"):
            archive.add(tmp_path / name, f"./{name}")
    assert {"steps": 4} == load_checkpoint(tmp_path / "both.tar", model={})
    convert(tmp_path / "both.tar", tmp_path / "newest.tar")
    assert {"steps": 4} == load_checkpoint(tmp_path / "newest.tar", model={})
    unshard_checkpoint(tmp_path / "both.tar" / "step_3", tmp_path / "whole")
    with pytest.raises(OSError, match="read-only"):
        save_checkpoint(str(tmp_path / "both.tar"), "step_5", model())


@pytest.mark.parametrize("inside", ["", "llama"])
def test_a_packed_model_is_a_source(tmp_path: Path, inside: str) -> None:
    """Its files, or their directory; config.json among them is found."""
    write_config(tmp_path / "hf", PLAIN.model.config)
    save_file(untrained(PLAIN).weights, tmp_path / "hf" / "model.safetensors")
    with tarfile.open(tmp_path / "llama.tgz", "w:gz") as archive:
        for file in ("config.json", "model.safetensors"):
            archive.add(tmp_path / "hf" / file, f"{inside}/{file}")
    convert(tmp_path / "llama.tgz", tmp_path / "out", to="dcp", names="hf", durable=False)
    found: dict[str, Any] = {}
    load_checkpoint(tmp_path / "out", model=found)
    assert [] == differences(untrained(PLAIN).weights, found)


def archive_of(*members: tuple[str, Any]) -> bytes:
    """A tar of members given as (name, bytes), or (name, (type, target)) for what is no file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content
                archive.addfile(info)
    return out.getvalue()


def _claiming(nbytes: str) -> bytes:
    """An extended header that says it had so many bytes, in the eight digits of its size."""
    info = tarfile.TarInfo("step_1/done")
    info.type, info.size = tarfile.XHDTYPE, int(nbytes)
    return info.tobuf(tarfile.GNU_FORMAT)


HOSTILE = {
    "absolute": (archive_of(("/etc/x", b"1")), "lies outside"),
    "above": (archive_of(("step_1/../../x", b"1")), "lies outside"),
    "symbolic link": (archive_of(("step_1/done", (tarfile.SYMTYPE, "/etc/passwd"))), "is a link"),
    "hard link": (archive_of(("step_1/a", b"1"), ("step_1/done", (tarfile.LNKTYPE, "step_1/a"))), "is a link"),
    "device": (archive_of(("step_1/done", (tarfile.CHRTYPE, ""))), "a device"),
    "sparse": (archive_of(("step_1/done", (tarfile.GNUTYPE_SPARSE, ""))), "sparse"),
    "twice": (archive_of(("step_1/done", b"1"), ("step_1/done", b"2")), "two members"),
    "file as directory": (archive_of(("step_1", b"1"), ("step_1/done", b"2")), "is a file"),
    "long header": (_claiming("2000000000"), "at most 1048576|empty header"),  # Python 3.14 sees it first
    "headers of headers": (_claiming("0") * 2000, "after its beginning"),
    "no archive": (b"x" * 2000, "expected a tar archive, found a text"),
    "empty": (b"", "truncated or damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused(tmp_path: Path, name: str) -> None:
    data, match = HOSTILE[name]
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(MalformedFile, match=match):
        load_checkpoint(tmp_path / "x.tar", model={})


def test_every_truncation_is_told(tmp_path: Path) -> None:
    """Wherever it was cut, also between two members; the message names where."""
    convert(save_example(tmp_path, 1), tmp_path / "whole.tar", to="tar")
    data = (tmp_path / "whole.tar").read_bytes()
    for length in {*range(0, len(data) - 1024, 512), *range(1, len(data) - 1024, 4999)}:
        (tmp_path / "cut.tar").write_bytes(data[:length])
        with pytest.raises(CorruptCheckpoint, match="truncated or damaged"):
            open_checkpoint(tmp_path / "cut.tar")
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    with pytest.raises(MalformedFile, match="step_3/model/"):
        open_checkpoint(tmp_path / "cut.tar")


def packed_with(tmp_path: Path, change: Any) -> Path:
    """The example's archive, with a list of members that ``change`` made of its own; as long as before."""
    convert(save_example(tmp_path, 1), tmp_path / "own.tar", to="tar")
    with tarfile.open(tmp_path / "own.tar") as archive:
        info = archive.next()
        assert info is not None
        begin, nbytes = info.offset_data, info.size
    data = bytearray((tmp_path / "own.tar").read_bytes())
    document = json.loads(data[begin : begin + nbytes])
    text = change(document["members"])
    changed = (text if isinstance(text, str) else json.dumps(document, separators=(",", ":"))).encode()
    assert len(changed) <= nbytes
    data[begin : begin + nbytes] = changed.ljust(nbytes)
    (tmp_path / "own.tar").write_bytes(data)
    return tmp_path / "own.tar"


UNFIT = {
    "not JSON": lambda members: "{" * 2000,
    "other members": lambda members: '{"format_version": 1, "members": 7}',
    "none": lambda members: '{"format_version": 1, "members": []}',
    "newer": lambda members: '{"format_version": 2, "members": []}',
    "a hole": lambda members: members[2].__setitem__(1, members[2][1] + 4096),
    "an overlap": lambda members: members[2].__setitem__(2, members[2][2] + 10**6),
    "negative": lambda members: members[2].__setitem__(2, -1),
    "not a time": lambda members: members[2].__setitem__(3, float("nan")),
    "twice": lambda members: members[2].__setitem__(0, members[1][0]),
    "one too few": lambda members: members.pop(),
    "another last name": lambda members: members[-1].__setitem__(0, "step_3/other"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_list_that_does_not_fit_is_not_used(tmp_path: Path, name: str) -> None:
    """Then the headers count, as in the archives of other programs."""
    assert () == verify_checkpoint(packed_with(tmp_path, UNFIT[name])).problems


def test_a_header_counts_more_than_the_list(tmp_path: Path) -> None:
    """A file that the list calls otherwise than its own header is refused when it is read; a hostile name at once."""
    archive = packed_with(tmp_path, lambda members: members[0].__setitem__(0, "step_3/manifest.jsom"))
    storage = open_storage(archive)
    assert storage.is_file("step_3/manifest.jsom")
    with pytest.raises(MalformedFile, match=r"the header of step_3/manifest\.jsom does not match the archive"):
        storage.read("step_3/manifest.jsom")
    archive = packed_with(tmp_path / "other", lambda members: members[0].__setitem__(0, "step_3/../../x"))
    with pytest.raises(MalformedFile, match="lies outside"):
        open_checkpoint(archive)


def test_an_archive_may_grow_or_be_packed_again(tmp_path: Path) -> None:
    """By other programs: a tag that was appended is found; a list that came along is not used."""
    convert(save_example(tmp_path, 1), tmp_path / "x.tar", to="tar")
    with tarfile.open(tmp_path / "x.tar", "a") as archive:
        archive.add(save_example(tmp_path, 1, "step_4", step=4), "step_4")
    assert ["step_3", "step_4"] == [info.tag for info in list_tags(open_storage(tmp_path / "x.tar"))]
    with tarfile.open(tmp_path / "x.tar") as archive:
        archive.extractall(tmp_path / "again", filter="data")
    with tarfile.open(tmp_path / "y.tar", "w") as archive:
        archive.add(tmp_path / "again", "")
    assert () == verify_checkpoint(tmp_path / "y.tar").problems


@pytest.mark.parametrize("suffix", [".tar", ".tgz"])
def test_an_archive_of_a_tags_content_is_that_tag(tmp_path: Path, suffix: str) -> None:
    """As ``tar -C run/step_3 -cf step_3.tar .`` makes it: the tag has the archive's name."""
    tag = save_example(tmp_path, 2)
    archive = tmp_path / f"3rd.step_3{suffix}"
    with tarfile.open(archive, "w" if suffix == ".tar" else "w:gz") as packed:
        packed.add(tag, ".")
    assert has_checkpoint(archive)
    state: dict[str, Any] = {}
    load_checkpoint(archive, model=state, topology=Topology(dp=2, rank=1))
    assert None is difference(model(), state)
    assert "3rd.step_3" == open_checkpoint(archive).tag
    assert () == verify_checkpoint(archive).problems
    unshard_checkpoint(archive, tmp_path / "whole", durable=False)
    assert None is difference(model(), torch.load(tmp_path / "whole" / "model.pt", weights_only=True))
