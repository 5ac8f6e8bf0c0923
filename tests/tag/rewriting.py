"""Manifests and indexes written again, with digests that fit, as another version would write them."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.core.documents import sealed

Fields = dict[str, Any]


def rewrite(directory: Path, change: Callable[[Fields], object]) -> None:
    """Write a tag's manifest as another version would."""
    manifest = directory / "manifest.json"
    fields = json.loads(manifest.read_text())
    change(fields)
    manifest.write_bytes(sealed(fields))


def rewrite_index(directory: Path, change: Callable[[Fields], object]) -> None:
    """Write an index as another version would, and its digest into the manifest."""
    (index,) = (directory / "index").iterdir()
    fields = json.loads(index.read_text())
    change(fields)
    data = json.dumps(fields).encode()
    index.write_bytes(data)
    rewrite(directory, lambda manifest: manifest.update(ranks=[[len(data), zlib.crc32(data)]]))
