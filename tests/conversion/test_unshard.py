"""Plain files of whole tensors: whatever job saved a tag, they hold what a single rank would load."""

import json
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from nxd_ckpt import convert, load_checkpoint, open_checkpoint, save_checkpoint, unshard_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import DigestMismatch, InvalidArgument, PartNotFound, TopologyMismatch, UnsupportedState
from nxd_ckpt.options.conversion import Form
from tests.conversion.tags import Tree, contents, model, save_example, whole
from tests.golden.checkpoints import saved
from tests.reshard.ranks import save_job
from tests.reshard.strategies import Case, cases
from tests.reshard.whole import OPTIONS
from tests.tag.equality import difference

STRATEGIES: dict[str, dict[str, Any]] = {
    "one_file": {},
    "one_file_per_tensor": {"unshard_strategy": "one_file_per_tensor"},
    "chunks": {"unshard_strategy": "chunks", "size_per_shard": "100B"},
}


def merged(trees: list[Tree]) -> Tree:
    """Nested dicts as one."""
    whole: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            whole[key] = merged([whole.get(key, {}), value]) if isinstance(value, dict) else value
    return whole


def files_of(part: Path) -> list[Path]:
    """The weight files of a model or an optimizer, as its index lists them."""
    if part.is_file():
        return [part]
    places = json.loads((part / "index.json").read_text())["weight_map"]
    assert {*places.values(), "index.json"} == {path.name for path in part.iterdir()}
    return [part / name for name in dict.fromkeys(places.values())]


def read(part: Path) -> Tree:
    """All of a model or an optimizer, read by torch or by safetensors."""
    return merged(
        [
            torch.load(file, weights_only=True, mmap=True) if file.suffix == ".pt" else load_file(file)
            for file in files_of(part)
        ]
    )


def flat(tree: Tree, prefix: str = "") -> Tree:
    """The tensors of a tree, by the names on their paths."""
    found: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + key] = value
    return dict(sorted(found.items()))


@settings(max_examples=15)
@given(case=cases(), strategy=st.sampled_from(sorted(STRATEGIES)), use_safetensors=st.booleans())
def test_every_weight_of_any_job_comes_out_whole(case: Case, strategy: str, use_safetensors: bool) -> None:
    """Whatever the sizes, cuts, stages, param groups and files: every weight, its state and its options, whole."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        save_job(directory, list(case.weights), case.saved, **case.save_options)
        [tag] = [path for path in directory.iterdir() if path.name[0] != "."]
        options: dict[str, Any] = {**STRATEGIES[strategy], "use_safetensors": use_safetensors}
        planned = convert(tag, directory / "out", to="files", dry_run=True, **options)
        model_path, optim_path = unshard_checkpoint(tag, directory / "out", durable=False, **options)
        assert planned.files == {name: len(content) for name, content in contents(directory / "out").items()}
        values = {weight.name: weight.value for weight in case.weights}
        assert None is difference(flat(values), flat(read(model_path)))
        optimizer = {} if optim_path is None else read(optim_path)  # no state is no tensor
        rest = json.loads((directory / "out" / "optim.json").read_text()) if use_safetensors else optimizer
        state = {}
        for weight in (weight for weight in case.weights if weight.kind == "parameter"):
            masters = case.saved.zero1 and case.saved.master_weights
            entry = {**weight.state(), **({"master_weights": weight.master} if masters else {})}
            if isinstance(weight.step, float):
                entry["step"] = torch.tensor(weight.step)
            elif weight.step is not None:
                assert weight.step == rest["state"][weight.name]["step"]
            state[weight.name] = entry
            [group] = [group for group in rest["param_groups"] if weight.name in group["params"]]
            wanted = OPTIONS[weight.options]
            assert wanted == {**{key: group[key] for key in wanted}, "betas": tuple(group["betas"])}
        expected = flat({"state": state})
        assert None is difference(expected, flat(optimizer))


def test_tags_of_nxd_are_unsharded(golden: Path, tmp_path: Path) -> None:
    """Alone on tensor parallelism as they are, entries by position; else once it is said how parameters were cut."""
    alone = saved(golden, "a_dp2_zero1_pt")
    model_path, optim_path = unshard_checkpoint(alone.directory / "step_3", tmp_path / "alone")
    assert None is difference(flat(alone.held("step_3", 0)["model"]), flat(read(model_path)))
    assert {"exp_avg", "exp_avg_sq", "step"} <= read(optim_path)["state"]["#0"].keys()

    cut = saved(golden, "s_tp2_stride2_nozero1_pt")
    with pytest.raises(TopologyMismatch, match="partitions="):
        unshard_checkpoint(cut.directory / cut.tags[0], tmp_path / "cut", optim=False)
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_safetensors", [False, True])
def test_an_optimizer_without_state_loads_again(tmp_path: Path, strategy: str, use_safetensors: bool) -> None:
    """Of safetensors, too, which have none of its tensors; in torch's form it has a state, without entries."""
    model = torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path / "run", "t", model, torch.optim.SGD(model.parameters(), lr=0.5), durable=False)
    options: dict[str, Any] = {**STRATEGIES[strategy], "durable": False}
    done = convert(tmp_path / "run", tmp_path / "files", to="files", use_safetensors=use_safetensors, **options)
    if "optim.pt" in done.files:
        assert {} == read(tmp_path / "files" / "optim.pt")["state"]
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0)
    load_checkpoint(tmp_path / "files", model=model, optimizer=optimizer)
    assert 0.5 == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("state", [{"deep": {"w": torch.ones(2)}}, {"w": torch.ones(2), "_extra_state": "own", "n": 3}])
def test_a_model_of_more_than_tensors_loads_again(tmp_path: Path, state: Tree, strategy: str) -> None:
    """Of dicts, and of extra state."""
    torch.save({"model": state}, tmp_path / "x.pt")
    options: dict[str, Any] = {**STRATEGIES[strategy], "durable": False}
    convert(tmp_path / "x.pt", tmp_path / "files", to="files", **options)
    loaded: Tree = {}
    load_checkpoint(tmp_path / "files", model=loaded)
    assert None is difference(state, loaded)


@pytest.mark.parametrize("to", ["files", "hf"])
def test_keys_of_an_optimizer_with_separators(tmp_path: Path, to: Form) -> None:
    """They are joined with the parameter's name, and found again."""
    weight = torch.ones(2)
    state = {"state": {0: {"a.b": weight, "a/b": weight + 1}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"m.w": weight}, "optimizer": state}, tmp_path / "x.pt")
    options: dict[str, Any] = {"use_safetensors": True} if to == "files" else {}
    convert(tmp_path / "x.pt", tmp_path / to, to=to, optimizer=True, durable=False, **options)
    assert None is difference(state["state"], open_checkpoint(tmp_path / to).optimizer_state()["state"])


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    """Each tensor gets a file of its own, none outside of the directory, and the index tells which."""
    state = {name: torch.full((2,), number) for number, name in enumerate(("a.b", "a-b", "A.b", "../x", "é" * 300))}
    save_checkpoint(tmp_path / "run", "step_1", state, durable=False)
    tag = tmp_path / "run" / "step_1"
    model_path, _ = unshard_checkpoint(tag, tmp_path / "out", unshard_strategy="one_file_per_tensor")
    assert None is difference(flat(state), flat(read(model_path)))
    assert {"out", "run"} == {path.name for path in tmp_path.iterdir()}


def test_extra_state_is_kept(tmp_path: Path) -> None:
    """Beside the tensors of a state dict: in a pickle as it was, in JSON where safetensors hold the tensors."""
    state = {"w": torch.ones(2), "count": 3, "extra": {"seen": [1, 2]}}
    save_checkpoint(tmp_path / "run", "step_1", state, durable=False)
    tag = tmp_path / "run" / "step_1"
    assert None is difference(state, read(unshard_checkpoint(tag, tmp_path / "pt")[0]))
    unshard_checkpoint(tag, tmp_path / "safe", use_safetensors=True)
    assert {"count": 3, "extra": {"seen": [1, 2]}} == json.loads((tmp_path / "safe" / "model.json").read_text())

    for name, extra in (("tensors", [torch.ones(2)]), ("bytes", b"\x00")):
        save_checkpoint(tmp_path / "run", name, {"w": torch.ones(2), "extra": extra}, durable=False)
        assert "extra" in read(unshard_checkpoint(tmp_path / "run" / name, tmp_path / f"{name}-pt")[0])
        with pytest.raises(UnsupportedState, match="use_safetensors=False"):
            unshard_checkpoint(tmp_path / "run" / name, tmp_path / f"{name}-safe", use_safetensors=True)


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_inspect_says_that_it_may_be_ours(tmp_path: Path, capsys: Any, use_safetensors: bool) -> None:
    """A directory with nothing but model.safetensors was called transformers'."""
    save_checkpoint(tmp_path / "run", "step_1", {"w": torch.ones(2)}, durable=False)
    unshard_checkpoint(tmp_path / "run" / "step_1", tmp_path / "out", use_safetensors=use_safetensors)
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "nxd_ckpt's form files" in capsys.readouterr().out


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    """Digests are verified on the way; nothing appears then."""
    tag = save_example(tmp_path, 2)
    victim = tag / "optim" / "dp_rank_01_tp_rank_00_pp_rank_00.pt"
    data = bytearray(victim.read_bytes())
    where = data.find(whole()["base_state"][1]["exp_avg"][6:].numpy().tobytes())
    data[where] ^= 1
    victim.write_bytes(data)
    with pytest.raises(DigestMismatch, match=r"up\.weight"):
        unshard_checkpoint(tag, tmp_path / "out")
    assert [] == [path for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))]


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_a_tag_is_unsharded_from_a_store_into_another(tmp_path: Path, use_safetensors: bool) -> None:
    """URLs on both sides; a second one replaces it on request."""
    store = f"memory://{uuid.uuid4().hex}"
    save_checkpoint(f"{store}/run", "step_1", model(), run_id="one")
    options: dict[str, Any] = {"use_safetensors": use_safetensors}
    url = f"{store}/out/step_1"
    unshard_checkpoint(f"{store}/run/step_1", url, unshard_strategy="chunks", size_per_shard="50B", **options)
    model_path, _ = unshard_checkpoint(f"{store}/run/step_1", url, overwrite=True, **options)
    files = fsspec.filesystem("memory")
    assert [model_path] == [f"memory:/{path}" for path in files.find(url.removeprefix("memory:/"))]
    data = files.cat_file(model_path)
    (tmp_path / "model").write_bytes(data)
    found = load(data) if use_safetensors else torch.load(tmp_path / "model", weights_only=True)
    assert None is difference(flat(model()), flat(found))


def test_what_must_not_be_replaced_is_not(tmp_path: Path) -> None:
    """Without being asked nothing; then nothing but what was unsharded: above all no tag, nor NxD's, nor its parts."""
    tag, other = save_example(tmp_path, 2), save_example(tmp_path / "more", 2)
    unshard_checkpoint(tag, tmp_path / "out", unshard_strategy="chunks", size_per_shard="100B")
    before = contents(other)

    def refused(match: str, target: Path, **options: Any) -> None:
        with pytest.raises(InvalidArgument, match=match):
            unshard_checkpoint(tag, target, **options)

    refused("overwrite=True", tmp_path / "out")
    refused("which no unsharded checkpoint has", other, overwrite=True)
    for marker in ("done", "checkpoint", "manifest.json", "scheduler.pt", "user_content.pt"):
        (other / marker).unlink()
    for folder in ("index", "rank_content"):
        for path in (other / folder).iterdir():
            path.unlink()
        (other / folder).rmdir()
    refused("dp_rank_00", other, overwrite=True)
    refused("the same, or one is inside", tag / "model")
    assert before.keys() >= contents(other).keys() != set()
    unshard_checkpoint(tag, tmp_path / "out", save_overwrite=True, quiet=True)
    assert {"model.pt", "optim.pt"} == set(contents(tmp_path / "out"))


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "step_1", {"w": torch.ones(2)}, durable=False)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (InvalidArgument, "one_file", {"unshard_strategy": "two_files"}),
        (InvalidArgument, "size_per_shard", {"unshard_strategy": "chunks", "size_per_shard": "much"}),
        (InvalidArgument, 'such as "5GB" or "1024MB".*found 1024', {"size_per_shard": 1024}),
        (PartNotFound, "without an optimizer", {"optim": True}),
    ]
    for kind, match, options in wrong:
        with pytest.raises(kind, match=match):
            unshard_checkpoint(tmp_path / "step_1", tmp_path / "out", **options)
    tree = {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    save_checkpoint(tmp_path, "optimizer", optimizer=tree, durable=False)
    with pytest.raises(PartNotFound, match="nothing to convert"):
        unshard_checkpoint(tmp_path / "optimizer", tmp_path / "out", optim=False)
    model_path, optim_path = unshard_checkpoint(tmp_path / "optimizer", tmp_path / "alone")
    assert (None, {"#0": {"step": 3}}) == (model_path, read(optim_path)["state"])
    assert not (tmp_path / "out").exists()


def test_a_tensor_with_the_name_of_the_notes_is_refused_in_safetensors(tmp_path: Path) -> None:
    """No reader could open such a file; torch files hold it."""
    state = {"__metadata__": torch.ones(2), "b": torch.ones(1)}
    save_checkpoint(tmp_path / "run", "s", state)
    with pytest.raises(UnsupportedState, match=r"tensor named __metadata__.*rename"):
        unshard_checkpoint(tmp_path / "run" / "s", tmp_path / "out", use_safetensors=True)
    assert not (tmp_path / "out").exists()
    unshard_checkpoint(tmp_path / "run" / "s", tmp_path / "out")
    assert torch.equal(torch.load(tmp_path / "out" / "model.pt")["__metadata__"], state["__metadata__"])
