"""The layouts of NxD 0.1 to 0.5, each as those versions wrote it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, load_checkpoint
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.layouts.nxd_tag import TagLayout
from nxd_ckpt.storage.local import LocalStorage
from tests.tag.equality import difference
from tests.tag.layouts import open_tag, save, whole
from tests.tag.xser_files import save_xser

INNER = "checkpoint.pt"


def model(seed: int) -> dict[str, torch.Tensor]:
    return {"embed.weight": torch.arange(6.0).reshape(2, 3) + seed, "steps": torch.tensor(seed)}


def zero1(seed: int) -> dict[str, Any]:
    moments = {"step": seed, "exp_avg": torch.full((2,), seed / 7), "exp_avg_sq": torch.ones(2)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}]
    return {"state": {}, "param_groups": groups, "base_state": {0: moments}, "shape_info": {0: torch.Size([4])}}


def open_directory(directory: Path) -> TagLayout:
    return open_tag(LocalStorage(directory))


@pytest.mark.parametrize("name", ["tp_rank_{:02d}", "tp_rank_{:02d}/checkpoint.pt"])
def test_0_1_is_read_from_one_file_per_tp_rank(tmp_path: Path, name: str) -> None:
    """0.1 and 0.2: the payload beside the ``tp_rank`` that NxD added to it."""
    for tp in range(2):
        save({"model": model(tp), "epoch": 3, "tp_rank": tp}, tmp_path / name.format(tp))
    tag = open_directory(tmp_path)
    assert {"dp": 1, "tp": 2, "pp": 1, "ep": 1} == tag.topology().sizes
    for tp in range(2):
        assert difference(model(tp), whole(tag, tag.model_tree(Coordinates(tp_rank=tp)))) is None
    assert {"epoch": 3} == tag.user_content()


def test_0_1_is_read_from_a_bare_state_dict(tmp_path: Path) -> None:
    """A payload may be the model's state dict itself; NxD's ``tp_rank`` is no part of it."""
    save({**model(0), "tp_rank": 0}, tmp_path / "tp_rank_00")
    tag = open_directory(tmp_path)
    assert difference(model(0), whole(tag, tag.model_tree(Coordinates()))) is None
    parts = tag.parts()
    assert (True, None, False, False) == (parts.model, parts.optimizer, parts.scheduler, parts.user_content)


def test_0_3_is_read_from_a_payload_with_everything(tmp_path: Path) -> None:
    """0.3 to 0.5, pt: model, optimizer, scheduler and the rest in one payload per tp and pp rank."""
    plain = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"betas": (0.9, 0.95), "params": [0]}]}
    for pp in range(2):
        payload = {"model": model(pp), "optimizer": plain, "scheduler": {"last_epoch": 4}, "global_step": 17}
        save(payload, tmp_path / f"tp_rank_00_pp_rank_{pp:02d}" / "checkpoint.pt")
    tag = open_directory(tmp_path)
    assert {"dp": 1, "tp": 1, "pp": 2, "ep": 1} == tag.topology().sizes
    assert difference(model(1), whole(tag, tag.model_tree(Coordinates(pp_rank=1)))) is None
    assert difference(plain, whole(tag, tag.optimizer_tree(Coordinates()))) is None
    assert {"last_epoch": 4} == tag.scheduler()
    assert {"global_step": 17} == tag.user_content()
    parts = tag.parts()
    assert (True, "plain", True, True, False) == (
        parts.model,
        parts.optimizer,
        parts.scheduler,
        parts.user_content,
        parts.use_xser,
    )


@pytest.mark.parametrize("xser", [True, False])
def test_a_checkpoint_of_lightning_is_read(tmp_path: Path, xser: bool) -> None:
    """NxD's plugin writes each ``.ckpt`` as such a directory: a state dict, lists of optimizers and schedulers."""
    payload = {
        "epoch": 2,
        "state_dict": model(5),
        "optimizer_states": [zero1(1)],
        "lr_schedulers": [{"last_epoch": 4}],
        "loops": {"fit_loop": {"state_dict": {}}},
    }
    directory = tmp_path / "epoch=2.ckpt"
    if xser:
        directory.mkdir()
        save_xser(payload, directory / "tp_rank_00_pp_rank_00", info=False)
    else:
        save(payload, directory / "tp_rank_00_pp_rank_00" / "checkpoint.pt")
    held: dict[str, Any] = {"model": {}, "optimizer": {}, "scheduler": {}}
    content = load_checkpoint(directory, **held, topology=Topology())
    assert difference({"model": model(5), "optimizer": zero1(1), "scheduler": {"last_epoch": 4}}, held) is None
    assert {"epoch": 2, "loops": {"fit_loop": {"state_dict": {}}}} == content


def test_several_optimizers_are_left_to_the_script(tmp_path: Path) -> None:
    save({"state_dict": model(0), "optimizer_states": [zero1(0), zero1(1)]}, tmp_path / "tp_rank_00_pp_rank_00" / INNER)
    tag = open_directory(tmp_path)
    assert tag.parts().optimizer is None
    assert difference([zero1(0), zero1(1)], tag.user_content()["optimizer_states"]) is None


def test_0_5_xser_is_read(tmp_path: Path) -> None:
    """0.5, xser: a file of references with ``.tensors`` beside it, and no info file."""
    save_xser({"model": model(5), "step": 1}, tmp_path / "tp_rank_00_pp_rank_00", info=False)
    tag = open_directory(tmp_path)
    assert difference(model(5), whole(tag, tag.model_tree(Coordinates()))) is None
    assert tag.parts().use_xser


def test_zero1_files_beside_the_payload(tmp_path: Path) -> None:
    """ZeRO-1 wrote ``optim.dp_rank_XX.tp_rank_XX`` files, with ranks among the state."""
    save({"model": model(0)}, tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt")
    for dp in range(2):
        state = {**zero1(dp), "dp_rank": dp, "tp_rank": 0}
        save(state, tmp_path / f"optim.dp_rank_{dp:02d}.tp_rank_00")
    tag = open_directory(tmp_path)
    assert {"dp": 2, "tp": 1, "pp": 1, "ep": 1} == tag.topology().sizes
    assert "zero1" == tag.parts().optimizer
    assert difference(zero1(1), whole(tag, tag.optimizer_tree(Coordinates(dp_rank=1)))) is None


def test_a_directory_of_optimizers_by_dp_rank(tmp_path: Path) -> None:
    """``master_dp_only=False``: an optimizer's state of its own for every data-parallel rank."""
    for dp in range(2):
        save(zero1(dp), tmp_path / f"tp_rank_00_pp_rank_00_dp_rank_{dp:02d}" / "checkpoint.pt")
    tag = open_directory(tmp_path)
    assert difference(zero1(1), whole(tag, tag.optimizer_tree(Coordinates(dp_rank=1)))) is None
    assert ("zero1", False) == (tag.parts().optimizer, tag.parts().model)
    with pytest.raises(PartNotFound, match="nothing under model"):
        tag.model_tree(Coordinates())


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    save({"model": model(0)}, tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt")
    with pytest.raises(PartNotFound, match="tp 1 pp 0; found 1 rank files: dp 0-0, tp 0-0, pp 0-0"):
        open_directory(tmp_path).model_tree(Coordinates(tp_rank=1))


def test_what_the_payload_lacks_is_named(tmp_path: Path) -> None:
    """Optimizer, scheduler and user content are optional, and their absence is an error that shows the keys."""
    save({"model": model(0)}, tmp_path / "tp_rank_00")
    tag = open_directory(tmp_path)
    with pytest.raises(PartNotFound, match="found keys \\['model'\\]"):
        tag.optimizer_tree(Coordinates())
    with pytest.raises(PartNotFound, match="nothing under scheduler"):
        tag.scheduler()
    with pytest.raises(PartNotFound, match="nothing but model"):
        tag.user_content()
