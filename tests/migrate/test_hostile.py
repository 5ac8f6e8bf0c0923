"""Checkpoints of every layout that are mixed, incomplete or contradict themselves: refused, and nothing is written."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_ckpt import convert
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from tests.migrate.layouts import LAYOUTS, options_of

SAME_FILES = {"nxd": "tag", "nxd xser": "tag", "nxdt": "tag", "optimum": "shards", "optimum 0.1": "shards"}
"""Layouts whose files have the same names: one saved over another is a matter of ranks and metadata."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each layout. Tests change copies."""
    return {name: layout.write(tmp_path_factory.mktemp("layout")) for name, layout in LAYOUTS.items()}


def refused(name: str, place: Path, complaint: str) -> None:
    options = options_of(name, place.parent)
    before = sorted(place.parent.rglob("*"))
    with pytest.raises(CheckpointError, match=complaint):
        convert(place, place.parent / "made" / "step_3", **{"to": "hf", "names": "hf", **options})
    assert before == sorted(place.parent.rglob("*"))


def copied(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder / source.name)
    return folder / source.name


TAGS = ("nxd", "nxd xser", "nxdt")
"""A complete tag is one, whatever lies in it."""


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in TAGS])
def test_files_of_two_layouts_at_once(tmp_path: Path, written: dict[str, Path], name: str) -> None:
    """Beside those of any other: neither is chosen without a word."""
    for other, files in written.items():
        if other in (name, *TAGS) or SAME_FILES.get(other, other) == SAME_FILES.get(name, name):
            continue
        place = copied(written[name], tmp_path / other)
        shutil.copytree(files, place, dirs_exist_ok=True)
        refused(name, place, "of two layouts: .* and |holds several checkpoints|files of FSDP's ranks, .* and last")


MISSING: dict[str, list[tuple[str, str]]] = {
    "nxd": [
        ("done", "is incomplete: it has no 'done' marker"),
        ("model/dp_rank_00_tp_rank_01_pp_rank_01.pt", "the files of dp 0 tp 1 pp 1 are not there"),
        ("optim/dp_rank_01_tp_rank_01_pp_rank_01.pt", "the files of dp 1 tp 1 pp 1 are not there"),
        ("*/dp_rank_0?_tp_rank_01_*", "the files of all ranks are there"),
        ("*/dp_rank_0?_tp_rank_0?_pp_rank_01.pt", "each of the 1 pipeline stages that .* was saved on, found 2"),
    ],
    "nxd xser": [
        ("optim/*_tp_rank_01_*", "files of ranks are missing from one of them"),
        ("model/*_tp_rank_01_*.tensors/tensor_0.pt", r"no file holds model/model\.embed_tokens\.weight"),
        ("optim/*_tp_rank_01_*.tensors/tensor_0.pt", r"tensor_0.pt is missing"),
    ],
    "nxd 0.1": [
        ("tp_rank_01_pp_rank_00/checkpoint.pt", "no file 'tp_rank_01_pp_rank_00/checkpoint.pt'"),
        ("tp_rank_01_pp_rank_00", "the files of all ranks are there"),
    ],
    "nxdt": [("*/*_tp_rank_01_*", "the files of all ranks are there")],
    "optimum": [
        ("shards/mp_metadata_*.json", r"files of 2 pipeline stages, but metadata .* of stages \[\]"),
        ("shards/*/*_tp_rank_01_*", "its metadata is of 2 tensor-parallel ranks, its files are of 1"),
        ("shards/*/*_pp_rank_01.pt", r"files of 1 pipeline stages, but metadata .* of stages \[0, 1\]"),
    ],
    "optimum 0.1": [
        ("shards/mp_metadata_*.pt", r"files of 1 pipeline stages, but metadata .* of stages \[\]"),
        ("shards/*/*_tp_rank_01_*", "the files of all ranks are there"),
    ],
    "optimum 0.0 xser": [
        ("*/tp_rank_01_pp_rank_00*", "the files of all ranks are there"),
        ("*/tp_rank_01_pp_rank_00.tensors/tensor_0.pt", r"no file holds model/model\.embed_tokens\.weight"),
    ],
    "adapter": [
        ("*/*/mp_metadata_*", "mp_metadata"),
        ("*/*/model/*_tp_rank_01_*", "metadata is of 2 tensor-parallel ranks, its files are of 1"),
        ("*/adapter_config.json", "adapter_config.json"),
    ],
    "nemo": [
        ("tp_rank_01_pp_rank_001", "no megatron_llama.* of tp 1 pp 1"),
        ("tp_rank_01_*", "the files of all ranks are there"),
        ("*/optim/dp_rank_001", "a shard of .* files of ranks are missing"),
    ],
    "tiered": [
        ("rank_1", r"should be in 'job/rank_1/step_3/checkpoint.pt', which does not exist"),
        ("*/*/metadata.metadata", "holds one file of torch.save"),
    ],
    "tiered by ray": [("*/rank_1", r"should be in 'job/step_3/rank_1/checkpoint.pt', which does not exist")],
    "fsdp": [("*rank-00000002*", r"those of ranks 2 are not there")],
    "xm.save": [("last.pth", "it is empty")],
    "dcp": [
        (".metadata", r"not \.metadata, which torch DCP writes last"),
        ("*.distcp", r"should be in '__0_0.distcp', which does not exist"),
    ],
}
"""By layout, what goes missing, and what is said of it."""


@pytest.mark.parametrize(
    ("name", "files", "complaint"), [(name, *case) for name, cases in MISSING.items() for case in cases]
)
def test_files_that_are_missing(
    tmp_path: Path, written: dict[str, Path], name: str, files: str, complaint: str
) -> None:
    """Of a rank, of a last rank in all parts, of all ranks, or what describes them."""
    place = copied(written[name], tmp_path)
    for path in place.glob(files):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    refused(name, place, complaint)


MAIN_FILES = {
    "nxd": "model/*_tp_rank_00_pp_rank_00.pt",
    "nxd xser": "model/*_tp_rank_00_pp_rank_00.pt.tensors/tensor_0.pt",
    "nxd 0.1": "tp_rank_00_pp_rank_00/checkpoint.pt",
    "nxdt": "model/*_tp_rank_00_pp_rank_00.pt",
    "optimum": "shards/model/*_tp_rank_00_pp_rank_00.pt",
    "optimum 0.1": "shards/model/*_tp_rank_00_pp_rank_00.pt",
    "optimum 0.0 xser": "*/tp_rank_00_pp_rank_00.tensors/tensor_0.pt",
    "adapter": "*/*/model/*_tp_rank_00_pp_rank_00.pt",
    "nemo": "tp_rank_00_pp_rank_000/*.ckpt",
    "tiered": "rank_0/*/checkpoint.pt",
    "tiered by ray": "*/rank_0/checkpoint.pt",
    "fsdp": "*rank-00000000*",
    "xm.save": "last.pth",
    "dcp": "__0_0.distcp",
}
"""By layout, the first rank's file of tensors."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_that_is_cut_off(tmp_path: Path, written: dict[str, Path], name: str) -> None:
    """In the middle, or before its first byte, as after a full disk or a power cut: it is named."""
    for part in (0.5, 0.0):
        place = copied(written[name], tmp_path / str(part))
        path = min(place.glob(MAIN_FILES[name]))
        os.truncate(path, int(path.stat().st_size * part))
        refused(name, place, re.escape(path.name))


LAST_RANKS = {
    "nxd": "model/*_tp_rank_01_pp_rank_01.pt",
    "nxd xser": "model/*_tp_rank_01_pp_rank_00.pt.tensors/tensor_0.pt",
    "nxd 0.1": "tp_rank_01_pp_rank_00/checkpoint.pt",
    "nxdt": "model/*_tp_rank_01_pp_rank_00.pt",
    "optimum": "shards/model/*_tp_rank_01_pp_rank_01.pt",
    "optimum 0.1": "shards/optim/*_tp_rank_01_pp_rank_00.pt",
    "optimum 0.0 xser": "*/tp_rank_01_pp_rank_00.tensors/tensor_0.pt",
    "adapter": "*/*/model/*_tp_rank_01_pp_rank_00.pt",
    "nemo": "tp_rank_01_pp_rank_001/*.ckpt",
    "fsdp": "*rank-00000002*",
}
"""By layout, the file of the last of several ranks."""


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:1]])


def changed(path: Path, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """The first tensor in the file is another one, or none any more."""
    in_safetensors = path.suffix == ".safetensors"
    held = {"": load_file(path) if in_safetensors else torch.load(path, weights_only=False)}
    tree, key = _first_tensor(held, "")
    if change is None:
        del tree[key]
    else:
        tree[key] = change(tree[key])
    (save_file if in_safetensors else torch.save)(held[""], path)


def _first_tensor(tree: Any, key: Any) -> Any:
    """The dict that holds it, and its key in that; None where there is none."""
    found = tree[key]
    if isinstance(found, torch.Tensor):
        return (tree, key) if found.numel() > 1 else None
    inside = found if isinstance(found, dict) else {}
    return next(filter(None, (_first_tensor(inside, one) for one in inside)), None)


CONTRADICTIONS = "|".join(
    ["two saves", "saved different values", "but the 3 ranks hold shards", "in different dtypes", "not hold the same"]
)


@pytest.mark.parametrize("name", LAST_RANKS)
def test_a_rank_contradicts_the_others(tmp_path: Path, written: dict[str, Path], name: str) -> None:
    """By the shape or the dtype of a tensor, or because it has none; also where the first rank's copy is read."""
    changes = {"half": torch.Tensor.half, "whole": torch.Tensor.long, "longer": longer, "none": None}
    if "xser" in name:
        del changes["none"]  # its file is missing then: see above
    for kind, change in changes.items():
        place = copied(written[name], tmp_path / kind)
        (path,) = place.glob(LAST_RANKS[name])
        changed(path, change)
        refused(name, place, CONTRADICTIONS)


@pytest.mark.parametrize("name", ["nxd", "nxd 0.1", "tiered"])
def test_no_output_inside_what_is_migrated(tmp_path: Path, written: dict[str, Path], name: str) -> None:
    """Also where the ranks' files are in one place of several in it."""
    place = copied(written[name], tmp_path)
    options = options_of(name, tmp_path)
    with pytest.raises(InvalidArgument, match="a conversion never touches its input"):
        convert(place, place / "sub" / "out", **{"to": "hf", "names": "hf", **options})
    assert not (place / "sub").exists()


@pytest.mark.parametrize(
    ("name", "last", "key"),
    [
        ("nxd 0.1", "tp_rank_01_pp_rank_00/checkpoint.pt", "epoch"),
        ("nemo", "tp_rank_01_pp_rank_001/*.ckpt", "global_step"),
        ("fsdp", "*rank-00000002*", "epoch"),
    ],
)
def test_a_rank_counts_other_steps(
    tmp_path: Path, written: dict[str, Path], name: str, last: str, key: str
) -> None:
    """As where a run was killed while its ranks wrote over the last checkpoint."""
    place = copied(written[name], tmp_path)
    (path,) = place.glob(last)
    content = torch.load(path, weights_only=False)
    torch.save({**content, key: 1000}, path)
    refused(name, place, rf"is of {key} 1000, .* of \d+; files of two saves are mixed")
