"""``sha256=True``: a list that ``sha256sum`` reads, of every file of an output, which ``verify`` compares."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import convert, load_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.migrate.layouts import LAYOUTS, options_of

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "hf": ({"optimizer": True, "size_per_shard": "1KB"}, "config.json"),
    "files": ({"unshard_strategy": "chunks", "size_per_shard": "1KB"}, "model/index.json"),
    "dcp": ({}, "__0_0.distcp"),
}
"""Options of each, and a file that is still read with a blank at its end."""


@pytest.mark.parametrize("form", FORMS)
def test_every_file_is_listed(tmp_path: Path, form: Any) -> None:
    """And each byte of them is compared; a file that is gone or changed is named. An output is replaced."""
    source, options = LAYOUTS["dcp"].write(tmp_path), options_of("dcp", tmp_path)
    more, changed = FORMS[form]
    options |= {"to": form, "names": "hf", "sha256": True, "durable": False, **more}
    out = tmp_path / "out"
    for overwrite in (False, True):
        convert(source, out, overwrite=overwrite, **options)
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} - {"SHA256SUMS"}
    listed = [line.split("  ") for line in (out / "SHA256SUMS").read_text().splitlines()]
    assert sorted(files) == [name for _, name in listed]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=out, check=True)
    verified = verify_checkpoint(out)
    assert ((), 0) == (verified.problems, verified.undigested)
    assert sum((out / name).stat().st_size for name in files) == verified.verified == verified.nbytes

    for name, text in ((changed, b" "), ("SHA256SUMS", b"0" * 64 + b"  gone.txt\n")):
        with (out / name).open("ab") as file:
            file.write(text)
    problems = verify_checkpoint(out).problems
    assert 2 == len(problems)
    assert f"{out}/{changed}: expected SHA-256 " in problems[0]
    assert f"{out}/gone.txt is missing" == problems[1]


def test_a_list_that_is_none_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of names outside, too; nobody is asked for a file there."""
    out = tmp_path / "out"
    convert(LAYOUTS["xm.save"].write(tmp_path), out, to="files", sha256=True, durable=False)
    for content in ("no list\n", f"{'0' * 64}  ../run/last.pth\n"):
        (out / "SHA256SUMS").write_text(content)
        assert 1 == main(["verify", str(out)])
        assert "SHA256SUMS" in capsys.readouterr().out
    load_checkpoint(out, model={})


def test_a_tag_has_digests_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="sha256= means nothing for to='tag'"):
        convert(LAYOUTS["xm.save"].write(tmp_path), tmp_path / "out", to="tag", sha256=True)
