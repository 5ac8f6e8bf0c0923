"""Kinds of files that a failed download leaves in place of data: pointers, pages, error documents. Pure."""

from __future__ import annotations

import re

HEAD = 64
"""Bytes at the beginning of a file that tell it."""

_KINDS = {
    rb"version https://git-lfs": "a Git LFS pointer, not the file itself: run git lfs pull in the clone",
    rb"\s*<(!doctype html|html|head|body)": "an HTML page, such as a login or an error: download the file again",
    rb"\s*<(\?xml|error)": "an XML document, such as a store's error: download the file again",
}
_JSON = {rb'\s*\{\s*["}]': "a JSON text, such as a server's error: download the file again"}


def instead_of_data(start: bytes) -> str | None:
    """Return what a file is that begins so, and what to do; None if it may be data."""
    return _described(start, _KINDS | _JSON)


def instead_of_json(start: bytes) -> str | None:
    """Return what a file is that begins so, and what to do; None if it may be JSON."""
    return _described(start, _KINDS)


def _described(start: bytes, kinds: dict[bytes, str]) -> str | None:
    return next((kind for pattern, kind in kinds.items() if re.match(pattern, start[:HEAD], re.IGNORECASE)), None)
