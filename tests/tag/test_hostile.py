"""Files that say what no checkpoint says, tag by tag: an error of ours names the file, whatever is asked of it."""

import json
import pickle
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint

from nxd_ckpt import convert, load_checkpoint
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import CheckpointError, InvalidArgument, MalformedFile
from nxd_ckpt.hugging_face.mappings import find_mapping
from nxd_ckpt.storage.local import LocalStorage
from tests.formats.helpers import torch_file
from tests.hugging_face.reference import Model
from tests.hugging_face.saved import write_files
from tests.tag.layouts import open_tag

MODEL = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
OPTIM = "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt"


@pytest.fixture
def foreign(golden: Path, tmp_path: Path) -> Path:
    """A copy of a tag that NxD wrote."""
    return Path(shutil.copytree(golden / "a_dp2_zero1_pt" / "ckpt", tmp_path / "ckpt"))


STATES: dict[str, tuple[str, Any]] = {
    "a model of integer keys": (MODEL, {1: torch.ones(1)}),
    "a model that is a list": (MODEL, [torch.ones(1)]),
    "an optimizer of integer keys": (OPTIM, {1: 2}),
    "groups that are a number": (OPTIM, {"state": {}, "param_groups": 5}),
    "no groups": (OPTIM, {"base_state": {}}),
    "groups of numbers": (OPTIM, {"base_state": {}, "param_groups": [5]}),
    "params that are a number": (OPTIM, {"base_state": {}, "param_groups": [{"params": 5}]}),
    "params of lists": (OPTIM, {"base_state": {}, "param_groups": [{"params": [[]]}]}),
    "a state that is a list": (OPTIM, {"base_state": [1], "param_groups": []}),
    "a state of numbers": (OPTIM, {"base_state": {0: 5}, "param_groups": []}),
    "a state of pairs": (OPTIM, {"base_state": {(0, 1): {}}, "param_groups": []}),
    "a shape that is a number": (OPTIM, {"base_state": {}, "param_groups": [], "shape_info": {0: 5}}),
    "a huge shape": (OPTIM, {"base_state": {}, "param_groups": [], "shape_info": {0: [0, 2**70]}}),
    "masters that are a number": (OPTIM, {"base_state": {}, "param_groups": [], "sharded_master_weights": 5}),
}


@pytest.mark.parametrize(("file", "state"), STATES.values(), ids=STATES.keys())
def test_a_state_of_another_structure_is_malformed(foreign: Path, file: str, state: Any) -> None:
    torch.save(state, foreign / "step_3" / file)
    loaded: dict[str, Any] = {"model": {}, "optimizer": {}}
    with pytest.raises(MalformedFile, match=file):
        load_checkpoint(foreign, **loaded, topology=Topology(dp=2))
    assert {"model": {}, "optimizer": {}} == loaded


@pytest.mark.parametrize("state", [b"", b"}b", b"}X\x03\x00\x00\x00tidK\x01\x85sb", b"Nb"])
def test_a_reference_needs_its_number(golden: Path, tmp_path: Path, state: bytes) -> None:
    directory = tmp_path / "ckpt"
    shutil.copytree(golden / "b_dp2_zero1_xser" / "ckpt", directory)
    named = b"ctorch_xla.utils.serialization\nTensorReference\n)\x81"
    pickled = b"\x80\x02}X\x01\x00\x00\x00w" + named + state + b"s."
    (directory / "step_3" / MODEL).write_bytes(torch_file(pickled))
    with pytest.raises(MalformedFile, match="tid"):
        load_checkpoint(directory, model={}, topology=Topology(dp=2))


INFO: dict[str, Any] = {
    "a list": [1],
    "numbers": {0: 5},
    "a dtype that is none": {0: {"dtype": "float32", "shape": [1]}},
    "a shape that is a number": {0: {"dtype": torch.float32, "shape": 5}},
    "a huge shape": {0: {"dtype": torch.float32, "shape": [2**70]}},
}


@pytest.mark.parametrize("info", INFO.values(), ids=INFO.keys())
def test_an_info_file_of_another_structure_is_malformed(golden: Path, tmp_path: Path, info: Any) -> None:
    shutil.copytree(golden / "b_dp2_zero1_xser" / "ckpt", tmp_path / "ckpt")
    torch.save(info, tmp_path / "ckpt" / "step_3" / f"{MODEL}.info.pt")
    with pytest.raises(MalformedFile, match=r"info\.pt"):
        load_checkpoint(tmp_path / "ckpt", model={}, topology=Topology(dp=2))


def test_a_scheduler_that_is_none_is_told(foreign: Path) -> None:
    """A file of another part in its place is named with what it holds."""
    tag = foreign / "step_3"
    for file, what in ((OPTIM, "an optimizer"), (MODEL, "a model")):
        shutil.copy(tag / file, tag / "scheduler.pt")
        with pytest.raises(MalformedFile, match=rf"scheduler\.pt holds the state of {what}, not of a scheduler"):
            load_checkpoint(foreign, scheduler={}, topology=Topology(dp=2))


def test_user_content_that_is_none_is_told(foreign: Path) -> None:
    """The model's or an optimizer's file in its place; with trust it is what the user says it is."""
    tag = foreign / "step_3"
    for file, what in ((OPTIM, "an optimizer"), (MODEL, "the model")):
        shutil.copy(tag / file, tag / "user_content.pt")
        with pytest.raises(MalformedFile, match=rf"user_content\.pt holds the state of {what}.*trust_pickle=True"):
            load_checkpoint(foreign, topology=Topology(dp=2))
    content = load_checkpoint(foreign, topology=Topology(dp=2), trust_pickle=True)
    assert torch.load(tag / MODEL).keys() == content.keys()


def test_a_tag_with_such_a_name_is_opened_or_refused(foreign: Path) -> None:
    lying = "dp_rank_00_tp_rank_30000000_pp_rank_30000000.pt"
    shutil.copy(foreign / "step_3" / MODEL, foreign / "step_3" / "model" / lying)
    tag = open_tag(LocalStorage(foreign), "step_3")
    with pytest.raises(CheckpointError):
        tag.model_tree(Coordinates(tp_rank=1))


def _place(metadata: Any) -> Any:
    """Where the only chunk lies."""
    [place] = metadata.storage_data.values()
    return place


DCP: dict[str, Callable[[Any], object]] = {
    "offsets beyond all tensors": lambda m: m.state_dict_metadata["model.a"].chunks.__setitem__(
        0, type(m.state_dict_metadata["model.a"].chunks[0])((2**70,), torch.Size([6]))
    ),
    "sizes beyond all tensors": lambda m: setattr(m.state_dict_metadata["model.a"], "size", (2**70,)),
    "a size of text": lambda m: setattr(m.state_dict_metadata["model.a"], "size", "six"),
    "no chunks": lambda m: setattr(m.state_dict_metadata["model.a"], "chunks", 5),
    "a dtype of text": lambda m: setattr(m.state_dict_metadata["model.a"], "properties", "x"),
    "a place beyond all files": lambda m: setattr(_place(m), "offset", 2**70),
    "a place that is text": lambda m: setattr(_place(m), "length", "x"),
    "a file that is a number": lambda m: setattr(_place(m), "relative_path", 5),
    "deep keys": lambda m: m.planner_data.__setitem__("model.a", ("x",) * 10_000),
    "keys of lists": lambda m: m.planner_data.__setitem__("model.a", ([],)),
    "a key that takes long to hash": lambda m: m.planner_data.__setitem__(
        "model.a", ("model", reduce(lambda key, _: (key, key), range(20), cast("Any", ())))
    ),
    "names that are numbers": lambda m: m.state_dict_metadata.__setitem__(5, 5),
    "no data": lambda m: setattr(m, "storage_data", None),
    "a list": lambda m: setattr(m, "state_dict_metadata", [1]),
}


@pytest.mark.parametrize("change", DCP.values(), ids=DCP.keys())
@pytest.mark.filterwarnings("ignore")
def test_metadata_of_torch_dcp_that_lies_is_malformed(tmp_path: Path, change: Callable[[Any], object]) -> None:
    state = {"model": {"a": torch.arange(6.0)}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp")  # type: ignore[attr-defined]
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(MalformedFile, match=r"dcp/\.metadata"):
        convert(tmp_path / "dcp", tmp_path / "tag", to="tag")
    assert not (tmp_path / "tag").exists()


@pytest.mark.parametrize("document", [5, [], None, "x", {"format_version": 1, "name": "a", "rules": [5]}])
def test_a_mapping_that_is_none_is_refused(tmp_path: Path, document: Any) -> None:
    """As a file, and but for a name's text as an argument."""
    path = tmp_path / "mapping.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidArgument, match=r"mapping\.json"):
        find_mapping(path, {})
    with pytest.raises(InvalidArgument):
        find_mapping(document, {})
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidArgument, match="not JSON"):
        find_mapping(path, {})


CONFIGS: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**9},
    "heads": {"num_attention_heads": 10**9, "num_key_value_heads": 10**9, "head_dim": 1},
    "text": {"num_hidden_layers": "two"},
    "a list": {"num_hidden_layers": [1]},
}


@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_config_of_huge_counts_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Names of 10**9 layers are not made up to see which of them are missing."""
    model = Model(layers=1, heads=2)
    write_files(tmp_path / "hf", model.config | change, model.state())
    with pytest.raises(CheckpointError, match=r"config\.json|key-value heads"):
        convert(tmp_path / "hf", tmp_path / "tag", to="tag", names="nxd", tp=1)
