"""What is no checkpoint of one known layout, or contradicts itself, is refused by name, and nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import convert, load_checkpoint
from nxd_ckpt.core.names import rank_file
from nxd_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    IncompatibleState,
    InvalidArgument,
    MalformedFile,
    OptimizerMismatch,
    PartNotFound,
    UnsafePickle,
    UnsupportedState,
)
from nxd_ckpt.output.locations import Location, locate_input
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.choosing import own_place
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import write_config
from tests.migrate.layouts import untrained
from tests.migrate.written import pickled_metadata_of, write_nxd, write_nxdt, write_optimum
from tests.migrate.written_by_torch_xla import write_fsdp, write_xm_save

JOB = Job(Model(heads=8, head_dim=2), tp=4, pp=2, qkv="linear", copies=2)
PLAIN = Job(Model())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``checkpoint-3`` of optimum-neuron. Tests change a copy."""
    return write_optimum(tmp_path_factory.mktemp("optimum"), untrained(JOB), dp=2)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of torch-xla's FSDP ranks. Tests change a copy."""
    return write_fsdp(tmp_path_factory.mktemp("fsdp") / "old", untrained(PLAIN))


def refused(source: Path, kind: type[CheckpointError], complaint: str, **options: Any) -> None:
    """In every form, and without a trace."""
    out = source.parent / "out"
    for form in ("hf", "dcp", "tag", "torchtitan"):
        with pytest.raises(kind, match=complaint):
            convert(source, out / form, **{"names": "hf", "to": form, "optimizer": form == "hf" or None, **options})
    assert not out.exists()


Damage = Callable[[Path], Any]
Change = Callable[[Any], Any]


def _json(path: str, change: Change) -> Damage:
    def damage(place: Path) -> None:
        content = json.loads((place / path).read_text())
        change(content)
        (place / path).write_text(json.dumps(content))

    return damage


def _metadata(change: Change, stage: int = 0) -> Damage:
    return _json(f"shards/mp_metadata_pp_rank_{stage}.json", change)


def _config(**changes: Any) -> Damage:
    return _json("config.json", lambda content: content.update(changes))


def _another_name(content: Any) -> None:
    content["parameters"]["model.extra.weight"] = {"tensor_model_parallel": False}


def _without_a_name(content: Any) -> None:
    del content["parameters"]["model.norm.weight"]


def _with_lora(content: Any) -> None:
    content["model_weight_transformation_specs"][0]["specs"][0][1]["peft_type"] = "lora"


def _of_an_unknown_kind(content: Any) -> None:
    content["model_weight_transformation_specs"][0]["specs"][0][0] = "NewSpec"


def _of_two_versions(place: Path) -> None:
    (place / "shards" / "mp_metadata_pp_rank_1.json").unlink()
    torch.save(pickled_metadata_of(untrained(JOB)), place / "shards" / "mp_metadata_pp_rank_1.pt")


def _pickled(part: str | None, key: str = "", value: Any = None) -> Damage:
    """In the older form, with another value; without a part if none is named."""

    def damage(place: Path) -> None:
        content = pickled_metadata_of(untrained(JOB))
        if part is None:
            del content["gqa_qkv_metadata"]
        else:
            content[part][key] = value
        for path in (place / "shards").glob("mp_metadata_*.json"):
            torch.save(content, path.with_suffix(".pt"))
            path.unlink()

    return damage


def _saved(pattern: str, change: Change) -> Damage:
    """Files of ``torch.save`` whose content is changed."""

    def damage(place: Path) -> None:
        for path in place.glob(pattern):
            content = torch.load(path, weights_only=False)
            change(content)
            torch.save(content, path)

    return damage


def _optim(change: Change, rank: str = "_*") -> Damage:
    return _saved(f"shards/optim/dp_rank{rank}.pt", change)


def _other_groups(content: Any) -> None:
    first, second = content["param_groups"]
    second["params"].insert(0, first["params"].pop())


def _another_step(content: Any) -> None:
    for entries in content["base_state"].values():
        entries["step"] += 1


def _shards_of_twice_as_many_ranks(content: Any) -> None:
    """As context-parallel ranks leave it."""
    for entries in content["base_state"].values():
        entries["exp_avg"] = entries["exp_avg"][: -(-len(entries["exp_avg"]) // 2)].clone()


def _with_a_number(path: Path, number: Any = 0.5, *, of_all: bool = False) -> None:
    """In the place of a moment."""
    tree = torch.load(path, weights_only=False)
    optimizer = tree.get("optimizer", tree)
    states = optimizer.get("base_state", optimizer["state"])
    for state in states.values() if of_all else [states[1]]:
        state["exp_avg"] = number
    torch.save(tree, path)


def _a_number_in_the_first(place: Path) -> None:
    _with_a_number(place / "shards" / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")


@pytest.mark.parametrize(
    ("damage", "kind", "complaint"),
    [
        (_a_number_in_the_first, MalformedFile, r"exp_avg of .* is the number 0\.5, expected a tensor"),
        (_optim(_another_step, "_01_tp_rank_03_pp_rank_01"), IncompatibleState, "step differed between .* two saves"),
        (_optim(_shards_of_twice_as_many_ranks), OptimizerMismatch, r"exp_avg has shape .*, a shard of"),
        (_metadata(lambda content: content.pop("parameters")), MalformedFile, "rank_0.json: not the metadata of opt"),
        (_config(num_attention_heads=16), MalformedFile, "has num_attention_heads=16, but the metadata of .* 8"),
        (_metadata(_another_name), MalformedFile, r"lists model\.extra\.weight that the model's files do not have"),
        (_metadata(_without_a_name, 1), MalformedFile, r"files have model\.norm\.weight that it does not list"),
        (_metadata(_with_lora), UnsupportedState, r"self_attn has lora adapters, which are not carried"),
        (_metadata(_of_an_unknown_kind), UnsupportedState, "was made by NewSpec, which this version does not support"),
        (_of_two_versions, MalformedFile, "stages have metadata of two versions of optimum-neuron"),
        (_pickled("sharded_metadata", "extra", {"kind": "tied"}), MalformedFile, "metadata of stage 0 lists extra"),
        (_pickled(None), MalformedFile, r"mp_metadata_pp_rank_0\.pt: not the metadata of optimum-neuron 0\.0\.22 to"),
        (_pickled("gqa_qkv_metadata", "fuse_qkv", print), UnsafePickle, r"mp_metadata_pp_rank_0\.pt.*print"),
        (_optim(_other_groups), OptimizerMismatch, "does not usually make groups of .* parameters of this model"),
    ],
)
@pytest.mark.one_in(2)
def test_what_contradicts_itself(
    tmp_path: Path, written: Path, damage: Damage, kind: type[CheckpointError], complaint: str
) -> None:
    """Metadata of another save or model, adapters; tests/migrate/test_hostile.py has what all layouts refuse."""
    place = tmp_path / written.name
    shutil.copytree(written, place)
    damage(place)
    refused(place, kind, complaint)


@pytest.mark.parametrize("number", [0.5, 0, True, "0.5", [0.5], torch.tensor(0.5)], ids=repr)
@pytest.mark.parametrize("of_all", [False, True])
def test_a_number_in_the_place_of_a_moment(tmp_path: Path, number: Any, of_all: bool) -> None:
    """Where there is a single file; of one parameter, where others have a tensor there, and of all."""
    path = write_xm_save(tmp_path / "run" / "last.pth", untrained(PLAIN))
    _with_a_number(path, number, of_all=of_all)
    with pytest.raises(MalformedFile, match=r"exp_avg of 'model\.\S+' is .*, expected a tensor, (as exp_avg of|like)"):
        convert(path.parent, tmp_path / "step_3", names="hf", to="tag")
    assert not (tmp_path / "step_3").exists()


@pytest.mark.parametrize(
    ("part", "key", "number"),
    [
        ("state", "exp_avg", 0.5),
        ("state", "exp_avg", torch.tensor(0.5)),
        ("state", "exp_avg_sq", 1),
        ("base_state", "exp_avg_sq", 1),
        ("base_state", "momentum_buffer", "none"),
        ("base_state", "exp_avg", torch.tensor(0.5)),
        ("sharded_master_weights", None, 0.0),
    ],
)
def test_an_optimizer_of_another_program_with_a_number_for_a_moment(
    tmp_path: Path, part: str, key: str | None, number: Any
) -> None:
    """Loads refuse it too, before anything changes: with an optimizer that has no state yet it would be taken."""
    model, optimizer = stepped()
    state = optimizer.state_dict()
    if part != "state":
        state |= {"base_state": state["state"], "state": {}, "shape_info": {}, "sharded_master_weights": {}}
    if key is None:
        state[part][1] = number
    else:
        state[part][1][key] = number
    write_foreign(tmp_path / "step_3", model, state)
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(MalformedFile, match=r"(master weights|exp_avg|exp_avg_sq|momentum_buffer) of 'bias' is"):
        load_checkpoint(tmp_path, "step_3", model, torch.optim.AdamW(model.parameters()))
    assert torch.equal(before, model.weight)
    with pytest.raises(MalformedFile, match="of parameter 1 is"):
        convert(tmp_path / "step_3", tmp_path / "dcp", to="dcp")
    [problem] = verify_checkpoint(tmp_path, "step_3").problems
    assert "of parameter 1 is" in problem


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.ones(2), None])
def test_optimizers_with_one_number_for_a_parameter(tmp_path: Path, value: torch.Tensor | None) -> None:
    """NovoGrad has one second moment for each parameter, a tensor of one number; others keep None."""
    model, optimizer = stepped()
    state = optimizer.state_dict()
    state["state"][1]["exp_avg_sq"] = value
    write_foreign(tmp_path / "step_3", model, state)
    loaded = torch.optim.AdamW(model.parameters())
    load_checkpoint(tmp_path, "step_3", model, loaded)
    found = loaded.state_dict()["state"][1]["exp_avg_sq"]
    assert found is None if value is None else torch.equal(value, found)


def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer after a step."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def write_foreign(tag: Path, model: torch.nn.Module, optimizer: dict[str, Any]) -> None:
    """A tag of one rank, without our index."""
    for part, state in (("model", model.state_dict()), ("optim", optimizer)):
        (tag / part).mkdir(parents=True)
        torch.save(state, tag / part / rank_file(0, None, 0, 0))
    for marker in ("checkpoint", "done"):
        (tag / marker).write_text("1")


def test_torchtitan_needs_to_know_the_model(tmp_path: Path) -> None:
    write_xm_save(tmp_path / "last.pth", untrained(JOB))
    with pytest.raises(UnsupportedState, match=r"the model type is not known, .* pass the model's config\.json"):
        convert(tmp_path / "last.pth", tmp_path / "out", to="torchtitan")


def test_torchtitan_needs_a_count_of_steps(tmp_path: Path) -> None:
    """An optimizer without one is not put at step 0. The model alone is; other forms need no count."""
    named = write_nxdt(tmp_path, untrained(JOB), zero1=False)
    place = named.rename(named.with_name("run.ckpt"))
    for path in (place / "optim").iterdir():
        tree = torch.load(path)
        for entries in tree["state"].values():
            del entries["step"]
        torch.save(tree, path)
    (place / "user_content.pt").unlink()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(JOB.model.config))
    options: dict[str, Any] = {"config": config, "kv_size_multiplier": 2, "dry_run": True}
    with pytest.raises(UnsupportedState, match="without a count of steps, but TorchTitan continues at a step"):
        convert(place, tmp_path / "out", to="torchtitan", **options)
    assert convert(place, tmp_path / "out", to="torchtitan", optimizer=False, **options).step is None
    assert convert(place, tmp_path / "out", names="hf", to="tag", **options).step is None


ALREADY = "has Hugging Face's form already"
"""Refused in that form; in the others the model is read, and here it is none."""


TIERED = ("rank_0/step_1/checkpoint.pt", "rank_1/step_1/metadata.metadata")
"""Of two ranks, without the first one's metadata."""


def _files(*names: str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(b"")

    return write


@pytest.mark.parametrize(
    ("fill", "kind", "complaint"),
    [
        (_files("notes.txt"), CheckpointNotFound, r"it holds 'notes\.txt' \(not a checkpoint\)"),
        (_files("a/model/x", "b.ckpt/optim/x"), CheckpointNotFound, r"holds 'a' \(not a checkpoint\), 'b\.ckpt'"),
        (_files(".metadata"), MalformedFile, "not the metadata of torch DCP"),
        (_files("config.json", "model.safetensors"), CheckpointError, f"{ALREADY}|not a whole safetensors file"),
        (_files("config.json", "pytorch_model.bin"), CheckpointError, f"{ALREADY}|model.bin: expected a torch zip"),
        (_files("config.json", "pytorch_model-00001-of-00002.bin"), CheckpointError, f"{ALREADY}|1 of 2 shards"),
        (_files("pytorch_model-00001-of-00002.bin"), CheckpointError, f"{ALREADY}|1 of 2 shards"),
        (_files("adapter_model.bin", "optimizer.pt"), CheckpointError, f"{ALREADY}|PEFT adapter, .*merge_and_unload"),
        (_files(*TIERED), CheckpointNotFound, "has no .*rank_0/step_1/metadata.metadata, which"),
        (_files("step_300/checkpoint.pt"), CheckpointNotFound, "'step_300': it holds one file of torch.save"),
        (_files("rank_0/checkpoint.pt"), CheckpointNotFound, "'rank_0': it holds one file of torch.save"),
        (_files("tp0_sharded_checkpoint.safetensors"), CheckpointNotFound, "part of a model of NxD"),
    ],
)
def test_other_layouts_are_named(
    tmp_path: Path, fill: Callable[[Path], None], kind: type[CheckpointError], complaint: str
) -> None:
    """What is recognised and not carried, what is several checkpoints, and what is none."""
    place = tmp_path / "source"
    place.mkdir()
    fill(place)
    refused(place, kind, complaint, optimizer=None)


def test_a_tag_alone_does_not_say_which_model_it_is(tmp_path: Path) -> None:
    """Then config.json is asked for; and for the optimizer's names, where the writer is not known."""
    run = untrained(JOB)
    refused(write_nxdt(tmp_path, run), InvalidArgument, "the model type is not known")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(JOB.model.config))
    tag = write_nxd(tmp_path / "nxd" / "step_3", run)
    refused(tag, OptimizerMismatch, "pass saved_param_names=", config=config, kv_size_multiplier=2)


def test_other_copies_than_the_job_says(tmp_path: Path) -> None:
    """``kv_size_multiplier`` that contradicts what is beside the checkpoint, or the copies themselves."""
    run = untrained(JOB)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(JOB.model.config))
    place = write_nxdt(tmp_path, run)
    refused(place, InvalidArgument, "kv_size_multiplier=4, but .* has 2", config=config, kv_size_multiplier=4)
    torn = torch.load(place / "model" / "dp_rank_00_tp_rank_03_pp_rank_00.pt")
    torn["model.layers.0.self_attn.qkv_proj.weight_k"] += 1
    torch.save(torn, place / "model" / "dp_rank_00_tp_rank_03_pp_rank_00.pt")
    refused(place, CheckpointError, r"copies of a key-value head in .*weight_k differ", config=config)


def _of_rank(place: Path, rank: int) -> Path:
    return place / f"ckpt_rank-{rank:08d}-of-00000003.pth"


def _ranks(change: Change, rank: str = "*") -> Damage:
    return _saved(f"ckpt_rank-{rank}.pth", change)


def _a_rank_twice(place: Path) -> None:
    shutil.copy(_of_rank(place, 1), place / "last_rank-1.pth")


def _other_ranks(world_size: int) -> Change:
    return lambda content: content["shard_metadata"].update(world_size=world_size)


def _two_of_one_name(content: Any) -> None:
    first, second, *_ = content["shard_metadata"]["shard_info"]["_fsdp_wrapped_module.model.layers.0"].values()
    second["_orig_name"] = first["_orig_name"]


def _one_of_another_model(content: Any) -> None:
    next(iter(content["shard_metadata"]["shard_info"][""].values()))["_orig_size"] = [2000, 8]


def _one_not_described(content: Any) -> None:
    content["shard_metadata"]["shard_info"][""].popitem()


def _another_save(content: Any) -> None:
    content["optimizer"]["state"][0]["step"] += 1


def _groups_of_others(content: Any) -> None:
    first, second = content["optimizer"]["param_groups"]
    second["params"].append(first["params"].pop(0))


@pytest.mark.parametrize(
    ("damage", "kind", "complaint"),
    [
        (_a_rank_twice, MalformedFile, "several files of one rank, ckpt_rank-00000001-.*, last_rank-1.pth"),
        (_ranks(_other_ranks(4), "00000002-*"), MalformedFile, "have different shard_metadata"),
        (_ranks(_other_ranks(10**12)), MalformedFile, "at most 1048576 are allowed, found 1000000000000"),
        (_ranks(_two_of_one_name), MalformedFile, r"two entries of the model's state dict, .* are of model\."),
        (_ranks(_one_of_another_model), MalformedFile, r"says \(2000, 8\) of .*, but the 3 ranks hold shards"),
        (_ranks(_one_not_described), MalformedFile, "shard_metadata does not describe _fsdp_shard"),
        (_ranks(_another_save, "00000001-*"), MalformedFile, "have different param groups, steps or entries"),
        (_ranks(_groups_of_others), OptimizerMismatch, "not record which parameters .* leave the optimizer out"),
    ],
)
@pytest.mark.one_in(2)
def test_ranks_of_fsdp(
    fsdp: Path, tmp_path: Path, damage: Damage, kind: type[CheckpointError], complaint: str
) -> None:
    """Several files of a rank, two saves, metadata that contradicts the tensors."""
    place = Path(shutil.copytree(fsdp, tmp_path / "old"))
    damage(place)
    refused(place, kind, complaint)


def test_one_file_of_several(tmp_path: Path) -> None:
    """A rank's file of FSDP alone, one of several checkpoints, or no checkpoint at all."""
    run = untrained(PLAIN)
    place = write_fsdp(tmp_path / "old", run)
    refused(_of_rank(place, 0), PartNotFound, r"each of 3 ranks; those of ranks 1, 2 are not there")
    for name in ("a.pth", "b.pth"):
        write_xm_save(tmp_path / "several" / name, run)
    refused(tmp_path / "several", CheckpointNotFound, "holds several checkpoints; pass one of the files a.pth, b.pth")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    refused(tmp_path / "notes.txt", UnsupportedState, "notes.txt is a text")
    torch.save({"optimizer": {"state": {}, "param_groups": []}}, tmp_path / "optimizer.pth")
    refused(tmp_path / "optimizer.pth", PartNotFound, "has no model under the usual keys")


def test_names_of_torchtitan_are_not_taken_for_those_of_a_target(tmp_path: Path) -> None:
    """Its own directories are not migrated: their names would be in the output."""
    source = write_xm_save(tmp_path / "run" / "last.pth", untrained(PLAIN))
    config = write_config(tmp_path / "config", Model().config)
    convert(source, tmp_path / "checkpoint", to="torchtitan", config=config, optimizer=False)
    place, complaint = tmp_path / "checkpoint" / "step-0", "has no model under the usual keys; .*optim_key="
    refused(place, PartNotFound, complaint, optimizer=None)


def test_a_run_may_be_called_as_a_rank(tmp_path: Path) -> None:
    """Only what SageMaker's tiered storage wrote is named from the directory of all ranks, where it is read."""
    tag = write_nxd(tmp_path / "rank_3" / "step_5", untrained(JOB))
    assert (str(tmp_path / "rank_3"), "step_5") == own_place(tag, LocalStorage) == _place(locate_input(tag))
    tiered = tmp_path / "job" / "rank_1" / "step_5"
    _files("rank_1/step_5/checkpoint.pt", "rank_0/step_5/metadata.metadata")(tmp_path / "job")
    assert (str(tmp_path / "job"), "rank_1/step_5") == own_place(tiered, LocalStorage)


def _place(found: Location) -> tuple[str, str]:
    return found.directory, found.name
