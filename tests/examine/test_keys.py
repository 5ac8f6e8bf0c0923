"""Looking into a tag without a process group: names, metadata, tensors and boxes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt import (
    Checkpoint,
    Partition,
    Topology,
    convert,
    diff_checkpoints,
    get_checkpoint_metadata,
    load_keys,
    open_checkpoint,
    save_checkpoint,
    unshard_checkpoint,
)
from nxd_ckpt.core.box import Box
from nxd_ckpt.errors import (
    IncompatibleState,
    InvalidArgument,
    KeyMismatch,
    OptimizerMismatch,
    TopologyMismatch,
)
from tests.cli.checkpoints import CUTS, GLOBAL, save_examples, whole
from tests.golden.checkpoints import CONFIGURATIONS, saved
from tests.interop.saving import save_as_every_rank
from tests.tag.equality import difference

KNOWN = sorted(CUTS.keys() - {"lost"})


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("looking")
    save_examples(directory)
    return directory


@pytest.fixture(scope="module")
def cut(examples: Path) -> Checkpoint:
    return open_checkpoint(examples, "cut")


def test_metadata_tells_of_every_tensor_and_reads_none(examples: Path, cut: Checkpoint) -> None:
    """Names in the tag's order, whole shapes, bytes, and partitions as they were saved."""
    assert [f"model/{name}" for name in CUTS] == cut.keys() == list(cut.metadata)
    for name in KNOWN:
        told = cut.metadata[f"model/{name}"]
        assert (GLOBAL[name], "float32", CUTS[name][0]) == (told.shape, told.dtype, told.partition), name
        assert whole(name).nbytes == told.nbytes, name
    assert (None, None) == (cut.metadata["model/lost"].shape, cut.metadata["model/lost"].nbytes)
    assert cut.metadata == get_checkpoint_metadata(examples, "cut")
    assert ["model/row", "model/norm"] == sorted(cut.keys("*/row", "model/n*"), reverse=True)


@given(data=st.data(), name=st.sampled_from(KNOWN))
def test_a_box_is_the_slice_of_the_whole_tensor(cut: Checkpoint, data: st.DataObject, name: str) -> None:
    """Of every cut, whatever ranks it runs over: slices as Python means them, or a Box."""
    expected = whole(name)
    ends = st.one_of(st.none(), st.integers(-18, 18))
    slices = tuple(slice(data.draw(ends), data.draw(ends)) for _ in range(data.draw(st.integers(0, expected.dim()))))
    assert torch.equal(expected[slices], cut.read(f"model/{name}", slices))
    starts = [data.draw(st.integers(0, size)) for size in expected.shape]
    sizes = [data.draw(st.integers(0, size - start)) for start, size in zip(starts, expected.shape, strict=True)]
    inside = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    assert torch.equal(expected[inside], cut.read(f"model/{name}", Box(tuple(starts), tuple(sizes))))


def test_what_is_no_box_of_the_tensor_is_refused(cut: Checkpoint) -> None:
    """Steps, too many slices, boxes that reach beyond it; and an unknown name, with the one that is meant."""
    for wrong in [slice(0, 4, 2), (slice(1), slice(1), slice(1)), Box((0, 0), (9, 3)), Box((0,), (1,)), 3]:
        with pytest.raises(InvalidArgument):
            cut.read("model/column", wrong)  # type: ignore[arg-type]
    with pytest.raises(KeyMismatch, match="did you mean 'model/column'"):
        cut.read("model.colum")
    with pytest.raises(TopologyMismatch, match="lost"):
        cut.read("model/lost")


def test_values_and_param_groups_stand_beside_the_tensors(examples: Path) -> None:
    """What load_keys gives is a tensor where there is one; unknown names are an error before anything is read."""
    checkpoint = open_checkpoint(examples, "zero1")
    [group] = checkpoint.param_groups
    assert ["up.weight", "up.bias", "down.weight"] == group["params"]
    names = ["optim/up.bias/exp_avg", "model/up.weight", "optim/up.bias/exp_avg", *checkpoint.values]
    for name, found in zip(names, load_keys(examples, names, "zero1"), strict=True):
        expected = checkpoint.values[name] if name in checkpoint.values else checkpoint.read(name)
        assert torch.equal(torch.as_tensor(expected), torch.as_tensor(found)), name
    with pytest.raises(KeyMismatch, match=r"did you mean 'model/up\.weight'"):
        load_keys(examples, ["model/up.bias", "model/up.weigth"], "zero1")


def test_load_keys_gives_plain_values_as_a_difference_names_them(tmp_path: Path) -> None:
    """User content, options and the scheduler's state, beside tensors; also from copies of the needed files."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    content = {"epoch": 3, "best": {"losses": [2.0, 1.5]}}
    save_checkpoint(tmp_path / "run", "t", model, optimizer, scheduler, content, durable=False)
    names = ["user_content/best/losses/1", "model/bias", "scheduler/last_epoch", "optim/param_groups/0/lr"]
    copies = {"pre_download": True, "work_dir": tmp_path / "copies"}
    for options in ({}, copies):
        value, bias, epoch, rate = load_keys(tmp_path / "run", names, **options)  # type: ignore[arg-type]
        assert (1.5, 0, 0.5) == (value, epoch, rate)
        assert torch.equal(model.bias, bias)
    files = [path for path in (tmp_path / "copies").rglob("*") if path.is_file() and path.stat().st_size]
    assert ["dp_rank_00_tp_rank_00_pp_rank_00.pt"] == [path.name for path in files]
    with pytest.raises(KeyMismatch, match="did you mean 'user_content/epoch'"):
        load_keys(tmp_path / "run", ["user_content/epochs"])
    with pytest.raises(InvalidArgument, match="pre_download=True"):
        load_keys(tmp_path / "run", names, work_dir=tmp_path)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.one_in(3)
def test_tags_of_nxd_tell_what_they_know(golden: Path, configuration: str) -> None:
    """Told how they are cut and whose the optimizer's entries are, their whole model comes together.

    Moments that its ranks should have alike and have not are refused by name.
    """
    source = saved(golden, configuration)
    tag, sizes = source.tags[-1], source.topologies[0]
    held = [source.held(tag, rank) for rank, at in enumerate(source.topologies) if at.dp_rank < at.ep]
    about = {one["name"]: one for rank in held for one in rank["params"]}
    cuts = {name: _partition(one, sizes.tp) for name, one in about.items()}
    leaders = [source.held(tag, rank) for rank, at in enumerate(source.topologies) if at.dp_rank == at.tp_rank == 0]
    named = [_listed(one, cuts) for one in leaders]
    checkpoint = open_checkpoint(source.directory, tag, partitions=cuts, saved_param_names=named)

    shapes = {name: tuple(tensor.shape) for rank in held for name, tensor in rank["model"].items()}
    for name, shape in shapes.items():
        if configuration.startswith("f_") and not about.get(name, {}).get("requires_grad"):
            continue  # NxD saved neither weights nor master weights of it
        found = checkpoint.read(f"model/{name}")
        assert cuts.get(name, Partition()).global_shape(shape, sizes.ep) == tuple(found.shape), name
        box = tuple(slice(0, (size + 1) // 2) for size in found.shape)
        assert torch.equal(found[box], checkpoint.read(f"model/{name}", box)), name
        moment, copies = f"optim/{name}/exp_avg", [rank["model"][name] for rank in held if name in rank["model"]]
        if moment not in checkpoint.metadata:
            continue
        if cuts[name] == Partition() and not all(torch.equal(copies[0], copy) for copy in copies):
            with pytest.raises(IncompatibleState, match=f"{moment} differed"):
                checkpoint.read(moment)
        else:
            assert found.shape == checkpoint.read(moment).shape
    moments = set(checkpoint.keys("optim/*/exp_avg"))
    assert {f"optim/{name}/exp_avg" for name, one in about.items() if one["requires_grad"]} >= moments
    assert bool(moments) == (checkpoint.parts.optimizer is not None)


def _listed(held: dict[str, Any], cuts: dict[str, Partition]) -> list[list[str]]:
    """The parameters as the optimizer's file numbers them: ZeRO-1 has experts in groups of their own, behind all."""
    groups: list[list[str]] = held["optimizer_param_names"]
    if "ep_param_group_offset" not in held["optimizer"]:
        return groups
    return [[name for name in group if cuts[name].expert is expert] for expert in (False, True) for group in groups]


def _partition(about: dict[str, Any], tp: int) -> Partition:
    expert = bool(about["expert_model_parallel"])
    if not about["tensor_model_parallel"] or tp == 1:
        return Partition(expert=expert)
    return Partition(about["partition_dim"], about["partition_stride"] or 1, tp, expert=expert)


def test_what_an_nxd_tag_does_not_tell_is_asked_for(golden: Path) -> None:
    """Entries of its optimizer have numbers, and errors say which argument is missing."""
    checkpoint = open_checkpoint(saved(golden, "h_tp2_pp2_zero1_xser").directory)
    with pytest.raises(OptimizerMismatch, match="saved_param_names="):
        checkpoint.read("optim/#1.0/exp_avg")
    with pytest.raises(TopologyMismatch, match="partitions="):
        checkpoint.read(next(name for name, told in checkpoint.metadata.items() if told.shape is None))


def test_values_beside_tensors_are_there(tmp_path: Path) -> None:
    """Numbers in extra state and in optimizer entries that hold tensors, too; and the tensors in such."""
    extra = {"amax": [torch.ones(2)], "count": 3, "none": None}
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {"history": [torch.ones(2), 5], "step": 7}
    save_checkpoint(tmp_path, "a", {"w": weight, "w._extra_state": extra}, optimizer, param_names=[["w"]])
    checkpoint = open_checkpoint(tmp_path)
    assert ["model/w", "model/w._extra_state/amax/0", "optim/w/history/0"] == checkpoint.keys()
    assert {
        "model/w._extra_state/count": 3,
        "model/w._extra_state/none": None,
        "optim/w/history/1": 5,
        "optim/w/step": 7,
    } == checkpoint.values
    assert [1.0, 1.0] == checkpoint.read("model/w._extra_state/amax/0").tolist()
    assert [1.0, 1.0] == checkpoint.read("optim/w/history/0").tolist()


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_state_of_other_shapes_than_the_parameters_is_whole_where_no_rank_cut_it(tmp_path: Path, kind: Any) -> None:
    """Factored moments and histories: told, read, compared and unsharded as they were saved."""
    model = torch.nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    save_checkpoint(tmp_path, "a", model, optimizer)
    checkpoint = open_checkpoint(tmp_path)
    entries = {name: told for name, told in checkpoint.metadata.items() if name.startswith("optim/")}
    assert {name: told.local_shape for name, told in entries.items()} == {
        name: tuple(checkpoint.read(name).shape) for name in entries
    }
    assert not diff_checkpoints(checkpoint, checkpoint, full=True)
    unshard_checkpoint(tmp_path / "a", tmp_path / "whole")
    state = torch.load(tmp_path / "whole/optim.pt", weights_only=True)["state"]
    for index, name in enumerate(("weight", "bias")):
        assert difference(optimizer.state_dict()["state"].get(index, {}), state.get(name, {})) is None


def test_a_name_on_two_stages_is_one_tensor_or_an_error(tmp_path: Path) -> None:
    """A tied embedding that came apart is not silently that of the first stage."""
    for tag, last in (("tied", 1.0), ("apart", 2.0)):
        stages = [{"embed": torch.ones(2), "first": torch.ones(1)}, {"embed": torch.tensor([1.0, last])}]
        ranks = [Topology(pp=2, rank=rank) for rank in range(2)]
        save_as_every_rank(tmp_path, tag, ranks, [{"model": one} for one in stages].__getitem__)
    tied, apart = (open_checkpoint(tmp_path, tag) for tag in ("tied", "apart"))
    assert [1.0, 1.0] == tied.read("model/embed").tolist()
    with pytest.raises(TopologyMismatch, match="saved different values under this name"):
        apart.read("model/embed")
    with pytest.raises(TopologyMismatch, match="so it is ambiguous"):
        unshard_checkpoint(tmp_path / "apart", tmp_path / "whole")
    assert ["not compared"] == [found.kind for found in diff_checkpoints(tied, apart).tensors]


def test_state_that_is_no_parameters_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer's own counters: named, compared, unsharded; torch DCP has no names for them, and that is said."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    for tag, count in (("a", 1), ("b", 2)):
        optimizer.state["count"] = count  # type: ignore[index]
        optimizer.state["seen"] = {"mean": torch.full((3,), float(count))}  # type: ignore[index]
        save_checkpoint(tmp_path, tag, {"w": weight}, optimizer, param_names=[["w"]])
    a, b = (open_checkpoint(tmp_path, tag) for tag in ("a", "b"))
    assert (1, [1.0] * 3) == (a.values["optim/state/count"], a.read("optim/state/seen/mean").tolist())
    found = diff_checkpoints(a, b)
    assert ["optim/state/seen/mean"] == [one.name for one in found.tensors]
    assert ["optim/state/count"] == [one.name for one in found.values]
    unshard_checkpoint(tmp_path / "b", tmp_path / "whole")
    state = torch.load(tmp_path / "whole/optim.pt", weights_only=True)["state"]
    assert (2, [2.0] * 3) == (state["count"], state["seen"]["mean"].tolist())
    convert(tmp_path / "a", tmp_path / "dcp", to="dcp")
    assert "left out: count, seen" in caplog.text
