"""Tags from and to torch DCP directories: read by the real torch, both ways bit for bit, and what is refused."""

import pickle
import shutil
import uuid
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nxd_ckpt import Partition, convert, diff_checkpoints, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.conversion import to_dcp as conversion
from nxd_ckpt.errors import DigestMismatch, InvalidArgument, KeyMismatch, MalformedFile, PartNotFound, UnsafePickle
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.torch_dcp.storage_reader import StorageReader
from tests.bad_input.live import Net, jobs
from tests.cli.checkpoints import CONTENT, save_examples, whole
from tests.conversion.tags import contents, save_example
from tests.golden.checkpoints import saved
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference
from tests.torch_dcp import ranks


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples")
    save_examples(directory)
    return directory


@pytest.mark.parametrize("large", [None, 64])
def test_torch_resumes_what_a_zero1_tag_became(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int | None
) -> None:
    """Its own FileSystemReader reads the directory; model, moments, steps and options are those of the tag.

    They are together in one file; beyond ``large`` bytes in several, and each large tensor alone.
    """
    if large is not None:
        monkeypatch.setattr(conversion, "_LARGE", large)
    convert(examples / "z_plain", tmp_path / "dcp", to="dcp")
    entries = FileSystemReader(tmp_path / "dcp").read_metadata()
    places: dict[str, list[int]] = {}
    for index, place in entries.storage_data.items():
        tensor = entries.state_dict_metadata[index.fqn]
        nbytes = 0 if not isinstance(tensor, TensorStorageMetadata) else tensor.size.numel() * 4
        places.setdefault(place.relative_path, []).append(nbytes)
    limit = large or 2**25
    assert all(len(held) == 1 for held in places.values() if max(held) >= limit)
    assert (large is None) == (len(places) == 1)
    assert max(map(len, places.values())) > 1
    [job] = jobs()
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=9.0)
    ranks.resume(FileSystemReader(tmp_path / "dcp"), model, optimizer)
    assert ranks.picture(job.model, job.optimizer) == ranks.picture(model, optimizer)
    state: dict[str, Any] = {"user_content": {"steps": 0}, "scheduler": {"last_epoch": 0}}
    load(state, checkpoint_id=tmp_path / "dcp")
    assert CONTENT["steps"] == state["user_content"]["steps"]
    assert job.scheduler.last_epoch == state["scheduler"]["last_epoch"]


@pytest.mark.parametrize("flat", [False, True])
def test_there_and_back_is_the_same_tag(tmp_path: Path, flat: bool) -> None:
    """ZeRO-1 with padding, master weights, two param groups, a parameter without state: every file's content."""
    tag = save_example(tmp_path, 3)
    convert(tag, tmp_path / "dcp", to="dcp", flatten_optimizer_state=flat)
    convert(tmp_path / "dcp", tmp_path / "again" / "step_3", to="tag", dp=3)
    assert () == verify_checkpoint(tmp_path / "again", "step_3").problems
    before, after = (open_checkpoint(directory, "step_3") for directory in (tmp_path, tmp_path / "again"))
    assert ranks.gathered(before.model_state(0)) == ranks.gathered(after.model_state(0))
    for rank in range(3):
        assert ranks.gathered(before.optimizer_state(rank)) == ranks.gathered(after.optimizer_state(rank))
    assert before.user_content() == after.user_content()
    assert before.scheduler_state() == after.scheduler_state()


@st.composite
def cut_up(draw: st.DrawFn) -> dict[str, list[tuple[slice, ...]]]:
    """Chunks that ranks may have saved of each tensor: a grid of any cuts."""
    found = {}
    for name in WHOLES:
        edges = [sorted({0, size, *draw(st.sets(st.integers(1, size), max_size=2))}) for size in whole(name).shape]
        found[name] = list(product(*(map(slice, cuts, cuts[1:]) for cuts in edges)))
    return found


WHOLES = ("column", "row", "norm", "expert")
CUT = {"column": Partition(0), "row": Partition(1), "expert": Partition(1, expert=True)}
STAGES = [["column", "row"], ["norm", "expert"]]


@settings(max_examples=12, deadline=None)
@given(cut_up(), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2)), st.booleans())
def test_any_chunks_become_a_tag_of_any_sizes(
    tmp_path_factory: pytest.TempPathFactory,
    chunks: dict[str, list[tuple[slice, ...]]],
    ep: int,
    tp: int,
    pp: int,
    xser: bool,
) -> None:
    """Each rank holds what the partitions say, and put together again it is the whole."""
    directory = tmp_path_factory.mktemp("sizes")
    write_chunks(directory / "dcp", chunks)
    sizes: dict[str, Any] = {"dp": ep, "tp": tp, "pp": pp, "ep": ep, "stages": STAGES if pp == 2 else None}
    options: dict[str, Any] = {"partitions": CUT, "use_xser": xser, "durable": False}
    convert(directory / "dcp", directory / "tag", to="tag", **sizes, **options)
    held = open_checkpoint(directory, "tag")
    last = {**held.model_state(0), **held.model_state(held.topology.world_size - 1)}
    assert torch.equal(whole("expert").chunk(ep)[-1].chunk(tp, dim=1)[-1], last["expert"])
    for name in WHOLES:
        assert torch.equal(whole(name), held.read(f"model/{name}")), name


def write_chunks(directory: Path, chunks: dict[str, list[tuple[slice, ...]]]) -> None:
    """A DCP directory, each chunk in a file of its own."""
    directory.mkdir()
    entries: dict[str, Any] = {}
    data: dict[MetadataIndex, _StorageInfo] = {}
    for name, boxes in chunks.items():
        forms = []
        for box in boxes:
            part = whole(name)[box].clone()
            file = f"__{len(data)}_0.distcp"
            torch.save(part, directory / file)
            offsets = torch.Size([edge.start for edge in box])
            data[MetadataIndex(f"model.{name}", offsets)] = _StorageInfo(file, 0, (directory / file).stat().st_size)
            forms.append(ChunkStorageMetadata(offsets, part.shape))
        entries[f"model.{name}"] = TensorStorageMetadata(TensorProperties(), whole(name).shape, forms)
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=data)))


def save_whole(directory: Path, state: dict[str, Any]) -> None:
    save(state, checkpoint_id=directory, no_dist=True)


def test_what_two_ranks_saved_under_fsdp2_becomes_a_tag(tmp_path: Path, pair: RankPool) -> None:
    """Chunks of DTensors, even and uneven, of model and optimizer; and torch's ranks resume what becomes of it."""
    [expected, _] = pair.run(ranks.save_fsdp2, tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "tag", to="tag", dp=2, tp=1, optimizer_form="zero1")
    assert () == verify_checkpoint(tmp_path, "tag").problems
    found = pair.run(ranks.fsdp2, tmp_path, "tag", False)
    assert [expected] * 2 == [one["before"] for one in found]
    assert {"note": "hi", "steps": 5} == open_checkpoint(tmp_path, "tag").user_content()


def test_the_command_does_both_with_large_tensors(tmp_path: Path) -> None:
    """Cut over two ranks and as plain files again, of several waves; keys and partitions from the command line."""
    drawn = torch.Generator().manual_seed(5)
    large = {f"part{n}": torch.rand((3, 700_001), generator=drawn).bfloat16() for n in range(3)}
    save_whole(tmp_path / "dcp", {"net": {**large, "wide": torch.rand((4, 6_000_000), generator=drawn)}})
    (tmp_path / "cuts").write_text('{"wide": {"partition_dim": 1}}')
    keys = ["--model-key", "net", "--quiet"]
    cuts = ["--tp", "2", "--partitions", str(tmp_path / "cuts")]
    assert 0 == main(["convert", "--to", "tag", str(tmp_path / "dcp"), str(tmp_path / "tag"), *cuts, *keys])
    assert (4, 3_000_000) == open_checkpoint(tmp_path, "tag").model_state(1)["wide"].shape
    assert 0 == main(["convert", "--to", "dcp", str(tmp_path / "tag"), str(tmp_path / "again"), *keys])
    states = [{"net": {name: torch.zeros_like(tensor) for name, tensor in large.items()}} for _ in range(2)]
    for state, directory in zip(states, ("dcp", "again"), strict=True):
        state["net"]["wide"] = torch.zeros(4, 6_000_000)
        load(state, checkpoint_id=tmp_path / directory)
    assert all(torch.equal(states[0]["net"][name], states[1]["net"][name]) for name in (*large, "wide"))


def test_nxds_tags_go_through_a_store_with_the_names_that_they_need(
    golden: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps that are Python numbers become tensors; without names of the optimizer's entries a warning says so."""
    store = f"memory://{uuid.uuid4().hex}"
    named, unnamed = saved(golden, "l_dp2_zero1_dcp_async"), saved(golden, "a_dp2_zero1_pt")
    convert(named.directory / "step_3", f"{store}/dcp/step_3", to="dcp")
    assert "" == caplog.text
    convert(f"{store}/dcp/step_3", f"{store}/tags/step_3", to="tag", dp=3)
    states = [
        {"optim": {"state": {"embed.weight": {"step": torch.zeros(()), "exp_avg": torch.zeros(20, 10)}}}} for _ in "ab"
    ]
    for state, tag in zip(states, (str(named.directory / "step_3"), f"{store}/tags/step_3"), strict=True):
        load(state, storage_reader=StorageReader(tag))
    assert ranks.gathered(states[0]) == ranks.gathered(states[1])
    assert 3.0 == states[0]["optim"]["state"]["embed.weight"]["step"].item()
    convert(unnamed.directory / "step_3", f"{store}/dcp/unnamed", to="dcp")
    assert "saved_param_names=" in caplog.text
    with pytest.raises(InvalidArgument, match="overwrite=True"):
        convert(named.directory / "step_3", f"{store}/dcp/step_3", to="dcp")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"model_key": "optim"}, InvalidArgument, "must differ"),
        ({"model_key": "net", "optim_key": "opt"}, PartNotFound, "neither model nor optimizer to"),
        ({"optimizer_form": "lion"}, InvalidArgument, "plain or None, found 'lion'"),
        ({"partitions": {"absent": Partition(0)}}, InvalidArgument, "names 'absent'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    save_whole(tmp_path / "dcp", {"model": {"a": torch.ones(2)}})
    with pytest.raises(error, match=match):
        convert(tmp_path / "dcp", tmp_path / "tag", to="tag", **options)
    assert not (tmp_path / "tag").exists()


def test_hostile_and_damaged_directories_are_refused(tmp_path: Path) -> None:
    """Nothing of them runs, what is wrong is named, and no tag appears."""
    good = tmp_path / "good"
    save_whole(good, {"model": {"a": torch.arange(6.0)}, "optim": {"state": {}}})

    def broken(name: str) -> Path:
        shutil.copytree(good, tmp_path / name)
        return tmp_path / name

    def refused(directory: Path, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            convert(directory, tmp_path / "tag", to="tag")
        assert not (tmp_path / "tag").exists()

    foreign = broken("foreign")
    (foreign / ".metadata").write_bytes(pickle.dumps(shutil.rmtree))
    refused(foreign, UnsafePickle, "shutil.rmtree")
    flipped = broken("flipped")
    [file] = flipped.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data.replace(torch.arange(6.0).numpy().tobytes(), torch.arange(1, 7.0).numpy().tobytes()))
    refused(flipped, DigestMismatch, "model/a")
    partial = broken("partial")
    metadata = pickle.loads((good / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.a"].size = torch.Size([7])
    (partial / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(partial, MalformedFile, "the chunks of model.a must cover its shape")
    at = MetadataIndex("model.a", torch.Size([0]))
    changed = {"state_dict_metadata": "does not describe, model.a", "storage_data": "names no file that holds"}
    for field, match in changed.items():
        metadata = pickle.loads((good / ".metadata").read_bytes())
        held = getattr(metadata, field)
        del held[at if at in held else "model.a"]
        (partial / ".metadata").write_bytes(pickle.dumps(metadata))
        refused(partial, MalformedFile, match)
    for path in list[Any](([], 5, ("model", ["a"]))):
        metadata = pickle.loads((good / ".metadata").read_bytes())
        metadata.planner_data["model.a"] = path
        (partial / ".metadata").write_bytes(pickle.dumps(metadata))
        refused(partial, MalformedFile, "expected the keys that lead to an entry")
    elsewhere = broken("elsewhere")
    metadata = pickle.loads((good / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex("model.a", torch.Size([0]))]
    metadata.storage_data[MetadataIndex("model.a", torch.Size([0]))] = type(info)("../good/x.distcp", 0, 10)
    (elsewhere / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(elsewhere, MalformedFile, "../good/x.distcp")


def test_everything_beside_tensors_goes_there_and_back(tmp_path: Path) -> None:
    """Extra state with tensors in it, options that are tensors, lists of tensors, numbers for keys, what holds itself;
    and by torch, from the directory or the tag, under its own names."""
    extra = {"amax": [torch.ones(2), torch.zeros(())], "count": 3, 4: torch.ones(1)}
    names = ["norm/scale", "w"]
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in names]
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False)
    sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    endless: list[Any] = [1]
    endless.append(endless)
    by = {7: 1, (1, "x"): 2, None: 3, b"k": 4, frozenset({1}): 5, 1j: 6}
    content = {"rng": [torch.ones(2), torch.zeros(2)], "counts": {0: "a", 1: "b"}, "by": by, "endless": endless}
    model = {**dict(zip(names, parameters, strict=True)), "w._extra_state": extra}
    save_checkpoint(tmp_path, "a", model, optimizer, user_content=content, param_names=[names])
    before = open_checkpoint(tmp_path, "a")
    for flat in (False, True):
        dcp, again = tmp_path / f"dcp-{flat}", tmp_path / f"tag-{flat}"
        convert(tmp_path / "a", dcp, to="dcp", flatten_optimizer_state=flat)
        convert(dcp, again / "a", to="tag", optimizer_form="plain")
        after = open_checkpoint(again, "a")
        assert not diff_checkpoints(before, after, full=True)
        for place in (dcp, again):
            assert difference(content["rng"], load_checkpoint(place, model={})["rng"]) is None
        found = after.model_state()["w._extra_state"]
        assert difference(extra, {key: found[key] for key in extra}) is None
        assert len(before.param_groups) == len(after.param_groups) == 1
        assert ["a", "b"] == [after.user_content()["counts"][key] for key in (0, 1)]
        assert by == after.user_content()["by"]
    for reader in (FileSystemReader(tmp_path / "dcp-False"), StorageReader(tmp_path / "a")):
        state: dict[str, Any] = {
            "model": {
                "norm/scale": torch.zeros(3),
                "w._extra_state": {"amax": [torch.zeros(2), torch.ones(())], "count": 0},
            },
            "optim": {"param_groups": [{"lr": torch.zeros(())}]},
            "user_content": {"rng": [torch.zeros(2), torch.ones(2)]},
        }
        load(state, storage_reader=reader)
        loaded = state["model"]["w._extra_state"]
        assert (3, [1.0, 1.0]) == (loaded["count"], loaded["amax"][0].tolist())
        assert torch.tensor(0.1) == state["optim"]["param_groups"][0]["lr"]
        assert torch.equal(parameters[0], state["model"]["norm/scale"])
        assert [[1.0, 1.0], [0.0, 0.0]] == [tensor.tolist() for tensor in state["user_content"]["rng"]]


def test_factors_of_an_optimizer_that_was_saved_by_numbers(tmp_path: Path) -> None:
    """Adafactor's state of a parameter has rows and columns of it: the parameter's shape spans both."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.5)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    save_whole(tmp_path / "dcp", {"model": model.state_dict(), "optim": optimizer.state_dict()})
    again = torch.optim.Adafactor(model.parameters(), lr=0.1)
    load_checkpoint(tmp_path / "dcp", model=model, optimizer=again)
    assert difference(optimizer.state_dict(), again.state_dict()) is None


@pytest.mark.parametrize("flat", [False, True])
def test_dicts_and_lists_in_an_optimizers_state_go_there_and_back(tmp_path: Path, flat: bool) -> None:
    """DCP's names do not tell where a parameter's name ends, nor which numbers are places in a list."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        inner = {"left": torch.ones(2) * number, "a.b": [torch.ones(1), {"x": torch.ones(3)}]}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "last": [torch.ones(2), 3.0], "blocks": inner}
    save_checkpoint(tmp_path, "a", model, optimizer)
    convert(tmp_path / "a", tmp_path / "dcp", to="dcp", flatten_optimizer_state=flat)
    convert(tmp_path / "dcp", tmp_path / "again/a", to="tag", optimizer_form="plain")
    assert not diff_checkpoints(open_checkpoint(tmp_path, "a"), open_checkpoint(tmp_path / "again", "a"), full=True)
    loaded = torch.optim.SGD(model.parameters(), lr=0.2)
    load_checkpoint(tmp_path / "dcp", model=model, optimizer=loaded)
    assert difference(optimizer.state_dict(), loaded.state_dict()) is None


def test_names_that_torch_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    """Joined by dots, two keys of the user content would be one: none is lost silently."""
    save_checkpoint(tmp_path, "a", {"x": torch.ones(1)}, user_content={"a.b": 1, "a": {"b": 2}})
    with pytest.raises(KeyMismatch, match="joins keys by dots"):
        convert(tmp_path / "a", tmp_path / "dcp", to="dcp")
    assert not (tmp_path / "dcp").exists()


def test_an_output_appears_whole_or_not_at_all(examples: Path, tmp_path: Path) -> None:
    """A damaged tag leaves nothing; what is there stays unless told otherwise, and a foreign directory always."""
    shutil.copytree(examples / "z_plain", tmp_path / "damaged")
    [file] = (tmp_path / "damaged" / "model").glob("*.pt")
    data = bytearray(file.read_bytes())
    data[data.index(jobs()[0].model.up.weight.detach().numpy().tobytes())] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(DigestMismatch):
        convert(tmp_path / "damaged", tmp_path / "out", to="dcp")
    assert ["damaged"] == sorted(path.name for path in tmp_path.iterdir())
    convert(examples / "z_plain", tmp_path / "out", to="dcp")
    held = contents(tmp_path / "out")
    with pytest.raises(InvalidArgument, match="overwrite=True"):
        convert(examples / "z_plain", tmp_path / "out", to="dcp")
    convert(examples / "z_plain", tmp_path / "out", to="dcp", overwrite=True)
    assert held.keys() == contents(tmp_path / "out").keys()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(InvalidArgument, match="mine"):
        convert(examples / "z_plain", tmp_path / "out", to="dcp", overwrite=True)


def test_containers_of_a_modules_extra_state_stay_what_they_are(tmp_path: Path) -> None:
    """There and back: tuples of values, and lists with tensors in any place. A tuple with a tensor is a list in DCP."""
    one, two = torch.ones(1), torch.ones(2)
    extra = {"t": (1, (2, "a")), "l": [1, (2,)], "first": [one, (1, 2)], "last": [1, two], "d": {"x": (3,), "y": one}}
    save_checkpoint(tmp_path / "run", "a", {"weight": torch.ones(2), "_extra_state": extra})
    convert(tmp_path / "run" / "a", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "back" / "a", to="tag")
    for place in ("dcp", "back/a"):
        assert difference(extra, open_checkpoint(tmp_path / place).model_state()["_extra_state"]) is None
