"""``nxd-ckpt cp``, and the options of stores that all commands take."""

import uuid
from pathlib import Path

import pytest

from tests.cli.conftest import Run

SECRET = "hunter2"


@pytest.fixture
def store() -> str:
    """A URL of its own in fsspec's memory."""
    return f"memory://{uuid.uuid4().hex}"


def test_it_says_what_it_did(run: Run, examples: Path, tmp_path: Path) -> None:
    """In a line, or in one document; nothing with ``--quiet``."""
    source = examples / "zero1"
    first = run("cp", source, tmp_path / "one" / "zero1")
    assert (0, "") == (first.code, first.err)
    assert first.out.startswith(f"{source} is copied to {tmp_path}/one/zero1: ")
    second = run("cp", source, tmp_path / "two" / "zero1", "--json").document
    assert (str(source), f"{tmp_path}/two/zero1", False) == (second["source"], second["target"], second["dry_run"])
    assert (second["files"], second["nbytes"], 0) == (second["copied"], second["copied_nbytes"], second["kept"])
    third = run("cp", source, tmp_path / "three" / "zero1", "--quiet")
    assert (0, "", "") == (third.code, third.out, third.err)
    assert 0 == run("verify", tmp_path / "three", "--quiet").code


def test_a_directory_of_copies_is_no_name_of_one(run: Run, examples: Path, tmp_path: Path) -> None:
    """An empty one, one of tags, also to be replaced, and what a slash says is one; another name is said."""
    (tmp_path / "empty").mkdir()
    mirror = tmp_path / "mirror"
    assert 0 == run("cp", examples / "zero1", mirror / "zero1").code
    for words in ([mirror], [mirror, "--overwrite"], [tmp_path / "empty"], [f"{tmp_path}/new/"]):
        refused = run("cp", examples / "zero1", *words)
        assert (1, True) == (refused.code, f"such as {str(words[0]).rstrip('/')}/zero1" in refused.err)
    assert [["zero1"], []] == [[path.name for path in place.glob("[!.]*")] for place in (mirror, tmp_path / "empty")]
    assert f"\n  the copy is the tag 'other' of {tmp_path}\n" in run("cp", examples / "zero1", tmp_path / "other").out
    assert f"such as {mirror}/zero1" in run("convert", "--to", "tag", examples / "zero1", mirror, "--dp", "1").err


@pytest.mark.parametrize("tag", ["z_plain", "zero1", "cut"])
def test_a_store_is_looked_at_as_a_directory(run: Run, examples: Path, store: str, tmp_path: Path, tag: str) -> None:
    """A tag that was copied there is listed, inspected and verified with the same outcome, and copied back."""
    assert 0 == run("cp", examples / tag, f"{store}/{tag}").code
    [listed] = run("list", store, "--json").document["tags"]
    [expected] = [one for one in run("list", examples, "--json").document["tags"] if one["tag"] == tag]
    ages = {"age_seconds": 0, "latest": True}
    assert {**expected, **ages} == {**listed, **ages}
    inspected, original = (run("inspect", where, tag, "--json").document for where in (store, examples))
    assert {**original, **ages, "directory": store} == {**inspected, **ages}
    for place in ((store,), (store, tag), (f"{store}/{tag}",)):
        verified = run("verify", *place, "--json").document
        assert (True, store, tag) == (verified["ok"], verified["directory"], verified["tag"])
    assert 0 == run("cp", f"{store}/{tag}", tmp_path / tag).code
    assert 0 == run("verify", tmp_path, tag, "--quiet").code


@pytest.mark.parametrize("option", [SECRET, f"={SECRET}", f"a..b={SECRET}"])
def test_a_malformed_option_shows_no_secret(
    run: Run, store: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("list", store, "--storage-option", option)
    err = capsys.readouterr().err
    assert ("KEY=VALUE" in err, SECRET in err) == (True, False)


def test_options_are_nested_by_dots(monkeypatch: pytest.MonkeyPatch, run: Run, store: str) -> None:
    """Numbers, true, false and null are what JSON says, all else is text; quotes make text of anything."""
    seen: list[object] = []

    def open_storage(path: str, *, storage_options: object) -> None:
        seen.append(storage_options)
        raise OSError("seen")

    monkeypatch.setattr("nxd_ckpt.tag.listing.open_storage", open_storage)
    words = ["key=a=b", "client_kwargs.region_name=us-west-2", "client_kwargs.retries=3", "anon=true", 'secret="12"']
    run("list", store, *(word for text in words for word in ("--storage-option", text)))
    nested = {"region_name": "us-west-2", "retries": 3}
    assert [{"key": "a=b", "client_kwargs": nested, "anon": True, "secret": "12"}] == seen
