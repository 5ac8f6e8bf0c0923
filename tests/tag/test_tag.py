"""Reading one tag: older versions, mixtures, and what is missing or damaged."""

from pathlib import Path

import pytest
import torch

from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.formats.tensors import TensorReference, TensorStub
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.layouts.files import MissingTensor
from nxd_ckpt.storage.local import LocalStorage
from tests.formats.helpers import rendered
from tests.tag.equality import difference
from tests.tag.layouts import open_tag, save, whole
from tests.tag.xser_files import save_xser

MODEL = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
STATE = {"a": torch.arange(4.0), "nested": {"b": [torch.ones(2, 2), torch.tensor(7)]}}


def test_references_and_inline_tensors_in_one_file(tmp_path: Path) -> None:
    """Mixed files are read: whatever is inline stays, whatever is referred to is followed."""
    path = tmp_path / "t" / MODEL
    inline = torch.arange(3.0)
    image = image_of({"inline": inline, "reference": TensorReference(0)})
    save(torch.ones(2), path.with_name(f"{path.name}.tensors") / "tensor_0.pt")
    path.write_bytes(rendered(image))
    tag = open_tag(LocalStorage(tmp_path), "t")
    expected = {"inline": inline, "reference": torch.ones(2)}
    assert difference(expected, whole(tag, tag.model_tree(Coordinates()))) is None


def test_a_tensor_without_a_file_is_marked(tmp_path: Path) -> None:
    """The caller decides what a missing tensor means; the marker tells its path, dtype, shape and file."""
    save_xser(STATE, tmp_path / "t" / MODEL, left_out={1})
    tag = open_tag(LocalStorage(tmp_path), "t")
    leaf = tag.model_tree(Coordinates())["nested"]["b"][0]
    assert MissingTensor("nested.b.0", f"{MODEL}.tensors/tensor_1.pt", "float32", (2, 2)) == leaf
    assert not tag.parts().lower_precision_weights


def test_a_missing_expert_is_not_taken_from_another_rank(tmp_path: Path) -> None:
    """Only what is no expert's is shared between expert-parallel ranks; a lost expert is missing."""
    name = "model/dp_rank_00_ep_rank_{:02d}_tp_rank_00_pp_rank_00.pt"
    for ep in range(2):
        state = {"shared": torch.ones(2), "expert": torch.full((2,), float(ep))}
        save_xser(state, tmp_path / "t" / name.format(ep), left_out={0, 1} if ep else (), expert={1})
    tree = open_tag(LocalStorage(tmp_path), "t").model_tree(Coordinates(dp_rank=1))
    assert isinstance(tree["shared"], TensorStub)
    assert name.format(0) in tree["shared"].file
    assert isinstance(tree["expert"], MissingTensor)


def test_shared_tensors_are_found_by_path(tmp_path: Path) -> None:
    """tids count for each file by itself: the same path has another tid where ranks hold different experts."""
    name = "model/dp_rank_00_ep_rank_{:02d}_tp_rank_00_pp_rank_00.pt"
    first = {"e0": torch.zeros(1), "e1": torch.zeros(1), "shared": torch.arange(3.0)}
    second = {"e2": torch.ones(1), "shared": torch.arange(3.0)}
    save_xser(first, tmp_path / "t" / name.format(0), expert={0, 1})
    save_xser(second, tmp_path / "t" / name.format(1), left_out={1}, expert={0})
    tag = open_tag(LocalStorage(tmp_path), "t")
    assert difference(second, whole(tag, tag.model_tree(Coordinates(dp_rank=1)))) is None


def test_a_tensor_of_another_save_is_noticed(tmp_path: Path) -> None:
    """A tensor file that contradicts the info file comes from another save: an interrupted overwrite."""
    save_xser(STATE, tmp_path / "t" / MODEL)
    torch.save(torch.arange(5.0), tmp_path / "t" / f"{MODEL}.tensors" / "tensor_0.pt")
    with pytest.raises(MalformedFile, match=r"says float32 \(4,\), found float32 \(5,\)"):
        open_tag(LocalStorage(tmp_path), "t").model_tree(Coordinates())


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    save(STATE, tmp_path / "step_7" / MODEL)
    tag = open_tag(LocalStorage(tmp_path), "step_7", topology=Topology(tp=2))
    wanted = (
        r"step_7/model/dp_rank_00_tp_rank_01_pp_rank_00.pt does not exist; step_7/model/ holds 1 rank files"
    )
    with pytest.raises(PartNotFound, match=wanted):
        tag.model_tree(Coordinates(tp_rank=1))
    for read in (tag.optimizer_tree, tag.model_tree):
        with pytest.raises(PartNotFound):
            read(Coordinates(pp_rank=3))
    for part in (tag.scheduler, tag.user_content):
        with pytest.raises(PartNotFound, match="step_7: no file"):
            part()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """A directory of something else is refused, and the error shows what it holds."""
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(PartNotFound, match=r"no checkpoint of nxd_ckpt or neuronx_distributed.*notes\.txt"):
        open_tag(LocalStorage(tmp_path))


def test_a_given_topology_decides(tmp_path: Path) -> None:
    """A manifest knows what file names do not tell: dp without ZeRO-1, and the order of ranks."""
    save(STATE, tmp_path / "t" / MODEL)
    given = Topology(dp=8)
    assert given == open_tag(LocalStorage(tmp_path), "t", topology=given).topology()


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Expert-parallel ranks must divide the data-parallel ones; else files are missing or of two saves."""
    for ep in range(2):
        save(STATE, tmp_path / "t" / f"model/dp_rank_00_ep_rank_{ep:02d}_tp_rank_00_pp_rank_00.pt")
    for dp in range(3):
        save({"base_state": {}}, tmp_path / "t" / f"optim/dp_rank_{dp:02d}_tp_rank_00_pp_rank_00.pt")
    with pytest.raises(MalformedFile, match="files of 3 data-parallel ranks"):
        open_tag(LocalStorage(tmp_path), "t").topology()
