"""The files of a tag as plain torch sees them: ``torch.load(weights_only=False)``, nothing of nxd_ckpt's."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class Reference:
    """Stands in for torch-xla's TensorReference, so that torch-xla need not be installed."""

    tid: int


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch_xla.utils.serialization", "TensorReference"):
            return Reference
        return super().find_class(module, name)


_PICKLE: Any = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler, load=None)
"""A pickle module, as ``torch.load`` takes one; zip files ask it for the Unpickler alone."""


def unpickled(path: Path) -> Any:
    """What the file holds."""
    return torch.load(path, weights_only=False, pickle_module=_PICKLE)


def names_below(tag: Path) -> set[str]:
    """Every file and directory of a tag, but for what nxd_ckpt puts beside NxD's."""
    ours = ("index", "manifest.json", "rank_content")
    found = {path.relative_to(tag) for path in tag.rglob("*")}
    return {str(path) for path in found if path.parts[0] not in ours}


def torch_files(tag: Path) -> list[Path]:
    """Every file that ``torch.save`` could have written, in order of name."""
    return sorted(tag.rglob("*.pt")) if not tag.is_file() else [tag]
