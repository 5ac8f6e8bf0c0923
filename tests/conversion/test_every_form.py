"""The table of `convert`: every source in every form holds what the source holds, or is refused for a stated reason."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_ckpt import convert, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.converting import FORMS
from nxd_ckpt.errors import CheckpointError, PartNotFound, UnsupportedState
from nxd_ckpt.options.conversion import Form
from tests.hugging_face.reference import State
from tests.hugging_face.saved import differences, write_config
from tests.migrate.layouts import LAYOUTS, PLAIN, options_of, untrained
from tests.migrate.old_run import OldRun


def _ours(folder: Path) -> Path:
    run = untrained(PLAIN)
    weights = [torch.nn.Parameter(weight.clone()) for weight in run.weights.values()]
    optimizer = torch.optim.AdamW(weights)
    for name, weight in zip(run.weights, weights, strict=True):
        moment = run.moments["exp_avg"][name]
        optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment * moment}
    save_checkpoint(folder / "run", "step_3", dict(zip(run.weights, weights, strict=True)), optimizer, durable=False)
    (folder / "run" / "step_3" / "tokenizer.pth").write_bytes(b"a file of others")
    return folder / "run" / "step_3"


def _archive(folder: Path) -> Path:
    convert(_ours(folder), folder / "step_3.tar.gz", durable=False)
    return folder / "step_3.tar.gz"


def _directory(folder: Path) -> Path:
    write_config(folder / "hf", PLAIN.model.config)
    save_file(untrained(PLAIN).weights, folder / "hf" / "model.safetensors")
    return folder / "hf"


SOURCES: Mapping[str, Callable[[Path], Path]] = {
    **{name: layout.write for name, layout in LAYOUTS.items()},
    "ours": _ours,
    "archive": _archive,
    "hf": _directory,
    "safetensors": lambda folder: _directory(folder) / "model.safetensors",
}
TAGS = ("nxd", "nxd xser", "nxdt", "ours", "archive")
OF_RANKS = ("nxd", "nxd xser", "nxd 0.1", "nxdt", "optimum", "optimum 0.1", "optimum 0.0 xser", "nemo")
MODELS = ("hf", "safetensors")
"""Without an optimizer."""


def reason(source: str, form: str, names: str) -> str | None:
    """Why there is no such result; None if there is one."""
    if form == "tar":
        return None if source in TAGS else "an archive holds the files of a tag as they are"
    if names == "nxd":
        ours = "holds no weights" if source in ("xm.save", "fsdp") else "of a Hugging Face model"
        return None if source in MODELS else ours
    if source in MODELS and form == "hf":
        return "has Hugging Face's form already"
    if source == "adapter" and (form, names) not in (("hf", "hf"), ("tag", "own")):
        return "base model|is not known|without an optimizer|no optimizer"
    if names == "own" and form != "tag" and source in OF_RANKS:
        return "pass partitions= with"
    return None


def _whole(path: Path, form: str) -> tuple[State, State]:
    """The model of a result, and the first moments, by name."""
    if form == "files":
        model = torch.load(path / "model.pt", weights_only=True)
        optimizer = path / "optim.pt"
        state = torch.load(optimizer, weights_only=True)["state"] if optimizer.exists() else {}
        return model, {name: entries["exp_avg"] for name, entries in state.items()}
    if form == "hf":
        moments = path / "optimizer.safetensors"
        found = load_file(moments) if moments.exists() else {}
        named = {name.removesuffix("/exp_avg"): each for name, each in found.items() if name.endswith("/exp_avg")}
        return load_file(path / "model.safetensors"), named
    opened = open_checkpoint(path)
    model = {name.removeprefix("model/"): opened.read(name) for name in opened.keys("model/*")}
    moments_of = {name.split("/")[1]: opened.read(name) for name in opened.keys("optim/*/exp_avg")}
    return model, moments_of


def _run_of(source: str) -> OldRun:
    return untrained(LAYOUTS[source].job if source in LAYOUTS else PLAIN)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the path of a source, which is written once, beside its model's ``config.json``."""
    paths: dict[str, Path] = {}

    def path(source: str) -> Path:
        if source not in paths:
            folder = tmp_path_factory.mktemp("source")
            (folder / "config.json").write_text(json.dumps(_run_of(source).job.model.config))
            (folder / "written").mkdir()
            paths[source] = SOURCES[source](folder / "written")
        return paths[source]

    return path


def _options(source: str, names: str, folder: Path) -> dict[str, Any]:
    """What the source does not record."""
    if names == "own":
        return {}
    (folder / "config.json").write_text(json.dumps(_run_of(source).job.model.config))
    known = options_of(source, folder) if source in LAYOUTS else {"config": folder / "config.json"}
    return {name: value for name, value in known.items() if name != "to" and (names == "hf" or name == "config")}


@pytest.mark.parametrize(("form", "names"), FORMS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.one_in(3)  # another third of the forms for each source
def test_every_source_in_every_form(
    tmp_path: Path, written: Callable[[str], Path], source: str, form: Any, names: Any
) -> None:
    """What is read back is equal, model and moments; in a tag of ranks, on each of them."""
    path, out = written(source), tmp_path / ("made.tar" if form == "tar" else "made")
    has_optimizer = source not in (*MODELS, "adapter") and names != "nxd"
    options: dict[str, Any] = {"to": form, "names": names, "durable": False, **_options(source, names, tmp_path)}
    if form == "hf" and has_optimizer:
        options["optimizer"] = True
    why = reason(source, form, names)
    if why is not None:
        with pytest.raises(CheckpointError, match=why):
            convert(path, out, **options)
        assert not out.exists()
        return
    done = convert(path, out, **options)
    if names == "own" and source == "nemo":  # of the directory of all its ranks, only a conversion knows what it is
        assert {"dp": 2, "tp": 2, "pp": 2, "ep": 1} == done.topology
    elif names == "own":
        before, after = open_checkpoint(path), open_checkpoint(_readable(Path(done.target), form))
        for rank in range(before.topology.world_size):
            assert [] == differences(dict(before.model_state(rank=rank)), dict(after.model_state(rank=rank)))
    elif source != "adapter":  # compared in tests/migrate/test_adapters.py
        run, (model, moments) = _run_of(source), _whole(Path(done.target), form)
        if form == "torchtitan":
            norm = "model.norm.weight"
            assert torch.equal(run.weights[norm], model["norm.weight"])
            assert not has_optimizer or torch.equal(run.moments["exp_avg"][norm], moments["norm.weight"])
        elif names == "hf":
            assert [] == differences(run.weights, model)
            assert [] == differences(run.moments["exp_avg"] if has_optimizer else {}, moments)
        else:
            assert run.weights.keys() >= {name for tensor in done.tensors for name in tensor.made_of}


def test_an_export_is_read_with_its_optimizer(tmp_path: Path) -> None:
    """What ``optimizer=True`` put beside the model opens, loads, and goes into a tag again."""
    (tmp_path / "config.json").write_text(json.dumps(PLAIN.model.config))
    source, exported = _ours(tmp_path), tmp_path / "hf"
    for size in ("5GB", "1KB"):
        options: dict[str, Any] = {"size_per_shard": size, "overwrite": True, "durable": False}
        convert(source, exported, to="hf", optimizer=True, config=tmp_path / "config.json", **options)
        again = convert(exported, tmp_path / f"of {size}", to="tag", names="own", durable=False)
        for path in (exported, again.target):
            before, after = open_checkpoint(source), open_checkpoint(path)
            assert [] == differences(dict(before.model_state()), dict(after.model_state()))
            moments = before.keys("optim/*/exp_avg*")
            assert moments
            assert moments == sorted(after.keys("optim/*/exp_avg*"), key=moments.index)
            assert all(torch.equal(before.read(name), after.read(name)) for name in moments)


def _readable(path: Path, form: str) -> Path:
    return path / "model.pt" if form == "files" else path


def test_all_that_a_form_lacks_is_named(tmp_path: Path) -> None:
    """No part of a tag is lost without a word, nor are others' files in it, nor those of a trainer beside it."""
    weight = torch.nn.Parameter(torch.ones(2))
    scheduler, content = {"last_epoch": 3}, {"step": 3}
    objects: dict[str, Any] = {"scheduler": scheduler, "user_content": content, "rank_content": {"seed": 1}}
    save_checkpoint(tmp_path / "run", "all", {"weight": weight}, durable=False, **objects)
    (tmp_path / "run" / "all" / "tokenizer.pth").write_bytes(b"a file of others")
    others = "files of others (tokenizer.pth)"
    expected: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "files": ({}, ("scheduler", "user content", "rank content", others)),
        "dcp": ({}, ("rank content", others)),
        "tag": ({"dp": 2}, ("rank content",)),
        "again": ({"to": "tag"}, ()),
    }
    for form, (options, left_out) in expected.items():
        chosen = {"to": form, "durable": False, **options}
        assert left_out == convert(tmp_path / "run" / "all", tmp_path / form, dry_run=True, **chosen).left_out, form
        assert left_out == convert(tmp_path / "run" / "all", tmp_path / form, **chosen).left_out, form
    run = LAYOUTS["optimum"].write(tmp_path / "optimum")
    assert (run / "scheduler.pt").exists()
    assert "scheduler.pt" in convert(run, tmp_path / "of the run", to="tag", durable=False).left_out


@pytest.mark.parametrize(
    ("of_optimizer", "of_scheduler"), [("optimizer.pt", "scheduler.pt"), ("optimizer.bin", "scheduler.bin")]
)
def test_what_a_trainer_has_beside_a_model_is_not_called_left_out(
    tmp_path: Path, of_optimizer: str, of_scheduler: str
) -> None:
    """Where names stay, its optimizer, scheduler and state are in the tag; otherwise they are not."""
    hf = _directory(tmp_path)
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    for file, content in ((of_optimizer, optimizer), (of_scheduler, {"last_epoch": 3}), ("training_args.bin", {})):
        torch.save(content, hf / file)
    (hf / "trainer_state.json").write_text('{"global_step": 3}')
    assert ("training_args.bin",) == convert(hf, tmp_path / "own" / "s", to="tag", names="own").left_out
    kept = open_checkpoint(tmp_path / "own").parts
    assert all((kept.optimizer, kept.scheduler, kept.user_content))
    all_files = (of_optimizer, of_scheduler, "trainer_state.json", "training_args.bin")
    assert all_files == convert(hf, tmp_path / "nxd" / "s", to="tag", names="nxd").left_out
    assert all_files[:1] == convert(hf, tmp_path / "dcp", to="dcp", optimizer=False).left_out[:1]


@pytest.mark.parametrize("form", ["tag", "files", "dcp"])
def test_views_of_one_memory_stay_apart(tmp_path: Path, form: Form) -> None:
    """They begin at the same byte of a file, and are tied only if they are alike in all else."""
    whole = torch.arange(12.0)
    views = {"turned": whole.view(3, 4).T, "every other": whole[::2], "tied": whole}
    torch.save({"whole": whole, **views}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / form, to=form, durable=False)
    loaded: State = {}
    load_checkpoint(tmp_path / form, model=loaded)
    assert [] == differences({"whole": whole, **views}, loaded)


def test_an_export_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    """Also no lease, which would keep this process from another try."""
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "x.pt")
    for _ in range(2):
        with pytest.raises(UnsupportedState, match="complex128"):
            convert(tmp_path / "x.pt", tmp_path / "hf", to="hf")
    assert [tmp_path / "x.pt"] == [*tmp_path.iterdir()]


@pytest.mark.parametrize("form", ["tag", "files"])
def test_a_script_may_have_its_state_under_other_keys(tmp_path: Path, form: Form) -> None:
    """The error of such a file said how to name them, and was raised again; a key that is not there is no key."""
    weights = {"w": torch.ones(2)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    file = tmp_path / "script" / "run.pth"
    file.parent.mkdir()
    torch.save({"net": weights, "opt": optimizer, "model": {"w": torch.zeros(2)}, "step": 7}, file)
    for source in (file, file.parent):
        convert(source, tmp_path / f"out/{form}", to=form, model_key="net", optim_key="opt", overwrite=True)
        loaded = open_checkpoint(tmp_path / f"out/{form}")
        assert torch.equal(weights["w"], loaded.read("model/w"))
        assert torch.equal(weights["w"], loaded.read("optim/#0/exp_avg"))
    with pytest.raises(PartNotFound, match=r"nothing under 'nets'; found keys .*'net', 'opt'"):
        convert(file, tmp_path / "none", to=form, model_key="nets")
    convert(file, tmp_path / "usual", to=form)
    assert torch.equal(torch.zeros(2), open_checkpoint(tmp_path / "usual").read("model/w"))
