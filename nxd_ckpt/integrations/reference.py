"""References to checkpoints for experiment trackers: the place and identity of a tag, not its bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from nxd_ckpt.checkpoint import open_checkpoint
from nxd_ckpt.core.names import MANIFEST
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.storage.fsspec_storage import without_password
from nxd_ckpt.storage.urls import StorageOptions, StrPath, is_url


@dataclass(frozen=True)
class Reference:
    """A complete tag: its name and its URI.

    ``digest`` is the SHA-256 of its manifest, which has digests of the rest: another save under the same name has
    another digest. ``nbytes`` are the bytes of the tensors of model and optimizer, each counted once; ``ranks`` is the
    number of ranks that saved it.
    """

    tag: str
    uri: str
    digest: str
    nbytes: int
    tensors: int
    ranks: int

    def document(self) -> dict[str, Any]:
        """Return the reference as plain data."""
        return asdict(self)


def reference_to(path: StrPath, tag: Tag | None = None, storage_options: StorageOptions | None = None) -> Reference:
    """Return the reference to a tag; None takes the latest complete one. Reads no tensor.

    Raises:
        CheckpointNotFound: there is no complete one. After an async save, wait for the returned save first.
        UnsupportedState: neuronx_distributed wrote it, without a manifest.
    """
    checkpoint = open_checkpoint(path, tag, storage_options=storage_options)
    opened = checkpoint.opened
    if checkpoint.manifest is None:
        raise UnsupportedState(
            f"{opened.where} has no manifest, as neuronx_distributed wrote it: nothing identifies the save; "
            "refer to a copy that nxd-ckpt reshard makes"
        )
    manifest = opened.storage.read(f"{opened.tag}/{MANIFEST}" if opened.tag else MANIFEST)
    tensors = checkpoint.metadata.values()
    return Reference(
        checkpoint.tag,
        without_password(opened.where) if is_url(opened.where) else Path(opened.where).as_uri(),
        f"sha256:{sha256(manifest).hexdigest()}",
        sum(tensor.nbytes or 0 for tensor in tensors),
        len(tensors),
        checkpoint.topology.world_size,
    )
