"""Names and filters of a load, feature by feature, on plain CPU torch."""

import logging
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nxd_ckpt
from nxd_ckpt import load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.errors import DigestMismatch, InvalidArgument, KeyMismatch, OptimizerMismatch
from tests.filters.named import Named, averages, stepped
from tests.live.doubles import ShardedOptimizer
from tests.support.damage import flip
from tests.tag.equality import difference

SAVED = {"a.weight": 1.0, "b.weight": 2.0, "c.weight": 3.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tag with every part."""
    directory = tmp_path_factory.mktemp("run")
    model = Named(SAVED)
    content = {"random": nxd_ckpt.capture_random_state(), "epoch": 3}
    save_checkpoint(
        *(directory, "t", model, stepped(model), {"epoch": 7}, {"steps": 1, "loss": 0.5}),
        rank_content=content,
        durable=False,
    )
    nxd_ckpt.close_checkpointers()
    return directory


@pytest.mark.parametrize("glob", ["user_content/*", "rank_content/*", "scheduler/*", "optim/*", "*content/*"])
def test_a_glob_of_all_that_is_below_a_part_leaves_it_out(run: Path, glob: str) -> None:
    """It matches, though nobody looks at what is below."""
    model, own, scheduler = Named(dict.fromkeys(SAVED, 77.0)), {"mine": 1}, {"epoch": 0}
    content = load_checkpoint(run, "t", model, None, scheduler, rank_content=own, ignore_keys=[glob])
    assert SAVED == model.held()
    assert (None if "content/*" in glob and "rank" not in glob else {"steps": 1, "loss": 0.5}) == content
    assert ({"mine"} if glob.startswith(("rank", "*")) else {"random", "epoch"}) == {*own}
    assert {"epoch": 0 if glob == "scheduler/*" else 7} == scheduler


def test_a_name_with_a_bracket_is_left_out_by_itself(tmp_path: Path) -> None:
    """As messages write it, though as a glob it matches another."""
    state = {name: torch.ones(1) for name in ("w[0]", "w[1]", "w0")}
    save_checkpoint(tmp_path, "t", state, durable=False)
    loaded: dict[str, Any] = {}
    load_checkpoint(tmp_path, "t", loaded, ignore_keys=["model/w[0]"])
    assert {"w[1]", "w0"} == loaded.keys()
    save_checkpoint(tmp_path, "some", state, durable=False, ignore_keys=["model/w[0]"])
    assert ["model/w[1]", "model/w0"] == open_checkpoint(tmp_path, "some").keys()


def test_what_is_left_out_may_be_damaged(tmp_path: Path) -> None:
    """In a small file too, all of which is verified otherwise. The sound tensors can be read one by one."""
    kept, lost = torch.full((9,), 1.5), torch.full((9,), 2.5)
    save_checkpoint(tmp_path, "t", {"kept": kept, "lost": lost}, durable=False)
    [file] = (tmp_path / "t" / "model").iterdir()
    flip(file, file.read_bytes().index(lost.numpy().tobytes()))
    for verify in (True, "reading"):
        loaded: dict[str, Any] = {}
        load_checkpoint(tmp_path, "t", loaded, ignore_keys=["model/lost"], verify=verify)
        assert (["kept"], True) == ([*loaded], torch.equal(kept, loaded["kept"]))
    modes: list[bool | Literal["reading"]] = [True, "reading", False]
    for mode in modes:
        live = {"kept": torch.zeros(9), "lost": torch.zeros(9)}
        with pytest.raises(DigestMismatch, match="model/lost"):
            load_checkpoint(tmp_path, "t", live, verify=mode)
        assert not any(map(torch.any, live.values())), "a small file is compared before anything changes"
    checkpoint = open_checkpoint(tmp_path, "t")
    assert ["model/kept", "model/lost"] == checkpoint.keys()
    assert torch.equal(kept, checkpoint.read("model/kept"))
    with pytest.raises(DigestMismatch, match="model/lost"):
        checkpoint.read("model/lost")


def test_every_part_can_be_left_out_by_itself(run: Path) -> None:
    """What is left out keeps what it has live, and is not returned; the rest is loaded."""
    model, scheduler = Named(dict.fromkeys(SAVED, 77.0)), {"epoch": 0}
    optimizer, mine = stepped(model, lr=9.0), {"random": "own", "other": 1}
    load: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rank_content": mine}
    globs = ["model/b*", "optim/a.weight", "optim/c.weight/exp_avg", "optim/param_groups", "scheduler"]
    content = load_checkpoint(run, "t", **load, ignore_keys=[*globs, "user_content/loss", "rng"])
    assert {"a.weight": 1.0, "b.weight": 77.0, "c.weight": 3.0} == model.held()
    assert {"a.weight": 770.0, "b.weight": 20.0, "c.weight": 770.0} == averages(model, optimizer)
    squares = optimizer.state[model.named["c.weight"]]["exp_avg_sq"]
    assert (30.0, 9.0) == (squares.item(), optimizer.param_groups[0]["lr"])
    assert ({"epoch": 0}, {"steps": 1}, {"random": "own", "epoch": 3}) == (scheduler, content, mine)
    assert None is load_checkpoint(run, "t", **load, ignore_keys=["optim/*", "user_content", "rank_*"])
    assert {"a.weight": 770.0, "b.weight": 20.0, "c.weight": 770.0} == averages(model, optimizer)
    assert ({"epoch": 7}, {"random": "own", "epoch": 3}) == (scheduler, mine)


def test_weights_only_loads_the_model_and_nothing_else(run: Path) -> None:
    """Not even where the other objects are given, of whatever kind."""
    model, scheduler, mine = Named(dict.fromkeys(SAVED, 77.0)), {"epoch": 0}, {"own": 1}
    optimizer = stepped(model, lr=9.0)
    given: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "rank_content": mine}
    assert None is load_checkpoint(run, "t", model, load_weights_only=True, **given)
    assert (SAVED, {"epoch": 0}, {"own": 1}) == (model.held(), scheduler, mine)
    assert (dict.fromkeys(SAVED, 770.0), 9.0) == (averages(model, optimizer), optimizer.param_groups[0]["lr"])


def test_shards_follow_the_weights_that_are_loaded_without_them(run: Path) -> None:
    """The next step of a ZeRO-1 optimizer goes on from the loaded weights, not from its own old copies."""
    model = Named(dict.fromkeys(SAVED, 77.0))
    optimizer = ShardedOptimizer(list(model.named.values()), lr=0.0, weight_decay=0.0)
    load_checkpoint(run, "t", model, optimizer, load_weights_only=True)
    for parameter in model.named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert SAVED == model.held()


def test_what_is_left_out_need_not_be_in_the_tag_nor_fit(run: Path) -> None:
    """Another head: of another shape, or of another name, with its optimizer's state, on the same sizes."""
    model = Named({**SAVED, "new.weight": 77.0})
    wide = model.named["c.weight"] = torch.nn.Parameter(torch.full((3,), 77.0))
    model.get_submodule("c").register_parameter("weight", wide)
    optimizer = torch.optim.AdamW(list(model.named.values()))
    load_checkpoint(run, "t", model, optimizer, ignore_keys=["*/c.weight", "model/new.*", "optim/new.*"])
    assert {"a.weight": 10.0, "b.weight": 20.0} == averages(model, optimizer)
    assert [77.0] * 4 == [*wide.tolist(), model.named["new.weight"].item()]


def test_a_function_chooses_among_all_names(run: Path) -> None:
    """It gets every name, of what is saved and what is live, and says which to leave out, for dicts too."""
    seen: list[str] = []

    def ignore(names: list[str]) -> list[str]:
        seen.extend(names)
        return [name for name in names if "b.weight" in name or name == "rng"]

    filled: dict[str, Any] = {}
    state: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    load_checkpoint(run, "t", filled, state, rank_content=mine, ignore_keys=ignore)
    assert (["a.weight", "c.weight"], [0, 2], ["epoch"]) == (list(filled), list(state["state"]), list(mine))
    parts = {"scheduler", "user_content", "user_content/steps", "rank_content", "rank_content/random", "rng"}
    states = {f"optim/{name}/{key}" for name in SAVED for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set() == {*parts, *states, *(f"model/{name}" for name in SAVED), "optim/param_groups"} - {*seen}
    with pytest.raises(KeyMismatch, match=r"not in its list: 'optim/x'"):
        load_checkpoint(run, "t", filled, ignore_keys=lambda names: ["optim/x"])


def test_a_function_leaves_out_what_globs_do(run: Path) -> None:
    """All that is known of a parameter or of the optimizer is the whole of it; a glob is none of the names."""
    model = Named({**dict.fromkeys(SAVED, 77.0), "new.weight": 77.0})
    optimizer = stepped(model)
    load_checkpoint(run, "t", model, optimizer, ignore_keys=lambda names: [name for name in names if "/new." in name])
    assert ({**SAVED, "new.weight": 77.0}, 10.0) == (model.held(), averages(model, optimizer)["a.weight"])
    sharded = ShardedOptimizer(model.parameters(), lr=0.5)
    load: dict[str, Any] = {"model": {}, "optimizer": sharded}
    load_checkpoint(run, "t", **load, ignore_keys=lambda names: [name for name in names if name[:6] == "optim/"])
    with pytest.raises(KeyMismatch, match=r"not in its list: 'optim/\*'"):
        load_checkpoint(run, "t", **load, ignore_keys=lambda names: ["optim/*"])


def test_entries_of_a_filled_dict_stay(run: Path) -> None:
    """Also where the dict does not tell its parameters' names: those of the tag count, by position."""
    model = Named(dict.fromkeys(SAVED, 77.0))
    state = stepped(model).state_dict()
    load_checkpoint(run, "t", optimizer=state, ignore_keys=["optim/b.weight/exp_avg"])
    assert [10.0, 770.0, 30.0] == [state["state"][index]["exp_avg"].item() for index in range(3)]


@given(st.permutations(sorted(SAVED)), st.sampled_from([[], ["model/a.*"], ["optim/b.weight", "model/*"]]))
def test_chains_and_cycles_are_replaced_at_once(run: Path, order: list[str], globs: list[str]) -> None:
    """Any permutation of names: each tensor and its state come from where the mapping says, and nowhere else."""
    mapping = dict(zip(sorted(SAVED), order, strict=True))
    model = Named(dict.fromkeys(SAVED, 77.0))
    optimizer = stepped(model)
    load_checkpoint(run, "t", model, optimizer, key_mapping=mapping, ignore_keys=globs)
    left = {"a.weight"} if "model/a.*" in globs else set(SAVED) if globs else set()
    assert {name: 77.0 if name in left else SAVED[saved] for name, saved in mapping.items()} == model.held()
    kept = {"b.weight"} if "optim/b.weight" in globs else set()
    expected = {name: 770.0 if name in kept else 10 * SAVED[saved] for name, saved in mapping.items()}
    assert expected == averages(model, optimizer)


def test_names_are_not_exchanged_by_position(run: Path, tmp_path: Path) -> None:
    """A mapping of the optimizer's state is refused where one side does not name it, unless the caller does."""
    mapping = {"a.weight": "b.weight", "b.weight": "a.weight"}
    model = Named(dict.fromkeys(SAVED, 77.0))
    optimizer = stepped(model)
    with pytest.raises(OptimizerMismatch, match="pass the live model itself, or param_names="):
        load_checkpoint(run, "t", None, optimizer, key_mapping=mapping)
    foreign = Path(shutil.copytree(run / "t", tmp_path / "t"))
    (foreign / "manifest.json").unlink()
    shutil.rmtree(foreign / "index")
    with pytest.raises(OptimizerMismatch, match="exchanges live names; pass saved_param_names="):
        load_checkpoint(tmp_path, "t", model, optimizer, key_mapping=mapping)
    assert (dict.fromkeys(SAVED, 77.0), dict.fromkeys(SAVED, 770.0)) == (model.held(), averages(model, optimizer))
    swapped = {"a.weight": 20.0, "b.weight": 10.0, "c.weight": 30.0}
    load_checkpoint(tmp_path, "t", model, optimizer, key_mapping=mapping, saved_param_names=[[[*SAVED]]])
    assert swapped == averages(model, optimizer)
    load_checkpoint(run, "t", None, stepped(model), key_mapping=mapping, param_names=[[*SAVED]])


def test_a_prefix_finds_names_before_and_after_a_wrapper(run: Path, tmp_path: Path) -> None:
    """A prefix finds a wrapped model's tensors, or a part of a larger one; mapped names are whole ones."""
    inner = Named(SAVED)
    save_checkpoint(tmp_path, "t", torch.nn.ModuleDict({"module": inner}), stepped(inner), durable=False)
    model = Named({"a.weight": 77.0, "x.weight": 77.0})
    optimizer = stepped(model)
    mapping = {"x.weight": "module.c.weight"}
    load_checkpoint(tmp_path, "t", model, optimizer, prefix="module.", key_mapping=mapping, ignore_keys=["*/b.weight"])
    assert ({"a.weight": 1.0, "x.weight": 3.0}, {"a.weight": 10.0, "x.weight": 30.0}) == (
        model.held(),
        averages(model, optimizer),
    )
    part = Named({"weight": 77.0})
    load_checkpoint(run, "t", part, torch.optim.AdamW(part.parameters()), prefix="b.")
    assert {"weight": 2.0} == part.held()
    filled: dict[str, Any] = {}
    load_checkpoint(run, "t", filled, prefix="c.")
    assert None is difference({"weight": torch.tensor([3.0])}, filled)


BAD = [
    ({"ignore_keys": ["model/a.weigth"]}, KeyMismatch, r"ignore_keys= matches nothing.*did you mean 'model/a.weight'"),
    ({"ignore_keys": ["optim/*/exp_avg", "zzz*"]}, KeyMismatch, r"matches nothing with 'zzz\*'"),
    ({"key_mapping": {"a.wieght": "a.weight"}}, KeyMismatch, r"no live .* 'a.wieght' \(did you mean 'a.weight'"),
    ({"key_mapping": {"a.weight": "a.weigth"}}, KeyMismatch, r"nothing in .* 'a.weigth' \(did you mean"),
    ({"prefix": "module."}, KeyMismatch, r"prefix='module.': no name in the checkpoint begins with it; there are 'a.w"),
    ({"key_mapping": {"a.weight": "c.weight", "b.weight": "c.weight"}}, InvalidArgument, "both .* from 'c.weight'"),
    ({"key_mapping": {"a.weight": "b.weight"}}, InvalidArgument, "'a.weight' and 'b.weight' would both"),
    ({"key_mapping": {"a.weight": 3}}, InvalidArgument, "key_mapping must be a dict of strings by name"),
    ({"key_mapping": ["a.weight"]}, InvalidArgument, "key_mapping must be a dict"),
    ({"prefix": 3}, InvalidArgument, "prefix must be a string, found 3"),
    ({"ignore_keys": 3}, InvalidArgument, "ignore_keys must be a string or a list of strings or a function"),
    ({"ignore_keys": lambda names: None}, InvalidArgument, "returned None"),
    ({"ignore_keys": lambda state: state["model"].clear()}, InvalidArgument, "TypeError.*list of names.*not with"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD, ids=[str(index) for index in range(len(BAD))])
def test_bad_filters_are_refused_before_anything_changes(
    run: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """What matches nothing names the closest names; what could mean two things is refused."""
    model = Named(dict.fromkeys(SAVED, 77.0))
    optimizer = stepped(model)
    with pytest.raises(error, match=words):
        load_checkpoint(run, "t", model, optimizer, **options)
    assert dict.fromkeys(SAVED, 77.0) == model.held()
    assert dict.fromkeys(SAVED, 770.0) == averages(model, optimizer)


def test_strictness_of_names_and_of_filters(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``strict=False`` warns of both; ``strict_model_weights`` decides on the model's names alone."""
    extra = Named({**SAVED, "d.weight": 77.0})
    with pytest.raises(KeyMismatch, match=r"'d\.weight'"):
        load_checkpoint(run, "t", extra, strict=False, strict_model_weights=True)
    load_checkpoint(run, "t", extra, strict_model_weights=False)
    assert {**SAVED, "d.weight": 77.0} == extra.held()
    with pytest.raises(KeyMismatch, match="matches nothing"):
        load_checkpoint(run, "t", extra, strict_model_weights=False, ignore_keys=["nothing"])
    with caplog.at_level(logging.WARNING):
        load_checkpoint(run, "t", extra, strict=False, ignore_keys=["nothing"])
    assert any("ignore_keys= matches nothing with 'nothing'" in message for message in caplog.messages)
