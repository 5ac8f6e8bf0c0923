"""Checks of names of files and directories from untrusted files. Pure.

Every name of a file, a tag or an attempt in a document passes here before it is used.
"""

from __future__ import annotations

from typing import Any

_NAME, _KEY = 255, 1024
"""Bytes that a name in a file system, and a key in an object store, may have."""


def checked_name(name: Any) -> str:
    """Return ``name``; raise ValueError unless it can be the name of one file or directory."""
    if type(name) is not str or not name or name in (".", ".."):
        raise ValueError(f"expected the name of a file or directory, found {name!r:.80}")
    if any(mark in name for mark in "/\\\0"):
        raise ValueError(f"{name!r:.80} must be one name, without '/', '\\' or NUL; it is not a path")
    if _length(name) > _NAME:
        raise ValueError(f"{name[:40]!r}... has {_length(name)} bytes, at most {_NAME} are allowed")
    return name


def checked_key(key: Any) -> str:
    """Return ``key``; raise ValueError unless it is names joined by ``/``, and so below its directory."""
    if type(key) is not str or _length(key) > _KEY:
        raise ValueError(f"expected a path of at most {_KEY} bytes, found {key!r:.80}")
    for name in key.split("/"):
        checked_name(name)
    return key


def checked_text(text: Any) -> str:
    """Return ``text``; raise ValueError unless it is a string that can be written as UTF-8."""
    if type(text) is not str:
        raise ValueError(f"expected a string, found {text!r:.80}")
    _length(text)
    return text


def _length(text: str) -> int:
    """Return the length in bytes of UTF-8."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{text[:40]!a} holds half a character, which no name may") from None
