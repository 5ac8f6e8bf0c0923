"""Names that wrappers put before those of parameters are seen through: in files, in tags, and in live models."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from nxd_ckpt import convert, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import UnsupportedState
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, live, weights, write_as_nxd, write_config, write_files, write_model

JOB = Job(Model(), tp=2, fused_mlp=False)
WRAPPED = {
    "data parallel": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled data parallel": lambda name: f"_orig_mod.module.{name}",
    "compiled layers": lambda name: name.replace(".self_attn.", ".self_attn._orig_mod."),
}


def renamed(state: State, how: str) -> State:
    return {WRAPPED[how](name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("how", WRAPPED)
def test_files_of_a_wrapped_model(tmp_path: Path, how: str) -> None:
    state = JOB.model.state()
    write_files(tmp_path / "hf", JOB.model.config, renamed(state, how))
    convert(tmp_path / "hf", tmp_path / "run" / "s", to="tag", names="nxd", tp=2)
    convert(tmp_path / "run" / "s", tmp_path / "out", to="hf", config=tmp_path / "hf")
    assert [] == differences(state, weights(tmp_path / "out"))
    model = live(Job(JOB.model).rank(state))
    load_checkpoint(tmp_path / "hf", model=model)
    assert [] == differences(Job(JOB.model).rank(state), dict(model.state_dict()))


@pytest.mark.parametrize("wrapper", [torch.nn.DataParallel, torch.compile])
def test_a_wrapped_live_model_is_loaded(tmp_path: Path, wrapper: Any) -> None:
    state = write_model(tmp_path / "hf", JOB.model)
    model = live(Job(JOB.model).rank(state))
    load_checkpoint(tmp_path / "hf", model=wrapper(model))
    assert [] == differences(Job(JOB.model).rank(state), dict(model.state_dict()))


@pytest.mark.parametrize("how", WRAPPED)
def test_a_tag_of_a_wrapped_model(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is exported under Hugging Face's names, whether NxD or nxd_ckpt wrote it."""
    state = JOB.model.state()
    config = write_config(tmp_path / "config", JOB.model.config)
    rank = Job.rank
    monkeypatch.setattr(Job, "rank", lambda *args: renamed(rank(*args), how))
    tag = write_as_nxd(tmp_path / "nxd", JOB, state)
    one = Job(JOB.model, fused_mlp=False)
    save_checkpoint(tmp_path / "ours", "s", one.rank(state))
    for number, source in enumerate((tag, tmp_path / "ours" / "s")):
        convert(source, tmp_path / str(number), to="hf", config=config)
        assert [] == differences(state, weights(tmp_path / str(number)))


@pytest.mark.parametrize("to", ["hf", "tag"])
def test_a_script_s_file_of_a_wrapped_model_is_migrated(tmp_path: Path, to: Literal["hf", "tag"]) -> None:
    """With its optimizer, whose parameters get the model's names."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "x.pth")
    config = write_config(tmp_path / "config", {"model_type": "none"})
    convert(tmp_path / "x.pth", tmp_path / "out" / "s", names="hf", to=to, config=config, optimizer=True)
    if to == "hf":
        assert [] == differences(dict(model.state_dict()), weights(tmp_path / "out" / "s"))
        found = load_file(tmp_path / "out" / "s" / "optimizer.safetensors")
        assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], found["0.weight/exp_avg"])
        return
    fresh: Any = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    resumed = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    load_checkpoint(tmp_path / "out", "s", model=fresh, optimizer=resumed)
    assert [] == differences(dict(model.state_dict()), dict(fresh.state_dict()))
    assert torch.equal(optimizer.state[model[1].bias]["exp_avg"], resumed.state[fresh[1].bias]["exp_avg"])


def test_a_mapping_may_have_such_names(tmp_path: Path) -> None:
    """Of a model whose only module is called so: nothing is left out then."""
    mapping = {
        "format_version": 1, "name": "mine",
        "rules": [{"nxd": "module.weight", "hf": "module.weight"}, {"nxd": "module.bias", "hf": "module.bias"}],
    }  # fmt: skip
    state = {"module.weight": torch.ones(2), "module.bias": torch.zeros(2)}
    save_checkpoint(tmp_path / "run", "s", state)
    convert(tmp_path / "run" / "s", tmp_path / "out", to="hf", mapping=mapping)
    assert [] == differences(state, weights(tmp_path / "out"))
    convert(tmp_path / "out", tmp_path / "again" / "s", to="tag", names="nxd", mapping=mapping)
    held: State = {}
    load_checkpoint(tmp_path / "again", "s", model=held)
    assert [] == differences(state, held)


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    twice = {"_orig_mod.model.norm.weight": torch.ones(8), "model.norm.weight": torch.ones(8)}
    write_files(tmp_path / "hf", JOB.model.config, twice)
    with pytest.raises(UnsupportedState, match=r"holds both (_orig_mod\.)?model\.norm\.weight and"):
        convert(tmp_path / "hf", tmp_path / "run" / "s", to="tag", names="nxd")
