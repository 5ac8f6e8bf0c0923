"""Two saved tensors for one tied live parameter: equal ones load, of different ones none is dropped without a word."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nxd_ckpt import load_checkpoint, save_checkpoint
from nxd_ckpt.errors import IncompatibleState
from nxd_ckpt.tag import side_by_side


class Model(torch.nn.Module):
    """Embedding and head; with ``tie`` one parameter."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def as_tag(path: Path, model: Model) -> Path:
    save_checkpoint(path / "run", "s", model)
    return path / "run"


def as_foreign_tag(path: Path, model: Model) -> Path:
    """Without manifest and index, as NxD writes it: no digests."""
    save_checkpoint(path / "run", "s", model)
    for own in [*(path / "run" / "s").rglob("*")]:
        if own.is_file() and "nxd_ckpt" in str(own.relative_to(path / "run")):
            own.unlink()
    return path / "run"


def as_hugging_face(path: Path, model: Model) -> Path:
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    rules = [{"nxd": name, "hf": name} for name in tensors]
    (path / "mapping.json").write_text(json.dumps({"format_version": 1, "name": "tiny", "rules": rules}))
    return path


WRITERS = [as_tag, as_foreign_tag, as_hugging_face]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("write", WRITERS)
def test_different_tensors_are_refused(tmp_path: Path, write: Callable[[Path, Model], Path], strict: bool) -> None:
    """The error names both and the remedy, and the model stays as it is. Each remedy takes the other tensor."""
    saved, live = Model(tie=False), Model(tie=True)
    with torch.no_grad():
        saved.head.weight.copy_(saved.embed.weight)
        saved.head.weight[7, 3] += 1
    path = write(tmp_path, saved)
    options: dict[str, Any] = {"mapping": str(path / "mapping.json")} if write is as_hugging_face else {}
    before = live.embed.weight.detach().clone()
    with pytest.raises(IncompatibleState, match=r"model/embed.weight and model/head.weight, which are one"):
        load_checkpoint(path, model=live, strict=strict, **options)
    assert torch.equal(before, live.embed.weight)
    for ignored, kept in (("head", saved.embed.weight), ("embed", saved.head.weight)):
        load_checkpoint(path, model=live, strict=strict, ignore_keys=[f"model/{ignored}.weight"], **options)
        assert torch.equal(kept, live.head.weight)
        chosen = Model(tie=True)

        def choose(names: list[str], ignored: str = ignored) -> list[str]:
            return [one for one in names if ignored in one]

        load_checkpoint(path, model=chosen, strict=strict, ignore_keys=choose, **options)
        assert torch.equal(kept, chosen.head.weight)


@pytest.mark.parametrize("write", WRITERS)
def test_equal_tensors_load(
    tmp_path: Path, write: Callable[[Path, Model], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are compared in parts."""
    monkeypatch.setattr(side_by_side, "_NBYTES", 40)
    saved, live = Model(tie=False), Model(tie=True)
    with torch.no_grad():
        saved.head.weight.copy_(saved.embed.weight)
    path = write(tmp_path, saved)
    options: dict[str, Any] = {"mapping": str(path / "mapping.json")} if write is as_hugging_face else {}
    load_checkpoint(path, model=live, **options)
    assert torch.equal(saved.head.weight, live.head.weight)
