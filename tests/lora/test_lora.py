"""Models with NxD's LoRA adapters: the base is loaded from what was saved without them, and adapters live like any
parameters: saved, resumed, cut for other sizes."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nxd_ckpt
from nxd_ckpt import Topology, convert, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.core.parameter_names import is_adapter
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import KeyMismatch, PartNotFound, TopologyMismatch, UnsupportedState
from tests.conversion.tags import as_nxd
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import write_config
from tests.interop.saving import save_as_every_rank
from tests.lora.doubles import LightningModule, LoraConfig, LoraModel, NxDModel
from tests.lora.sharded import CausalLM

TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    yield
    nxd_ckpt.close_checkpointers()


class Net(nn.Module):
    """Two layers to be wrapped, and a norm."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.q_proj, self.down_proj = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.register_buffer("seen", torch.tensor(float(seed)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.q_proj(self.norm(hidden)))
        return out


def lora(seed: int, **options: Any) -> LoraModel:
    return LoraModel(Net(seed), LoraConfig(target_modules=TARGETS, **options))


def trained(model: LoraModel) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)


def step(model: LoraModel, optimizer: Any) -> float:
    optimizer.zero_grad()
    loss = model(torch.arange(8.0).view(2, 4)).square().sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def base_of(model: LoraModel) -> dict[str, Any]:
    """Values by the names that the base had before."""
    state = model.module.state_dict()
    return {name.replace(".base_layer", ""): value.tolist() for name, value in state.items() if "lora_" not in name}


def values(model: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A directory with the base model, as it was before it was wrapped."""
    save_checkpoint(tmp_path, "pretrained_weight", Net(1), durable=False)
    return tmp_path


@pytest.mark.parametrize("wrap", [lambda model: model, NxDModel, lambda model: LightningModule(NxDModel(model))])
def test_the_base_is_loaded_into_wrapped_layers(pretrained: Path, wrap: Any) -> None:
    """What was saved without adapters fills the whole base; adapters stay as they are."""
    model = lora(2)
    before = {name: value.tolist() for name, value in model.named_parameters() if "lora_" in name}
    load_checkpoint(pretrained, "pretrained_weight", wrap(model), strict=False)
    assert values(Net(1)) == base_of(model)
    assert before == {name: value.tolist() for name, value in model.named_parameters() if "lora_" in name}


def test_a_strict_load_of_the_base_alone_says_that_adapters_are_missing(pretrained: Path) -> None:
    """As in torch: strict=False is what takes the base only."""
    with pytest.raises(KeyMismatch, match=r"missing from the checkpoint: 'q_proj\.lora_A\.weight'"):
        load_checkpoint(pretrained, "pretrained_weight", lora(2))


def test_prefix_and_key_mapping_go_before_base_names(tmp_path: Path) -> None:
    """Base names are found below a prefix; what key_mapping says of a wrapped layer counts."""
    state = {f"whole.{name}": value for name, value in Net(1).state_dict().items()}
    state["other"] = torch.full((4, 4), 5.0)
    save_checkpoint(tmp_path, "t", state, durable=False)
    model = lora(2)
    mapping = {"down_proj.base_layer.weight": "other"}
    load_checkpoint(tmp_path, "t", model, strict=False, prefix="whole.", key_mapping=mapping)
    expected = {**values(Net(1)), "down_proj.weight": [[5.0] * 4] * 4}
    assert expected == base_of(model)


@pytest.mark.parametrize("model", [Net(1), lora(1), {"elsewhere": torch.zeros(2)}])
def test_a_load_that_matches_nothing_is_an_error(tmp_path: Path, model: Any) -> None:
    """Also without strict, of any model: training would go on from random weights."""
    save_checkpoint(tmp_path, "t", {"up.weight": torch.ones(2)}, durable=False)
    with pytest.raises(KeyMismatch, match=r"no name in the checkpoint is one of the model: .*'up\.weight'.*"):
        load_checkpoint(tmp_path, "t", model, strict=False)


def test_a_hugging_face_directory_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    """The same of names that a mapping translates."""
    model = Model()
    write_config(tmp_path / "hf", model.config)
    write_safetensors(tmp_path / "hf", model.state())
    with pytest.raises(KeyMismatch, match="no name in the checkpoint is one of the model"):
        load_checkpoint(tmp_path / "hf", model=torch.nn.Linear(2, 2), strict=False)


def test_a_hugging_face_directory_fills_the_base(tmp_path: Path) -> None:
    """Rules go by the names of the base."""
    job = Job(Model())
    write_config(tmp_path / "hf", job.model.config)
    write_safetensors(tmp_path / "hf", job.model.state())
    model = LoraModel(CausalLM(job, Topology()), LoraConfig(target_modules=["q_proj", "gate_up_proj"]))
    load_checkpoint(tmp_path / "hf", model=model, strict=False)
    assert {name: value.tolist() for name, value in job.rank(job.model.state()).items()} == base_of(model)


def write_safetensors(directory: Path, state: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(state, directory / "model.safetensors")


def test_a_save_keeps_adapters_and_their_configuration(tmp_path: Path) -> None:
    """NxD's default: what is trained, under its names, marked as trained, with the optimizer's state by name."""
    model = lora(1)
    optimizer = trained(model)
    step(model, optimizer)
    save_checkpoint(tmp_path, "t", NxDModel(model), optimizer, durable=False)
    opened = open_checkpoint(tmp_path, "t")
    adapters = [f"{layer}.lora_{which}.weight" for layer in ("q_proj", "down_proj") for which in "AB"]
    assert {f"model/{name}" for name in adapters} == {name for name in opened.metadata if name.startswith("model/")}
    assert {*adapters} == {name.split("/")[1] for name in opened.metadata if name.endswith("/exp_avg")}
    assert opened.manifest is not None
    assert dict.fromkeys(adapters, True) == {name: spec.trainable for name, spec in opened.manifest.parameters.items()}
    document = torch.load(tmp_path / "t" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")["lora_config"]
    assert (2, 8, TARGETS) == (document["r"], document["lora_alpha"], document["target_modules"])


def test_a_resumed_run_is_the_same_run(pretrained: Path) -> None:
    """The base from its tag, adapters and optimizer from the run's: losses go on bit for bit."""
    run, model = pretrained / "run", lora(2)
    load_checkpoint(pretrained, "pretrained_weight", model, strict=False)
    optimizer = trained(model)
    step(model, optimizer)
    save_checkpoint(run, "step_1", model, optimizer, durable=False)
    expected = [step(model, optimizer) for _ in range(3)]

    resumed = lora(3)
    load_checkpoint(pretrained, "pretrained_weight", resumed, strict=False)
    again = trained(resumed)
    load_checkpoint(run, model=resumed, optimizer=again)
    assert expected == [step(resumed, again) for _ in range(3)]


def test_the_options_of_the_configuration_choose_what_is_saved(tmp_path: Path) -> None:
    """As NxD's state_dict() does: with the base, merged into it, with biases, with whole modules."""
    names: dict[str, dict[str, Any]] = {
        "base": {"save_lora_base": True, "merge_sharded_lora": False},
        "off": {"save_lora_base": True},  # merge_sharded_lora, NxD's default, turns it off
        "merged": {"save_lora_base": True, "merge_lora": True, "merge_sharded_lora": False},
        "biases": {"bias": "all"},
        "modules": {"modules_to_save": ["norm"]},
    }
    saved = {}
    for tag, options in names.items():
        save_checkpoint(tmp_path, tag, lora(1, **options), durable=False)
        saved[tag] = {*load_names(tmp_path, tag)}
    adapters = {f"{layer}.lora_{which}.weight" for layer in ("q_proj", "down_proj") for which in "AB"}
    whole = {*lora(1).module.state_dict()}
    assert {
        "base": whole | {"lora_config"},
        "off": adapters | {"lora_config"},
        "merged": {*Net(1).state_dict()},
        "biases": adapters | {"lora_config", "norm.bias", "q_proj.base_layer.bias"},
        "modules": adapters | {"lora_config", "norm.weight", "norm.bias"},
    } == saved


def load_names(directory: Path, tag: str) -> list[str]:
    held: dict[str, Any] = {}
    load_checkpoint(directory, tag, held)
    return list(held)


def test_a_tag_with_its_base_is_loaded_whole(tmp_path: Path) -> None:
    """Where the tag has the base, all of it must be there under strict."""
    options = {"save_lora_base": True, "merge_sharded_lora": False}
    model, live = lora(1, **options), lora(2, **options)
    save_checkpoint(tmp_path, "t", model, durable=False)
    load_checkpoint(tmp_path, "t", live)
    assert values(model.module) == values(live.module)

    state = {name: value for name, value in model.module.state_dict().items() if name != "norm.bias"}
    save_checkpoint(tmp_path, "without", state, durable=False)
    with pytest.raises(KeyMismatch, match=r"missing from the checkpoint: 'norm\.bias'"):
        load_checkpoint(tmp_path, "without", live)


def test_merged_weights_are_those_of_a_plain_model(tmp_path: Path) -> None:
    """A merged tag is one of the base model; the model trains on, unmerged, after the next forward pass."""
    model = lora(1, save_lora_base=True, merge_lora=True, merge_sharded_lora=False)
    step(model, trained(model))
    hidden = torch.randn(2, 4)
    expected = model(hidden)
    save_checkpoint(tmp_path, "t", model, durable=False)
    plain = Net(2)
    load_checkpoint(tmp_path, "t", plain)
    assert torch.allclose(expected, plain(hidden), atol=1e-5)
    assert torch.allclose(expected, model(hidden), atol=1e-5)


def test_merged_weights_are_not_taken_for_the_base(tmp_path: Path) -> None:
    """Adapters would count twice: after a save with its base, or a load into what will be unmerged."""
    model = lora(1, save_lora_base=True, merge_sharded_lora=False)
    save_checkpoint(tmp_path, "t", model, durable=False)
    model.merge_lora()
    with pytest.raises(UnsupportedState, match=r"call the LoRA model's unmerge_lora\(\) first"):
        save_checkpoint(tmp_path, "u", model, durable=False)
    with pytest.raises(UnsupportedState, match="merged into the base weights"):
        load_checkpoint(tmp_path, "t", model)


def test_another_scaling_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same adapters would do something else."""
    save_checkpoint(tmp_path, "t", lora(1), durable=False)
    with caplog.at_level(logging.WARNING):
        load_checkpoint(tmp_path, "t", lora(2, lora_alpha=16))
    assert "saved with lora_alpha=8, the live LoraConfig has 16: they will have another effect" in caplog.text


JOB = Model(heads=4, kv_heads=4, head_dim=2, intermediate=8)
CUT_TARGETS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def cut_lora(at: Topology, seed: int | None) -> LoraModel:
    """A Llama with adapters, of which this rank has its part of a whole that ``seed`` makes; None: zeros."""
    job = Job(JOB, tp=at.tp, qkv="coalesced")
    model = LoraModel(CausalLM(job, at), LoraConfig(target_modules=CUT_TARGETS))
    for name, parameter in model.named_parameters():
        if seed is not None and "lora_" in name and "o_proj.lora_B" not in name:
            parameter.data = part(whole(name, seed), name, at)
        else:
            parameter.data.zero_()  # a B that is zero yet tells by its values nothing of how it is cut
    return model


def whole(name: str, seed: int) -> torch.Tensor:
    """All of an adapter's parameter."""
    wide, hidden = JOB.intermediate, JOB.hidden
    rows = {"qkv_proj": 3 * hidden, "o_proj": hidden, "gate_up_proj": 2 * wide, "down_proj": hidden}
    columns = {"qkv_proj": hidden, "o_proj": hidden, "gate_up_proj": hidden, "down_proj": wide}
    layer = next(layer for layer in rows if layer in name)
    shape = (2, columns[layer]) if "lora_A" in name else (rows[layer], 2)
    count = shape[0] * shape[1]
    return torch.arange(count).float().view(shape) + 1000 * seed + 7 * len(name)


def part(value: torch.Tensor, name: str, at: Topology) -> torch.Tensor:
    """What a rank computes with: of a B the rows of its base layer, which lie side by side as q, k and v do."""
    strides = {"qkv_proj.lora_B": 3, "gate_up_proj.lora_B": 2, "o_proj.lora_A": 1, "down_proj.lora_A": 1}
    found = next((stride for layer, stride in strides.items() if layer in name), None)
    if found is None:
        return value.clone()
    dim = 1 if "lora_A" in name else 0
    return torch.cat([one.chunk(at.tp, dim)[at.tp_rank] for one in value.chunk(found, dim)], dim).clone()


def with_moments(model: LoraModel, moment_of: Callable[[str, torch.Tensor], torch.Tensor]) -> torch.optim.AdamW:
    """An optimizer of the adapters that has stepped once, and has these moments."""
    optimizer = trained(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            moment = moment_of(name, parameter.detach().clone())
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment + 1}
    return optimizer


def moments(model: LoraModel, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    return {
        name: optimizer.state[parameter]["exp_avg"].tolist()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def joined(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What NxD gathers of all ranks' parts of an adapter: an A by columns, a B by rows, or one that each rank has."""
    is_cut = parts[0].shape != whole(name, 1).shape
    return torch.cat(list(parts), 1 if "lora_A" in name else 0) if is_cut else parts[0]


def require_loaded(directory: Path, live_tp: int, verify: bool = True) -> None:
    """Each of so many ranks gets its part of the adapters of seed 1, and of their moments, of seed 2."""
    for rank in range(live_tp):
        at = Topology(tp=live_tp).at(rank)
        model, expected = cut_lora(at, None), cut_lora(at, 1)
        optimizer = trained(model)
        load_checkpoint(directory, "t", model, optimizer, topology=at, verify=verify)
        assert values(expected.module) == values(model.module)
        own = with_moments(expected, lambda name, _, at=at: part(whole(name, 2), name, at))  # type: ignore[misc]
        assert moments(expected, own) == moments(model, optimizer)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 4), (4, 2), (1, 2)])
def test_adapters_are_cut_for_other_sizes(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Model and optimizer; a B is cut as its base layer is, whose stride its own attributes do not tell."""
    saved_tp, live_tp = sizes
    topologies = [Topology(tp=saved_tp).at(rank) for rank in range(saved_tp)]

    def what(rank: int) -> dict[str, Any]:
        model = cut_lora(topologies[rank], 1)
        optimizer = with_moments(model, lambda name, _: part(whole(name, 2), name, topologies[rank]))
        return {"model": model, "optimizer": optimizer}

    save_as_every_rank(tmp_path, "t", topologies, what, durable=False)
    require_loaded(tmp_path, live_tp)


@pytest.mark.parametrize(
    ("sizes", "order"),
    [*((sizes, "model order") for sizes in [(2, 2), (2, 1), (2, 4), (4, 2), (1, 2)]), ((2, 4), "sorted")],
)
def test_the_optimizer_of_gathered_adapters_loads(tmp_path: Path, sizes: tuple[int, int], order: str) -> None:
    """NxD gathers the adapters into the model's files, and leaves the moments in those of their ranks."""
    saved_tp, live_tp = sizes
    topologies = [Topology(tp=saved_tp).at(rank) for rank in range(saved_tp)]
    all_parts: dict[str, list[torch.Tensor]] = {
        name: [part(whole(name, 1), name, at) for at in topologies]
        for name, _ in cut_lora(topologies[0], 1).named_parameters()
        if "lora_" in name
    }

    def what(rank: int) -> dict[str, Any]:
        model = cut_lora(topologies[rank], 1)
        optimizer = with_moments(model, lambda name, _: part(whole(name, 2), name, topologies[rank]))
        state = {name: joined(name, parts) * ("o_proj.lora_B" not in name) for name, parts in all_parts.items()}
        names = state if order == "model order" else sorted(state)
        return {"model": {name: state[name] for name in names}, "optimizer": optimizer.state_dict()}

    save_as_every_rank(tmp_path, "t", topologies, what, durable=False)
    as_nxd(tmp_path / "t")
    require_loaded(tmp_path, live_tp, verify=False)


SHARED = Model(heads=4, kv_heads=1, head_dim=2, intermediate=8)


def shared_lora(at: Topology, seed: int | None) -> LoraModel:
    """A Llama whose ranks all keep a copy of its one key-value head, with adapters; NxD marks these as cut."""
    job = Job(SHARED, tp=at.tp, qkv="linear", copies=at.tp)
    model = LoraModel(CausalLM(job, at), LoraConfig(target_modules=["qkv_proj"]))
    for module in model.module.modules():
        if hasattr(module, "weight_k"):
            module.kv_size_multiplier = at.tp  # type: ignore[assignment]
    for name, parameter in model.named_parameters():
        parameter.data.zero_()
        if seed is not None and "lora_" in name:
            everything = torch.arange(16.0).view(8, 2) if "weight_q" in name else torch.arange(4.0).view(2, 2)
            everything = torch.arange(16.0).view(2, 8) if "lora_A" in name else everything
            own = everything.chunk(at.tp)[at.tp_rank] if "weight_q" in name else everything
            parameter.data = own + 100 * seed + len(name)
    return model


@pytest.mark.parametrize("live_tp", [1, 2, 4])
def test_rows_that_nxd_dropped_are_missed_by_name(tmp_path: Path, live_tp: int) -> None:
    """Of what it gathers of attention with kv_size_multiplier, NxD keeps one part in so many: here the first rank's."""
    topologies = [Topology(tp=2).at(rank) for rank in range(2)]
    first = dict(shared_lora(topologies[0], 1).module.named_parameters())
    state = {name: value.detach() for name, value in first.items() if "lora_" in name}
    save_as_every_rank(tmp_path, "t", topologies, lambda rank: {"model": dict(state)}, durable=False)
    as_nxd(tmp_path / "t")
    for rank in range(live_tp):
        at = Topology(tp=live_tp).at(rank)
        model = shared_lora(at, None)
        with pytest.raises(PartNotFound, match=r"same rows of model/.*qkv_proj\.lora_B\.weight_q, though each trains"):
            load_checkpoint(tmp_path, "t", model, topology=at, verify=False)
        load_checkpoint(tmp_path, "t", model, topology=at, verify=False, ignore_keys=["model/*lora_B*"], strict=False)
        assert all(bool(value.any()) == ("lora_A" in name) for name, value in model.named_parameters())


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (2, 4), (4, 2), (4, 4), (1, 2)])
@pytest.mark.parametrize("is_ours", [True, False])
def test_adapters_of_shared_key_value_heads_load(tmp_path: Path, sizes: tuple[int, int], is_ours: bool) -> None:
    """Each rank has all of k's and v's B, and rows of its own of q's; NxD's tags are those of merge_sharded_lora=False.
    """
    saved_tp, live_tp = sizes
    topologies = [Topology(tp=saved_tp).at(rank) for rank in range(saved_tp)]

    def what(rank: int) -> dict[str, Any]:
        model = shared_lora(topologies[rank], 1)
        return {"model": model, "optimizer": with_moments(model, lambda _, value: value)}

    save_as_every_rank(tmp_path, "t", topologies, what, durable=False)
    if not is_ours:
        as_nxd(tmp_path / "t")
    for rank in range(live_tp):
        at = Topology(tp=live_tp).at(rank)
        model, expected = shared_lora(at, None), shared_lora(at, 1)
        optimizer = trained(model)
        load_checkpoint(tmp_path, "t", model, optimizer, topology=at, verify=is_ours)
        assert values(expected.module) == values(model.module)
        own = with_moments(expected, lambda _, value: value)
        assert moments(expected, own) == moments(model, optimizer)


def equal_lora(at: Topology) -> LoraModel:
    """A Llama after a step or none: each rank made its A from the same seed, and its B is zero."""
    model = cut_lora(at, None)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape) + len(name)
    return model


def test_what_is_equal_on_all_ranks_is_unsharded_as_it_is_cut(tmp_path: Path) -> None:
    """Of an A that is equal on all ranks, each has columns of its own all the same, and so has the optimizer."""
    topologies = [Topology(tp=2).at(rank) for rank in range(2)]

    def what(rank: int) -> dict[str, Any]:
        model = equal_lora(topologies[rank])
        return {"model": model, "optimizer": with_moments(model, lambda _, value: value)}

    save_as_every_rank(tmp_path, "t", topologies, what, durable=False)
    convert(tmp_path / "t", tmp_path / "one", to="tag", tp=1)
    held: dict[str, Any] = {}
    load_checkpoint(tmp_path, "one", held)
    parts = [dict(equal_lora(at).module.named_parameters()) for at in topologies]
    for name in filter(is_adapter, parts[0]):
        assert torch.equal(joined(name, [values[name].detach() for values in parts]), held[name]), name
    metadata = open_checkpoint(tmp_path, "one").metadata
    shapes = {name: metadata[f"optim/{name}/exp_avg"].shape for name in filter(is_adapter, parts[0])}
    assert {name: held[name].shape for name in shapes} == shapes


@pytest.mark.parametrize("is_ours", [True, False])
def test_adapters_that_no_layer_describes_are_not_believed_to_be_whole(tmp_path: Path, is_ours: bool) -> None:
    """Of a state dict, or a tag of NxD, equal values may be parts as well as copies."""
    topologies = [Topology(tp=2).at(rank) for rank in range(2)]

    def what(rank: int) -> dict[str, Any]:
        state = equal_lora(topologies[rank]).module.state_dict()
        return {"model": {name: value for name, value in state.items() if "lora_A" in name}}

    save_as_every_rank(tmp_path, "t", topologies, what, durable=False)
    if not is_ours:
        as_nxd(tmp_path / "t")
    with pytest.raises(TopologyMismatch, match=r"the cut of .*lora_A\.weight.* is not known; pass partitions="):
        convert(tmp_path / "t", tmp_path / "one", to="tag", tp=1)
    for rank in range(4):
        at = Topology(tp=4).at(rank)
        model = cut_lora(at, None)
        load_checkpoint(tmp_path, "t", model, topology=at, strict=False, verify=is_ours)
        parts = [dict(equal_lora(one).named_parameters()) for one in topologies]
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                both = torch.cat([values[name].detach() for values in parts], 1)
                is_cut = parameter.shape != parts[0][name].shape
                assert torch.equal(both.chunk(4, 1)[rank] if is_cut else parts[0][name], parameter), name


def test_what_is_zero_on_all_ranks_is_recorded_as_it_is_cut(tmp_path: Path) -> None:
    """The base layers say it; equal values are no reason to take parts for whole ones."""
    topologies = [Topology(tp=2).at(rank) for rank in range(2)]
    save_as_every_rank(
        tmp_path, "t", topologies, lambda rank: {"model": cut_lora(topologies[rank], None)}, durable=False
    )
    opened = open_checkpoint(tmp_path, "t")
    assert opened.manifest is not None
    cuts = {name: spec.partition for name, spec in opened.manifest.parameters.items() if ".layers.0." in name}
    at = "model.layers.0"
    assert {
        f"{at}.self_attn.qkv_proj.lora_A.weight": Partition(),
        f"{at}.self_attn.qkv_proj.lora_B.weight": Partition(0, 3, 2),
        f"{at}.self_attn.o_proj.lora_A.weight": Partition(1, 1, 2),
        f"{at}.self_attn.o_proj.lora_B.weight": Partition(),
        f"{at}.mlp.gate_up_proj.lora_A.weight": Partition(),
        f"{at}.mlp.gate_up_proj.lora_B.weight": Partition(0, 2, 2),
        f"{at}.mlp.down_proj.lora_A.weight": Partition(1, 1, 2),
        f"{at}.mlp.down_proj.lora_B.weight": Partition(),
    } == cuts


class Adapted(nn.Module):
    """A wrapper of somebody else's: its state dict is detached, and lacks what another one saves."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = Net(seed)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict()
        return {name: value for name, value in state.items() if "q_proj" not in name}


def test_names_and_identity_come_from_live_parameters(tmp_path: Path) -> None:
    """A state_dict() that ignores keep_vars, and leaves out a parameter that the optimizer holds."""
    model = Adapted(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_checkpoint(tmp_path, "t", model, optimizer, durable=False)
    opened = open_checkpoint(tmp_path, "t")
    assert {f"optim/{name}/exp_avg" for name, _ in model.named_parameters()} == {
        name for name in opened.metadata if name.endswith("/exp_avg")
    }
    live = Adapted(2)
    again = torch.optim.AdamW(live.parameters())
    load_checkpoint(tmp_path, "t", live, again)
    assert values(model) == values(live)
    first, second = ([state["exp_avg"].tolist() for state in one.state.values()] for one in (optimizer, again))
    assert first == second
