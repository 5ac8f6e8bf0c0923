"""Models with experts in TorchTitan's terms: the names of its own tables, and experts stacked as its adapters do it."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nxd_ckpt import save_checkpoint
from nxd_ckpt.convert import import_checkpoint, migrate
from nxd_ckpt.errors import UnsupportedState
from tests.hugging_face.families import random_model
from tests.hugging_face.reference import State
from tests.hugging_face.saved import differences
from tests.migrate.dcp_directory import from_dcp

pytestmark = [pytest.mark.plain, pytest.mark.once]

MODELS = {"qwen3-moe": "qwen3", "qwen3-moe-dense-layers": "qwen3", "deepseek-v3": "deepseek_v3"}


def titan_table(folder: str) -> dict[str, str]:
    """TorchTitan's own table of names, without conditions. Read, not imported: its models need a GPU's compiler."""
    spec = find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("torchtitan is not installed: see the Makefile")
    path = Path(spec.submodule_search_locations[0]) / "models" / folder / "state_dict_adapter.py"
    table: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict) and node.keys and all(isinstance(key, ast.Constant) for key in node.keys):
            table |= {hf: titan for hf, titan in ast.literal_eval(node).items() if titan is not None}
    assert "model.norm.weight" in table
    return table


def in_titans_terms(folder: str, state: State) -> State:
    """As ``from_hf`` of its adapters: experts stacked in order, everything else under another name."""
    table, stacks, named = titan_table(folder), dict[str, dict[int, torch.Tensor]](), State()
    for name, tensor in state.items():
        numbers = [int(number) for number in re.findall(r"(?<=\.)\d+(?=\.)", name)]
        titan = table[re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)]
        if len(numbers) == 2:
            stacks.setdefault(titan.format(numbers[0]), {})[numbers[1]] = tensor
        else:
            named[titan.format(*numbers)] = tensor
    return named | {name: torch.stack([held[number] for number in sorted(held)]) for name, held in stacks.items()}


@pytest.mark.parametrize(("name", "folder"), MODELS.items())
def test_a_jobs_model_has_torchtitans_names_and_stacks(tmp_path: Path, name: str, folder: str) -> None:
    """From a tag of tensor-parallel and expert-parallel ranks, bit for bit."""
    model = random_model(name)
    model.save_pretrained(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "run" / "step_1", dp=2, tp=2, pp=2, ep=2)
    migrate(
        tmp_path / "run" / "step_1", tmp_path / "checkpoint", to="torchtitan", config=tmp_path / "hf", model_only=True
    )
    expected = in_titans_terms(folder, dict(model.state_dict()))
    assert [] == differences(expected, from_dcp(tmp_path / "checkpoint" / "step-0"))


@pytest.mark.parametrize(("name", "folder"), MODELS.items())
def test_the_optimizer_follows(tmp_path: Path, name: str, folder: str) -> None:
    """Moments are stacked as the experts are; TorchTitan and plain torch DCP have the same ones."""
    model = random_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.config.save_pretrained(tmp_path / "config")
    save_checkpoint(tmp_path / "run", "step_1", model, optimizer)
    moments = {each: optimizer.state[parameter]["exp_avg"] for each, parameter in model.named_parameters()}

    migrate(tmp_path / "run" / "step_1", tmp_path / "checkpoint", to="torchtitan", config=tmp_path / "config")
    found = from_dcp(tmp_path / "checkpoint" / "step-1")
    for titan, tensor in in_titans_terms(folder, moments).items():
        assert torch.equal(tensor, found[f"optimizer.state.{titan}.exp_avg"]), titan
        assert torch.equal(torch.tensor(1.0), found[f"optimizer.state.{titan}.step"])
        assert 0.01 == found[f"optimizer.param_groups.{titan}.lr"]

    migrate(tmp_path / "run" / "step_1", tmp_path / "dcp", to="dcp", config=tmp_path / "config")
    plain = from_dcp(tmp_path / "dcp")
    for hf, tensor in moments.items():
        assert torch.equal(tensor, plain[f"optim.state.{hf}.exp_avg"]), hf


def test_queries_without_a_latent_vector_have_their_own_name(tmp_path: Path) -> None:
    """Not that of other models' queries; biases, which TorchTitan's model does not have, are refused."""
    model = random_model("deepseek-v3-whole-queries")
    model.config.save_pretrained(tmp_path / "config")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(".bias")}
    save_checkpoint(tmp_path / "run", "step_1", dict(state))
    migrate(tmp_path / "run" / "step_1", tmp_path / "checkpoint", to="torchtitan", config=tmp_path / "config")
    found = from_dcp(tmp_path / "checkpoint" / "step-0")
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], found["layers.0.attention.wq.weight"])
    assert titan_table("deepseek_v3")["model.layers.{}.self_attn.q_proj.weight"] == "layers.{}.attention.wq.weight"

    save_checkpoint(tmp_path / "run", "step_2", model)
    with pytest.raises(UnsupportedState, match=r"TorchTitan's deepseek_v3 has no tensor for .*\.bias"):
        migrate(tmp_path / "run" / "step_2", tmp_path / "other", to="torchtitan", config=tmp_path / "config")


def test_heads_that_are_rotated_otherwise_are_refused(tmp_path: Path) -> None:
    """TorchTitan's DeepSeek-V3 has one way only, and its config none to say so."""
    model = random_model("deepseek-v3")
    model.config.rope_interleave = False
    model.config.save_pretrained(tmp_path / "config")
    save_checkpoint(tmp_path / "run", "step_1", model)
    with pytest.raises(UnsupportedState, match="rope_interleave=false"):
        migrate(tmp_path / "run" / "step_1", tmp_path / "checkpoint", to="torchtitan", config=tmp_path / "config")
    assert not (tmp_path / "checkpoint").exists()
