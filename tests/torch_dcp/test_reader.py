"""torch.distributed.checkpoint.load reads tags: any box of any tensor, any placement, values, and what it cannot."""

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from nxd_ckpt import convert, open_checkpoint, save_checkpoint
from nxd_ckpt.errors import DigestMismatch
from nxd_ckpt.torch_dcp.storage_reader import StorageReader
from tests.bad_input.live import jobs
from tests.cli.checkpoints import CONTENT, CUTS, save_examples, whole
from tests.conversion.tags import unsharded
from tests.golden.checkpoints import saved
from tests.support.rank_pool import RankPool
from tests.torch_dcp import ranks


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples")
    save_examples(directory)
    return directory


class Targets:
    """As much of a planner as reading asks for: what is read for each item goes to the tensor of its number."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors, self.committed = tensors, list[int]()

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.tensors[item.dest_index.index or 0]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(item.dest_index.index or 0)


@st.composite
def wanted(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]], torch.dtype, bool]:
    """A tensor's name, (offset, length) of a box of it by dimension, and the dtype and layout to read it into."""
    name = draw(st.sampled_from(ranks.NAMES))
    box = []
    for size in whole(name).shape:
        offset = draw(st.integers(0, size - 1))
        box.append((offset, draw(st.integers(1, size - offset))))
    return name, box, draw(st.sampled_from((torch.float32, torch.float64))), draw(st.booleans())


@given(st.lists(wanted(), min_size=1, max_size=8))
def test_any_boxes_equal_those_of_the_whole_tensors(examples: Path, boxes: list[Any]) -> None:
    """Whatever ranks cut, and whether the target lies as the values do or transposed, or is of another dtype."""
    items, targets, expected = [], [], []
    for number, (name, box, dtype, transposed) in enumerate(boxes):
        offsets, lengths = (torch.Size(numbers) for numbers in zip(*box, strict=True))
        target = torch.full(tuple(reversed(lengths)) if transposed else lengths, -1, dtype=dtype)
        targets.append(target.permute(*reversed(range(target.dim()))) if transposed else target)
        index, zeros = MetadataIndex(f"model.{name}"), torch.Size([0] * len(box))
        items.append(
            ReadItem(LoadItemType.TENSOR, MetadataIndex(f"model.{name}", zeros, number), zeros, index, offsets, lengths)
        )
        expected.append(whole(name)[tuple(slice(start, start + length) for start, length in box)].to(dtype))
    planner: Any = Targets(targets)
    StorageReader(examples / "cut").read_data(LoadPlan(items), planner).wait()
    assert all(torch.equal(*pair) for pair in zip(expected, targets, strict=True))
    assert list(range(len(boxes))) == sorted(planner.committed)


def test_two_ranks_load_every_placement_and_resume_under_fsdp2(examples: Path, pair: RankPool) -> None:
    """Even and uneven DTensors; FSDP2 resumes what was saved, of plain and ZeRO-1 tags, and trains on alike."""
    [job] = jobs()
    before = ranks.picture(job.model, job.optimizer)
    ranks.training(job.model, job.optimizer)
    expected = {"before": before, "after": ranks.picture(job.model, job.optimizer)}
    assert [[], []] == pair.run(ranks.placements, examples)
    for flat in (False, True):
        assert [expected] * 2 == pair.run(ranks.fsdp2, examples, "z_plain", flat)
    first, second = pair.run(ranks.fsdp2, examples, "zero1", False)
    assert first == second
    checkpoint = open_checkpoint(examples, "zero1")
    states = unsharded([checkpoint.optimizer_state(rank) for rank in range(2)])
    held = ranks.gathered(list(states["base_state"].values()))
    state = first["before"]["optim"]["state"]
    assert held == [state[name] for name in ("up.weight", "up.bias", "down.weight")]


def test_plain_tensors_and_values_load_in_one_process(examples: Path) -> None:
    """Python numbers, scheduler and user content go where the state dict has their names; unasked names are left."""
    [job] = jobs()
    state: dict[str, Any] = {
        "model": {"up.bias": torch.zeros(4)},
        "optim": {"param_groups": [{"lr": 9.0, "params": []}]},
        "scheduler": {"last_epoch": -1},
        "user_content": {"steps": 0, "seen": torch.zeros(3, dtype=torch.int64), "args": {"deep": {"er": {}}}},
    }
    load(state, storage_reader=StorageReader(examples / "z_plain"))
    assert torch.equal(job.model.up.bias, state["model"]["up.bias"])
    assert {"lr": job.optimizer.param_groups[0]["lr"], "params": ["up.weight", "up.bias", "down.weight"]} == {
        key: state["optim"]["param_groups"][0][key] for key in ("lr", "params")
    }
    assert job.scheduler.last_epoch == state["scheduler"]["last_epoch"]
    assert CONTENT["steps"] == state["user_content"]["steps"]
    assert [0, 1, 2] == state["user_content"]["seen"].tolist()


def test_state_dicts_may_have_other_keys_and_one_reader_another_tag(examples: Path) -> None:
    """The model as the state dict itself, and ``checkpoint_id=`` in place of the reader's own."""
    reader = StorageReader(examples / "z_plain", model_key="")
    state = {"norm": torch.zeros(3)}
    load(state, checkpoint_id=examples / "cut", storage_reader=reader)
    assert torch.equal(whole("norm"), state["norm"])
    assert str(examples / "cut") == reader.checkpoint_id


def test_a_file_of_a_script_and_whole_files_are_read(tmp_path: Path) -> None:
    """Whatever a path names, as a load does: not tags and directories of torch DCP alone."""
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"model": {"weight": weight}, "epoch": 3}, tmp_path / "last.pt")
    save_checkpoint(tmp_path, "step_1", {"weight": weight})
    convert(tmp_path / "step_1", tmp_path / "whole", to="files", use_safetensors=True)
    for name in ("last.pt", "whole"):
        state = {"model": {"weight": torch.zeros(2, 3)}}
        load(state, storage_reader=StorageReader(tmp_path / name))
        assert torch.equal(weight, state["model"]["weight"])


def test_changed_bytes_are_refused(tmp_path: Path) -> None:
    """What is read is verified, and the error names the tensor."""
    save_examples(tmp_path)
    [file] = (tmp_path / "z_plain" / "model").glob("*.pt")
    data = bytearray(file.read_bytes())
    at = data.index(jobs()[0].model.up.weight.detach().numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointException) as raised:
        load({"model": {"up.weight": torch.zeros(4, 3)}}, storage_reader=StorageReader(tmp_path / "z_plain"))
    [(error, _)] = raised.value.failures.values()
    assert isinstance(error, DigestMismatch)
    assert "up.weight" in str(error)


def test_what_is_not_known_is_left_out_and_said(examples: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor whose cut nobody recorded is in no metadata, and a warning names it with what would help."""
    with caplog.at_level(logging.WARNING, "nxd_ckpt"):
        metadata = StorageReader(examples / "cut").read_metadata()
    assert {f"model.{name}" for name in CUTS if name != "lost"} == set(metadata.state_dict_metadata)
    assert "partitions=" in caplog.text
    assert "model/lost" in caplog.text


def test_nxds_own_tags_load_with_the_names_that_they_lack(golden: Path) -> None:
    """Its optimizer's entries have no names: with them they load, and without them they are called "#0"."""
    alone = saved(golden, "a_dp2_zero1_pt")
    held = alone.held("step_3", 0)["model"]
    reader = StorageReader(alone.directory / "step_3")
    listed = [name for name in reader.read_metadata().state_dict_metadata if name.startswith("optim.state.#")]
    assert "optim.state.#0.exp_avg" in listed
    state = {"model": {name: torch.zeros_like(held[name]) for name in held}}
    load(state, storage_reader=reader)
    assert all(torch.equal(held[name], state["model"][name]) for name in held)
    with pytest.raises(CheckpointException, match="but 1 names were passed"):
        load(state, storage_reader=StorageReader(alone.directory / "step_3", saved_param_names=[[["one"]]]))


def test_flattened_param_groups_are_found_when_they_are_asked_for(examples: Path) -> None:
    """The form of the optimizer is the state dict's; who asks for everything gets one form. Metadata can be sent."""
    [job] = jobs()
    lr = job.optimizer.param_groups[0]["lr"]
    state: dict[str, Any] = {"optim": {"state.up.bias.step": torch.zeros(()), "param_groups.up.bias.lr": 9.0}}
    load(state, storage_reader=StorageReader(examples / "z_plain"))
    expected = {"state.up.bias.step": 1.0, "param_groups.up.bias.lr": lr}
    assert expected == {key: float(value) for key, value in state["optim"].items()}

    entries = StorageReader(examples / "z_plain").read_metadata().state_dict_metadata
    assert "optim.param_groups.up.bias.lr" in entries
    assert "optim.param_groups.up.bias.nothing" not in entries
    assert "optim.param_groups.0.lr" in list(entries)
    assert "optim.param_groups.up.bias.lr" not in list(entries)
    assert list(entries) == list(pickle.loads(pickle.dumps(entries)))
