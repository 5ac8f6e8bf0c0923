"""Checkpoints for TorchTitan 0.3 and 0.2.2: its own modules, optimizers and schedulers load them strictly."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("torchtitan", reason="torchtitan is not installed: see the Makefile")

from nxd_ckpt import convert, save_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from tests.hugging_face.families import OF_TORCHTITAN, random_model
from tests.hugging_face.reference import State
from tests.hugging_face.saved import differences
from tests.migrate.dcp_directory import from_dcp
from tests.support.processes import run_program

SINCE_TORCH_2_7 = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
CASES = [(release, family) for release in ("0.3", "0.2.2") for family in OF_TORCHTITAN]


class Loaded(NamedTuple):
    """What TorchTitan has of one family, and the model that was migrated."""

    original: State
    titan: State
    hf: State
    optimizer: State
    rest: dict[str, Any]


def trained(name: str) -> tuple[Any, torch.optim.AdamW]:
    """A model after three steps, whose moments are two and three times its weights; options as in an older torch."""
    model = random_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for parameter in model.parameters():
        values = {"exp_avg": 2 * parameter.detach(), "exp_avg_sq": 3 * parameter.detach(), "step": torch.tensor(3.0)}
        optimizer.state[parameter] = values
    (group,) = optimizer.param_groups
    for option in SINCE_TORCH_2_7:
        del group[option]
    group["initial_lr"] = 0.2
    return model, optimizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Loaded]:
    """All families in both releases: a job's model alone as step 0, and a model with its optimizer as step 3."""
    work = tmp_path_factory.mktemp("titan")
    originals: dict[str, State] = {}
    for family, (*_, sizes) in OF_TORCHTITAN.items():
        source, runs = work / "hf" / family, work / "runs" / family
        model, optimizer = trained(family)
        originals[family] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.save_pretrained(source)
        convert(source, runs / "job" / "step_3", to="tag", names="nxd", **sizes)
        save_checkpoint(runs / "run", "step_3", model, optimizer)
        for release in ("0.3", "0.2.2"):
            options: dict[str, Any] = {"to": "torchtitan", "torchtitan_release": release, "config": source}
            convert(runs / "job" / "step_3", work / release / family, optimizer=False, **options)
            convert(runs / "run" / "step_3", work / release / family, **options)
    for release, first in {"0.3": [], "0.2.2": [str(Path(sys.prefix, "torchtitan-0.2.2"))]}.items():
        program = "import runpy\nrunpy.run_module('tests.migrate.titan_models', run_name='__main__')"
        ended = run_program(f"import sys\nsys.path[:0] = {first}\n{program}", work / release)
        assert 0 == ended.returncode, ended.stderr
    found: dict[tuple[str, str], Loaded] = {}
    for release, family in CASES:
        place = work / release / family
        titan, hf, optimizer_ = (load_file(place / f"{name}.safetensors") for name in ("titan", "hf", "optimizer"))
        rest = json.loads((place / "rest.json").read_text())
        found[release, family] = Loaded(originals[family], titan, hf, optimizer_, rest)
    return found


@pytest.mark.parametrize(("release", "family"), CASES)
def test_torchtitan_has_the_model(loaded: dict[tuple[str, str], Loaded], release: str, family: str) -> None:
    """Its module has these tensors and no other; its adapter makes of them what the job's model was."""
    original, titan, hf, *_ = loaded[release, family]
    experts = {name for name in original if ".mlp.experts." in name}
    if family == "gpt_oss":  # its adapter does not turn the experts back, and in 0.3 does not know their names
        own = "moe.routed_experts.inner_experts" if release == "0.3" else "moe.experts"
        suffixes = ("_EGD", "_EG", "_EDF", "_ED") if release == "0.3" else ("",) * 4
        names = ("mlp1_weight", "mlp1_bias", "mlp2_weight", "mlp2_bias")
        files = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        for name, suffix, file in zip(names, suffixes, files, strict=True):
            for layer in range(2):
                tensor = original[f"model.layers.{layer}.mlp.experts.{file}"]
                expected = tensor.mT if tensor.dim() == 3 else tensor
                assert torch.equal(expected, titan[f"layers.{layer}.{own}.{name}{suffix}"])
        hf = {name: tensor for name, tensor in hf.items() if ".mlp.experts." not in name}
        original = {name: tensor for name, tensor in original.items() if name not in experts}
    assert [] == differences(original, hf)
    balances = [tensor for name, tensor in titan.items() if ".expert_bias" in name]
    assert bool(experts) == bool(balances)
    if family != "deepseek_v3":
        assert not any(bool(tensor.any()) for tensor in balances)


def in_the_optimizer(weights: State, family: str) -> State:
    """The parameters of TorchTitan's module: in 0.3 q, k and v are one, by key-value heads."""
    head_dim = {"llama": 8, "gpt_oss": 64}.get(family, 16)
    parameters = State()
    for name, tensor in weights.items():
        if ".qkv_linear.wq." in name:
            parts = (weights[name.replace(".wq.", f".{part}.")] for part in ("wq", "wk", "wv"))
            q, k, v = (part.unflatten(0, (-1, head_dim)) for part in parts)
            together = torch.cat([q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]], 1).flatten(0, 2)
            parameters[name.replace(".wq.", ".wqkv.")] = together
        elif ".qkv_linear." not in name:
            parameters[name] = tensor
    return parameters


@pytest.mark.parametrize(("release", "family"), CASES)
def test_its_optimizer_goes_on(loaded: dict[tuple[str, str], Loaded], release: str, family: str) -> None:
    """Moments are laid out as their weights are; steps, learning rate and schedule are there."""
    _, titan, _, optimizer, rest = loaded[release, family]
    weights = in_the_optimizer({name: tensor for name, tensor in titan.items() if ".expert_bias" not in name}, family)
    assert {name.rpartition(".")[0] for name in optimizer} == {f"state.{name}" for name in weights}
    for name, weight in weights.items():
        assert torch.equal(2 * weight, optimizer[f"state.{name}.exp_avg"]), name
        assert torch.equal(3 * weight, optimizer[f"state.{name}.exp_avg_sq"]), name
        assert torch.equal(torch.tensor(3.0), optimizer[f"state.{name}.step"])
    first = 0.2 if release == "0.2.2" else 0.1  # 0.3 begins with the rate of its own config
    expected = {"step": 3, "ntokens_seen": 0, "last_epoch": 3, "lr": [0.05], "next": [first * 0.5**4]}
    assert expected == rest


def test_param_groups_that_0_2_2_cannot_have_are_refused(tmp_path: Path) -> None:
    """It has a single one: torch would refuse to load them. 0.3 has as many as its config says."""
    model = random_model("llama")
    model.config.save_pretrained(tmp_path / "config")
    first, *others = model.parameters()
    groups: list[Any] = [{"params": [first], "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "run", "step_1", model, optimizer)
    source, options = str(tmp_path / "run" / "step_1"), ["--to", "torchtitan", "--config", str(tmp_path / "config")]
    with pytest.raises(UnsupportedState, match=r"single param group, but .* differ in weight_decay"):
        convert(source, tmp_path / "old", to="torchtitan", torchtitan_release="0.2.2", config=tmp_path / "config")
    assert not (tmp_path / "old").exists()
    old = ["--torchtitan-release", "0.2.2"]
    assert 0 == main(["convert", source, str(tmp_path / "old"), *options, *old, "--model-only"])
    assert "output.weight" in from_dcp(tmp_path / "old" / "step-0")
    assert 0 == main(["convert", source, str(tmp_path / "new"), *options])
    found = from_dcp(tmp_path / "new" / "step-1")
    decays = [found[f"optimizer.param_groups.{name}.weight.weight_decay"] for name in ("tok_embeddings", "norm")]
    assert [0.0, 0.1] == decays
    with pytest.raises(InvalidArgument, match=r"torchtitan_release must be one of 0\.3, 0\.2\.2, found '0\.1'"):
        convert(source, tmp_path / "none", to="torchtitan", torchtitan_release="0.1")  # type: ignore[arg-type]


def test_queries_without_a_latent_vector_have_their_own_name(tmp_path: Path) -> None:
    """Not that of other models' queries; biases, which TorchTitan's model does not have, are refused."""
    model = random_model("deepseek-v3-whole-queries")
    model.config.save_pretrained(tmp_path / "config")
    model.config.attention_bias = False
    model.config.save_pretrained(tmp_path / "without_biases")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(".bias")}
    save_checkpoint(tmp_path / "run", "step_1", dict(state))
    config = tmp_path / "without_biases"
    convert(tmp_path / "run" / "step_1", tmp_path / "checkpoint", to="torchtitan", config=config)
    found = from_dcp(tmp_path / "checkpoint" / "step-0")
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], found["layers.0.attention.wq.weight"])

    save_checkpoint(tmp_path / "run", "step_2", model)
    with pytest.raises(UnsupportedState, match=r"TorchTitan's deepseek_v3 has no tensor for .*\.bias"):
        convert(tmp_path / "run" / "step_2", tmp_path / "other", to="torchtitan", config=tmp_path / "config")


def test_heads_that_are_rotated_otherwise_are_refused(tmp_path: Path) -> None:
    """TorchTitan's DeepSeek-V3 has one way only, and its config none to say so."""
    model = random_model("deepseek-v3")
    model.config.rope_interleave = False
    model.config.save_pretrained(tmp_path / "config")
    save_checkpoint(tmp_path / "run", "step_1", model)
    with pytest.raises(UnsupportedState, match="rope_interleave=false"):
        convert(tmp_path / "run" / "step_1", tmp_path / "checkpoint", to="torchtitan", config=tmp_path / "config")
    assert not (tmp_path / "checkpoint").exists()
