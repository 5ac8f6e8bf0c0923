"""``use_zero1_dcp=True``: a ZeRO-1 optimizer as torch DCP directory, as NxD writes it, padded parameters too."""

import json
import pickle
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from nxd_ckpt import (
    Checkpointer,
    Topology,
    convert,
    copy_checkpoint,
    errors,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.cli.main import main
from nxd_ckpt.core.partition import zero1_rows
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.golden.checkpoints import saved
from tests.interop.saving import save_as_every_rank
from tests.tag.equality import difference

SHAPES = {"embed.weight": (5, 3), "norm": (2,), "up.weight": (8, 2), "frozen": (3,)}
"""Over four ranks: the last one's is short, two hold nothing but padding, none is padded; and one without state."""


def parameters(topology: Topology) -> list[str]:
    """Those of a rank's pipeline stage, by index: of the last stage two."""
    names = list(SHAPES)
    return names if topology.pp == 1 else names[:2] if topology.pp_rank == 0 else names[2:]


def whole(name: str, key: str, topology: Topology) -> torch.Tensor:
    """A state tensor before ZeRO-1, of the rank's tensor-parallel part."""
    seed = list(SHAPES).index(name) * 1000 + ("exp_avg", "exp_avg_sq", "master").index(key) * 100 + topology.tp_rank
    return torch.arange(1.0, torch.Size(SHAPES[name]).numel() + 1).reshape(SHAPES[name]) + seed


def shard(tensor: torch.Tensor, topology: Topology) -> torch.Tensor:
    rows = zero1_rows(len(tensor), topology.dp)
    held = torch.zeros(rows, *tensor.shape[1:])
    own = tensor[topology.dp_rank * rows :][:rows]
    held[: len(own)] = own
    return held


def optimizer(topology: Topology, step: int = 70_000) -> dict[str, Any]:
    """The ZeRO-1 state dict of a rank. Stages have other options, so that each must be given its own."""
    names = parameters(topology)

    def cut(name: str, key: str) -> torch.Tensor:
        return shard(whole(name, key, topology), topology)

    entries = {
        index: {"step": step, "exp_avg": cut(name, "exp_avg"), "exp_avg_sq": cut(name, "exp_avg_sq")}
        for index, name in enumerate(names)
        if name != "frozen"
    }
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.95), "params": [0]},
        {"lr": topology.pp_rank / 2, "betas": (0.5, 0.75), "params": list(range(1, len(names)))},
    ]
    return {
        "state": {},
        "param_groups": groups,
        "base_state": entries,
        "shape_info": {index: torch.Size(SHAPES[name]) for index, name in enumerate(names)},
        "sharded_master_weights": {index: cut(name, "master") for index, name in enumerate(names)},
    }


def ranks_of(**sizes: Any) -> list[Topology]:
    world = Topology(**sizes).world_size
    return [Topology(**sizes, rank=rank) for rank in range(world)]


def save_twice(directory: Path, ranks: list[Topology]) -> None:
    """The second time with a step that takes more bytes, so that what follows it moves: its plan is the first one's."""
    run = uuid.uuid4().hex
    savers = [Checkpointer(directory, topology=at, run_id=run, timeout=600.0) for at in ranks]
    for tag, step in (("first", 7), ("t", 70_000)):
        pending = [
            saver.save(
                tag,
                {"weight": torch.full((2,), float(at.tp_rank))},
                optimizer(at, step),
                param_names=[parameters(at)[:1], parameters(at)[1:]],
                async_save=True,
                use_xser=True,
                use_zero1_dcp=True,
            )
            for at, saver in zip(ranks, savers, strict=True)
        ]
        for one in pending:
            one.wait()
    for saver in savers:
        saver.close()


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 3, "pp": 2}], ids=["dp4", "tp2", "pp2"])
def test_what_is_saved_loads_by_torch_and_by_us(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """By torch's own reader the tensors are whole, by ours they are each rank's again, copied, packed or unpacked."""
    ranks = ranks_of(**sizes)
    save_twice(tmp_path, ranks)

    assert () == verify_checkpoint(tmp_path, "t").problems
    reader = FileSystemReader(tmp_path / "t" / "optim")
    about = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {key: torch.zeros(form.size) for key, form in about.items() if hasattr(form, "size")}
    state |= {"param_groups.0.lr": None, "base_state.up.weight.step": None}
    load(state, storage_reader=reader, no_dist=True)
    expected: dict[str, Any] = {"param_groups.0.lr": 0.1, "base_state.up.weight.step": 70_000}
    for at in ranks:
        suffix = f"|pp-{at.pp_rank:04d}" if at.pp > 1 else f"|tp-{at.tp_rank:04d}" if at.tp > 1 else ""
        for name in parameters(at):
            expected[f"sharded_master_weights.{name}{suffix}"] = whole(name, "master", at)
            if name != "frozen":
                for key in ("exp_avg", "exp_avg_sq"):
                    expected[f"base_state.{name}.{key}{suffix}"] = whole(name, key, at)
    assert None is difference(dict(sorted(expected.items())), dict(sorted(state.items())))

    copy_checkpoint(tmp_path / "t", tmp_path / "copies" / "t")
    convert(tmp_path / "t", tmp_path / "t.tar", to="tar")
    convert(tmp_path / "t", tmp_path / "plain" / "t", to="tag", **sizes)
    for place in (tmp_path, tmp_path / "copies", tmp_path / "t.tar", tmp_path / "plain"):
        for at in ranks:
            loaded: dict[str, Any] = {}
            load_checkpoint(place, "t" if place.suffix == "" else None, optimizer=loaded, topology=at)
            assert None is difference(optimizer(at), loaded), (place, at)
    assert "zero1_dcp" == open_checkpoint(tmp_path / "copies").parts.optimizer
    if "pp" not in sizes:
        for at in ranks_of(**{**sizes, "dp": 3}):
            loaded = {}
            load_checkpoint(tmp_path, "t", optimizer=loaded, topology=at)
            assert None is difference(optimizer(at), loaded), at
    assert None is difference(optimizer(ranks[-1]), open_checkpoint(tmp_path, "t").optimizer_state(len(ranks) - 1))


def test_inspect_shows_where_a_rank_has_its_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With our index or without it: the rows that the rank holds, and no line for what is nothing but padding."""
    save_twice(tmp_path, ranks_of(dp=4))
    shown = []
    for _ in range(2):
        assert 0 == main(["inspect", str(tmp_path), "t", "--rank", "2", "--tensors", "--json"])
        tensors = json.loads(capsys.readouterr().out)["tensors"]
        shown.append({one["name"]: one["shape"] for one in tensors if one["name"].startswith("optim/")})
        (tmp_path / "t" / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "t" / "index", ignore_errors=True)
    keys = ("exp_avg", "exp_avg_sq", "master_weights")
    held = {"embed.weight": [1, 3], "up.weight": [2, 2]}
    expected = {f"optim/{name}/{key}": shape for name, shape in held.items() for key in keys}
    expected["optim/frozen/master_weights"] = [1]
    assert [expected, expected] == shown


def test_the_files_are_those_of_neuronx_distributed(golden: Path, tmp_path: Path) -> None:
    """For the same state: the same entries in the same order, of the same forms, chunks and values, by the same names;
    and without our index and manifest they are read as NxD's."""
    one = saved(golden, "l_dp2_zero1_dcp_async")
    held = [one.held("step_3", rank) for rank in range(2)]
    save_as_every_rank(
        tmp_path,
        "t",
        one.topologies,
        lambda rank: {"optimizer": held[rank]["optimizer"], "param_names": held[rank]["optimizer_param_names"]},
        use_zero1_dcp=True,
    )
    places = (one.directory / "step_3" / "optim", tmp_path / "t" / "optim")
    theirs, ours = (pickle.loads((place / ".metadata").read_bytes()) for place in places)
    assert theirs.state_dict_metadata == ours.state_dict_metadata
    assert list(theirs.planner_data.items()) == list(ours.planner_data.items())
    assert theirs.storage_data.keys() == ours.storage_data.keys()
    for index in theirs.storage_data:
        files = [
            (place / data[index].relative_path).read_bytes()[data[index].offset :][: data[index].length]
            for place, data in zip(places, (theirs.storage_data, ours.storage_data), strict=True)
        ]
        expected, found = (load_bytes(file, tmp_path / "one.pt") for file in files)
        assert None is difference(expected, found, index.fqn)

    (tmp_path / "t" / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "t" / "index")
    for rank, at in enumerate(one.topologies):
        loaded: dict[str, Any] = {}
        load_checkpoint(tmp_path, "t", optimizer=loaded, topology=at)
        assert None is difference(held[rank]["optimizer"], loaded)


def load_bytes(data: bytes, scratch: Path) -> Any:
    scratch.write_bytes(data)
    return torch.load(scratch, weights_only=True)


@pytest.mark.parametrize("damaged", [".metadata", "__0_0.distcp", "__1_1.distcp"])
def test_damage_is_found_before_anything_changes(tmp_path: Path, damaged: str) -> None:
    """Metadata, values and tensors are each verified by a digest of ours."""
    ranks = ranks_of(dp=2)
    save_twice(tmp_path, ranks)
    file = tmp_path / "t" / "optim" / damaged
    data = bytearray(file.read_bytes())
    data[90] ^= 1
    file.write_bytes(data)
    assert damaged in " ".join(verify_checkpoint(tmp_path, "t").problems)
    with pytest.raises(errors.CorruptCheckpoint, match=damaged):
        load_checkpoint(tmp_path, "t", optimizer={}, topology=ranks[1])


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in optimizer(Topology()).items() if name != key}


NAMES = [[*SHAPES][:1], [*SHAPES][1:]]
UNCUT = {**optimizer(Topology()), "base_state": {0: {"row_var": torch.ones(5)}}}


@pytest.mark.parametrize(
    ("state", "param_names", "message"),
    [
        ({"state": {}, "param_groups": [{"params": [0]}]}, [["a"]], r"use_zero1_dcp=True is for ZeRO-1 optimizers"),
        (optimizer(Topology()), None, r"names are not known; pass the live model, or param_names="),
        (_without("shape_info"), NAMES, r"'shape_info' is not known"),
        (UNCUT, NAMES, r"embed\.weight\.row_var has shape \(5,\), expected \(5, 3\)"),
        ({**optimizer(Topology()), "base_state": {"counts": 1}}, NAMES, r"'base_state' has 'counts'"),
    ],
    ids=["plain", "no-names", "no-shapes", "uncut", "general"],
)
def test_what_the_form_cannot_hold_is_refused(tmp_path: Path, state: Any, param_names: Any, message: str) -> None:
    with pytest.raises(errors.UnsupportedState, match=message):
        save_checkpoint(tmp_path, "t", optimizer=state, param_names=param_names, use_zero1_dcp=True)
    assert not (tmp_path / "t").exists()


def test_padding_stays_out_of_a_snapshot_in_waves(tmp_path: Path) -> None:
    """A shard larger than the staging memory, whose last row is padding: what comes back ends with zeros."""
    tensor = torch.arange(1.0, 2**21 + 2.0)  # over two ranks 2**20 + 1 rows each, of 4 bytes: more than memory_cap
    ranks, run = ranks_of(dp=2), uuid.uuid4().hex
    states: list[dict[str, Any]] = [
        {
            "param_groups": [{"params": [0]}],
            "base_state": {0: {"exp_avg": shard(tensor, at) + (at.dp_rank == 0)}},
            "shape_info": {0: tensor.shape},
        }
        for at in ranks
    ]
    assert 0.0 == states[1]["base_state"][0]["exp_avg"][-1]

    def save(rank: int) -> None:
        saver = Checkpointer(tmp_path, topology=ranks[rank], run_id=run, timeout=600.0, memory_cap=2**22)
        saver.save("t", optimizer=states[rank], param_names=[["w"]], use_zero1_dcp=True)
        saver.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, range(2)))
    for at, state in zip(ranks, states, strict=True):
        loaded: dict[str, Any] = {}
        load_checkpoint(tmp_path, "t", optimizer=loaded, topology=at)
        assert torch.equal(state["base_state"][0]["exp_avg"], loaded["base_state"][0]["exp_avg"])


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=["dp2", "pp2"])
def test_numbers_that_differ_come_back_to_their_rank(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """The directory has one copy of them for all ranks of a stage; other sizes are refused by name."""
    ranks, run = ranks_of(**sizes), uuid.uuid4().hex
    states = [optimizer(at, 10 + at.dp_rank) for at in ranks]
    for state, at in zip(states, ranks, strict=True):
        state["param_groups"][0]["lr"] = 0.1 * (1 + at.dp_rank)
        for entries in state["base_state"].values():
            entries["count"] = torch.tensor(float(at.dp_rank))

    def save(rank: int) -> None:
        names = parameters(ranks[rank])
        saver = Checkpointer(tmp_path, topology=ranks[rank], run_id=run, timeout=600.0)
        saver.save("t", optimizer=states[rank], param_names=[names[:1], names[1:]], use_zero1_dcp=True)
        saver.close()

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(save, range(len(ranks))))
    for at, state in zip(ranks, states, strict=True):
        loaded: dict[str, Any] = {}
        load_checkpoint(tmp_path, "t", optimizer=loaded, topology=at)
        assert state["param_groups"][0]["lr"] == loaded["param_groups"][0]["lr"]
        for entries, others in zip(state["base_state"].values(), loaded["base_state"].values(), strict=True):
            assert (entries["step"], entries["count"]) == (others["step"], others["count"])
    with pytest.raises(errors.IncompatibleState, match=r"optim/.* differed between the ranks that saved it"):
        load_checkpoint(tmp_path, "t", optimizer={}, topology=Topology(dp=1, pp=ranks[0].pp))


@pytest.mark.parametrize("known", [False, True])
def test_shards_in_other_param_groups_on_some_ranks_are_refused(tmp_path: Path, known: bool) -> None:
    """They are in no rank's own file: what came back to that rank had none of its moments.

    With ``known``, ranks differed in something else before.
    """
    ranks, run = ranks_of(dp=2), uuid.uuid4().hex
    names = parameters(ranks[0])

    def save(rank: int) -> None:
        state = optimizer(ranks[rank], 10)
        state["param_groups"][0]["lr"] = 0.1 * (1 + rank)
        saver = Checkpointer(tmp_path, topology=ranks[rank], run_id=run, timeout=600.0)
        if known:
            saver.save("before", optimizer=state, param_names=[names[:1], names[1:]], use_zero1_dcp=True)
        groups = state["param_groups"]
        if rank == 1:
            groups[:] = [{**groups[0], "params": [index for group in groups for index in group["params"]]}]
        listed = [names] if rank == 1 else [names[:1], names[1:]]
        with pytest.raises(errors.RanksDisagree, match=r"ZeRO-1 optimizer has .* other param groups, than on"):
            saver.save("t", optimizer=state, param_names=listed, use_zero1_dcp=True)
        saver.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, range(2)))


def test_a_failure_elsewhere_reaches_rank_0_which_votes_last(tmp_path: Path) -> None:
    """Both ranks say whose failure it was, in the same words; there is no tag."""

    def full(operation: Operation) -> None:
        if operation.name == "create" and operation.key.endswith("/__1_1.distcp"):
            raise OSError(28, "No space left on device")

    ranks, run = ranks_of(dp=2), uuid.uuid4().hex
    storage = HookedStorage(LocalStorage(tmp_path), full)
    savers = [Checkpointer(tmp_path, topology=at, run_id=run, timeout=600.0, storage=storage) for at in ranks]
    names = [parameters(ranks[0])[:1], parameters(ranks[0])[1:]]
    pending = [
        saver.save("t", optimizer=optimizer(at), param_names=names, use_zero1_dcp=True, async_save=True)
        for saver, at in zip(savers, ranks, strict=True)
    ]
    for one in pending:
        with pytest.raises(errors.SaveFailed, match=r"^save of 't' failed: rank 1 failed: writing optim/__1_1\.distcp"):
            one.wait()
    for saver in savers:
        saver.close()
    assert not (tmp_path / "t").exists()
