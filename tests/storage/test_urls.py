"""Paths and URLs, and what lies below and above them."""

from pathlib import Path

import pytest

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.urls import directory_and_name, is_url, join, local_path, open_storage


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("s3://bucket/run/step_300", ("s3://bucket/run", "step_300")),
        ("s3://bucket/run/", ("s3://bucket", "run")),
        ("s3://bucket", ("s3://bucket", "")),
        ("/data/run/step_300/", ("/data/run", "step_300")),
        ("step_300", (".", "step_300")),
        ("/", ("/", "")),
        ("file:///data/step_300", ("/data", "step_300")),
    ],
)
def test_the_directory_that_a_name_lies_in(place: str, expected: tuple[str, str]) -> None:
    assert expected == directory_and_name(place)


def test_names_are_joined_below_a_place() -> None:
    assert "s3://bucket/run/tag" == join("s3://bucket/", "run", "tag")
    assert "s3://bucket/run" == join("s3://", "bucket", "run")
    assert "data/run/tag" == join("data/run", "tag")


@pytest.mark.parametrize(
    ("place", "expected"),
    [("s3://b/x", True), ("GS://b", True), ("simplecache::s3://b", True), ("file:///x", False), ("a/b:c", False)],
)
def test_what_is_a_url(place: str, expected: bool) -> None:
    """Whatever has a scheme, but that of the local file system."""
    assert expected == is_url(place)


def test_file_urls_are_directories() -> None:
    assert "/data/run" == local_path("file:///data/run") == local_path("file://localhost/data/run")
    assert isinstance(open_storage("file:///data/run"), LocalStorage)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket", "file:///data/run"])
def test_a_url_that_was_made_a_path(url: str) -> None:
    """Is refused, with or without options: it would be saved to a local directory of that name."""
    for options in (None, {"retries": 1}):
        with pytest.raises(InvalidArgument, match="pass URLs as strings"):
            open_storage(Path(url), storage_options=options)
