"""Names of the tag that are not the model's, and the reverse: the same message on the same sizes and on all others."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nxd_ckpt
from nxd_ckpt import Checkpointer, Topology, load_checkpoint, save_checkpoint
from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.errors import InvalidTag, KeyMismatch, OptimizerMismatch, ShapeMismatch
from nxd_ckpt.loading.load import load
from nxd_ckpt.loading.options import LoadOptions, LoadRequest
from nxd_ckpt.storage.local import LocalStorage
from tests.filters.named import Named, stepped
from tests.hugging_face.saved import live
from tests.support.rank_pool import RankPool
from tests.support.ranks import on_ranks
from tests.support.refusals import refusal

DIFFER = (
    "the names in the checkpoint and in the model differ; missing from the checkpoint: '3.weight' (did you mean "
    "'2.weight'?); unexpected in the checkpoint: '2.weight' (did you mean '3.weight'?); if these were renamed, pass "
    "key_mapping={'3.weight': '2.weight'}; load with strict=False to take the names that both have; tensors of the "
    "model that would keep their initial values: 1"
)
LOOSE = (
    "loading with strict=False: left as they are: '3.weight'; not in the model: '2.weight'; if these were renamed, "
    "pass key_mapping={'3.weight': '2.weight'}"
)
SMALLER = "loading with strict=False: not in the model: '2.weight'"

SIZES = {
    "the same": (Topology(pp=2), [[0, 1], [3, 4]]),
    "layers moved": (Topology(pp=2), [[0], [1, 3, 4]]),
    "one stage": (Topology(), [[0, 1, 3, 4]]),
    "three stages": (Topology(pp=3), [[0], [1], [3, 4]]),
    "tensor-parallel": (Topology(pp=2, tp=2), [[0, 1], [3, 4]]),
    "expert-parallel": (Topology(dp=2, ep=2), [[0, 1, 3, 4]]),
}


def layers(numbers: Sequence[int], value: float = 1.0) -> Named:
    return Named({f"{number}.weight": value for number in numbers})


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipeline stages, of the layers 0 and 1, and 2 and 4."""
    directory = tmp_path_factory.mktemp("stages")
    for rank, numbers in enumerate(([0, 1], [2, 4])):
        model = layers(numbers)
        at: dict[str, Any] = {"topology": Topology(pp=2, rank=rank), "run_id": "both", "async_save": True}
        save_checkpoint(directory, "t", model, stepped(model), durable=False, **at)
    nxd_ckpt.finalize_checkpoint()
    nxd_ckpt.close_checkpointers()
    return directory


def outcomes(
    directory: Path, sizes: Topology, stages: Sequence[Sequence[int]], frozen: str = "", **options: Any
) -> set[str]:
    """Errors of the ranks, which hold layers by pipeline stage; with a ``frozen`` one they load an optimizer too."""

    def rank(agreement: Agreement) -> None:
        at = sizes.at(agreement.rank)
        model = layers(stages[at.pp_rank], 7.0)
        optimizer = None
        if frozen:
            optimizer = torch.optim.AdamW([each for name, each in model.named.items() if name != frozen])
        load([LocalStorage(directory)], "t", LoadRequest(at, agreement, model, optimizer, None, LoadOptions(**options)))
        held = model.held()
        assert {name: 7.0 if name == "3.weight" else 1.0 for name in held} == held

    return {f"{error}" for error in on_ranks(sizes.world_size, rank, timeout=60)}


@pytest.mark.parametrize("sizes", SIZES)
def test_names_differ_alike_on_all_sizes(stages: Path, sizes: str, caplog: pytest.LogCaptureFixture) -> None:
    """Both sides are named, by one message; a layer of another stage is on no side. Without strict one rank warns."""
    topology, numbers = SIZES[sizes]
    assert {DIFFER} == outcomes(stages, topology, numbers)
    with caplog.at_level(logging.WARNING):
        assert {"None"} == outcomes(stages, topology, numbers, strict=False)
        assert [LOOSE] == caplog.messages
        caplog.clear()
        smaller = [[number for number in own if number != 3] for own in numbers]
        assert {"None"} == outcomes(stages, topology, smaller, strict=False)
        assert [SMALLER] == caplog.messages
    assert {"None"} == outcomes(stages, topology, numbers, ignore_keys="model/[23]*")


@pytest.mark.parametrize("sizes", ["layers moved", "one stage", "three stages"])
def test_state_that_no_optimizer_takes(stages: Path, sizes: str, caplog: pytest.LogCaptureFixture) -> None:
    """A parameter that is frozen now had state: refused also where another stage could have had it."""
    topology, numbers = SIZES[sizes]
    numbers = [[2 if number == 3 else number for number in own] for own in numbers]
    [error] = outcomes(stages, topology, numbers, frozen="2.weight")
    assert "has state for 2.weight (1 parameters), which the live optimizer does not hold" in error
    assert "leave that state out with ignore_keys=['optim/2.weight'], or with strict=False" in error
    assert {"None"} == outcomes(stages, topology, numbers, frozen="2.weight", ignore_keys=["optim/2.weight"])
    with caplog.at_level(logging.WARNING):
        assert {"None"} == outcomes(stages, topology, numbers, frozen="2.weight", strict=False)
    [warning] = caplog.messages
    assert "the optimizer state of 2.weight is left out" in warning


def test_a_tag_of_another_type_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """No rank waits for one that could not tell the others what it loads."""
    model = torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path, "t", model)

    def loaded(agreement: Agreement) -> Any:
        request = LoadRequest(Topology(dp=2, rank=agreement.rank), agreement, model, None)
        return load([LocalStorage(tmp_path)], b"t", request)  # type: ignore[arg-type]

    assert [InvalidTag, InvalidTag] == [type(outcome) for outcome in on_ranks(2, loaded, timeout=20)]


def _mesh_model(numbers: Sequence[int], *, sharded: bool) -> torch.nn.Module:
    model = torch.nn.Module()
    for number in numbers:
        model.add_module(str(number), torch.nn.Linear(2, 8, bias=False))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)))
    return model


def _on_mesh(rank: int, directory: Path, numbers: Sequence[int], saves: bool) -> str:
    model = _mesh_model(numbers, sharded=True)
    with Checkpointer(directory) as checkpointer:
        if saves:
            checkpointer.save("t", model, torch.optim.SGD(model.parameters(), momentum=0.9))
            return ""
        return refusal(lambda: checkpointer.load("t", model))


def test_a_mesh_and_a_single_process_say_the_same(
    gloo_ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one tag; a smaller model is told what it leaves behind, and its optimizer too."""
    gloo_ranks.run(_on_mesh, tmp_path, [0, 1, 2], True)
    assert [f"KeyMismatch: {DIFFER}"] * 4 == gloo_ranks.run(_on_mesh, tmp_path, [0, 1, 3], False)
    model = _mesh_model([0, 1, 3], sharded=False)
    with pytest.raises(KeyMismatch) as caught:
        load_checkpoint(tmp_path, "t", model)
    assert DIFFER == str(caught.value)
    load_checkpoint(tmp_path, "t", model, strict=False)
    smaller = _mesh_model([0, 1], sharded=False)
    load_checkpoint(tmp_path, "t", smaller, torch.optim.SGD(smaller.parameters(), momentum=0.9), strict=False)
    *warnings, last = caplog.messages
    assert [LOOSE, SMALLER] == warnings
    assert "the optimizer state of 2.weight is left out" in last


def test_the_advice_for_a_wider_layer_suffices(tmp_path: Path) -> None:
    """The error names every tensor of another shape in one option, and with that the rest is loaded."""

    def job(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    saved, wider = job(4), job(5)
    save_checkpoint(tmp_path, "t", *saved, durable=False)
    with pytest.raises(ShapeMismatch) as refused:
        load_checkpoint(tmp_path, "t", *wider)
    keys = ["*/0.weight", "*/0.bias", "*/1.weight"]
    assert [str(keys)] == re.findall(r"ignore_keys=(\[.*?\])", str(refused.value))
    load_checkpoint(tmp_path, "t", *wider, ignore_keys=keys)
    assert torch.equal(saved[0].state_dict()["1.bias"], wider[0].state_dict()["1.bias"])


def test_a_parameter_that_was_frozen_at_the_save(tmp_path: Path) -> None:
    """The error says how to train it from now on, and both ways do so."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))
    save_checkpoint(tmp_path, "t", model, torch.optim.AdamW(model[1:].parameters()), durable=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OptimizerMismatch, match=r"with ignore_keys=\['optim/0.weight', 'optim/0.bias'\], or with st"):
        load_checkpoint(tmp_path, "t", model, optimizer)
    load_checkpoint(tmp_path, "t", model, optimizer, ignore_keys=["optim/0.weight", "optim/0.bias"])
    load_checkpoint(tmp_path, "t", model, optimizer, strict=False)


@pytest.mark.parametrize("saved", ["NxD's", "Hugging Face's"])
def test_names_of_another_form_of_the_family(tmp_path: Path, saved: str) -> None:
    """Where the layers of one are fused in the other, a conversion helps, and strict=False would not."""
    forms = {"NxD's": ["mlp.gate_up_proj"], "Hugging Face's": ["mlp.gate_proj", "mlp.up_proj"]}
    names = {form: [f"model.layers.0.{layer}.weight" for layer in layers] for form, layers in forms.items()}
    models = {form: live(dict.fromkeys(["model.norm.weight", *own], torch.ones(2, 2))) for form, own in names.items()}
    save_checkpoint(tmp_path, "t", models.pop(saved), durable=False)
    [other] = models.values()
    with pytest.raises(KeyMismatch) as refused:
        load_checkpoint(tmp_path, "t", other)
    assert f"those of {saved} layers of a model of mapping" in str(refused.value)
    assert "nxd-ckpt convert TAG OUT --to hf" in str(refused.value)
    assert "strict=False" not in str(refused.value)
