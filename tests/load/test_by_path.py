"""A checkpoint that its own path names: one tag, a file, or what another program wrote into a directory of its own."""

import json
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from nxd_ckpt import (
    Checkpointer,
    close_checkpointers,
    convert,
    diff_checkpoints,
    has_checkpoint,
    load_checkpoint,
    load_keys,
    open_checkpoint,
)
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    DigestMismatch,
    KeyMismatch,
    MalformedFile,
    PartNotFound,
    ShapeMismatch,
    UnsafePickle,
    UnsupportedState,
)
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.support.damage import flip
from tests.support.rank_pool import RankPool


class Net(torch.nn.Module):
    """A model whose first weight has an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 9), torch.nn.Linear(9, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(given).relu())


Job = tuple[Net, torch.optim.Optimizer, Any]


def trained() -> Job:
    """A model after three steps, its optimizer and its scheduler."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def tag(path: Path, job: Job) -> Path:
    with Checkpointer(path) as checkpointer:
        checkpointer.save("step_3", *job, {"step": 3})
    return path / "step_3"


def tags(path: Path, job: Job) -> Path:
    """A directory of two, of which the newest is meant."""
    with Checkpointer(path) as checkpointer:
        checkpointer.save("step_1", Net())
        checkpointer.save("step_3", *job, {"step": 3})
    return path


def tar(write: Callable[[Path, Job], Path], name: str, mode: str) -> Callable[[Path, Job], Path]:
    def packed(path: Path, job: Job) -> Path:
        written = write(path / "packed", job)
        with tarfile.open(path / name, mode) as archive:  # type: ignore[call-overload]
            archive.add(written, written.name)
        return path / name

    return packed


def tar_of_tags(path: Path, job: Job) -> Path:
    """One of those in an archive."""
    run = tags(path / "packed", job)
    with tarfile.open(path / "run.tar", "w") as archive:
        for inner in ("step_3", "step_1"):
            archive.add(run / inner, inner)
    return path / "run.tar" / "step_3"


def file_of(name: str, content: Callable[[Job], Any]) -> Callable[[Path, Job], Path]:
    def write(path: Path, job: Job) -> Path:
        path.mkdir()
        torch.save(content(job), path / name)
        return path / name

    return write


def composers(path: Path, job: Job) -> Path:
    """Its directory, in which one of two names is a link."""
    file_of("ep0-ba3-rank0.pt", by_names)(path, job)
    (path / "latest-rank0.pt").symlink_to("ep0-ba3-rank0.pt")
    return path


def safetensors(path: Path, job: Job) -> Path:
    path.mkdir()
    save_file(job[0].state_dict(), path / "any name.safetensors")
    return path / "any name.safetensors"


def cached(path: Path, job: Job) -> Path:
    """A file of huggingface_hub's cache: a link to one without an ending."""
    blob = safetensors(path, job).rename(path / "0123abc")
    (path / "model.safetensors").symlink_to(blob.name)
    return path / "model.safetensors"


def shards(path: Path, job: Job) -> Path:
    """Two files with an index, as huggingface_hub writes them, without config.json."""
    path.mkdir()
    places = {}
    for number, (name, tensor) in enumerate(job[0].state_dict().items()):
        places[name] = f"model-{1 + number // 3:05}-of-00002.safetensors"
        others = {other: job[0].state_dict()[other] for other, place in places.items() if place == places[name]}
        save_file({**others, name: tensor}, path / places[name])
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def hugging_face(path: Path, job: Job) -> Path:
    """Of a kind of model that no mapping knows."""
    path.mkdir(parents=True)
    save_file(job[0].state_dict(), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    return path


def dcp(path: Path, job: Job) -> Path:
    model, optimizer, _ = job
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save_dcp(state, checkpoint_id=path, no_dist=True)
    return path


def by_names(job: Job) -> dict[str, Any]:
    """A file of Composer: all below "state", optimizers by their class and their state by name."""
    state = get_optimizer_state_dict(job[0], job[1])
    return {"state": {"model": job[0].state_dict(), "optimizers": {"AdamW": state}}, "rng": []}


def lightning(job: Job) -> dict[str, Any]:
    counts = {"epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.5", "loops": {}, "callbacks": {}}
    states = {"optimizer_states": [job[1].state_dict()], "lr_schedulers": [job[2].state_dict()]}
    return {"state_dict": job[0].state_dict(), **states, **counts}


def trainers(path: Path, job: Job) -> Path:
    """A checkpoint of transformers' Trainer."""
    hugging_face(path, job)
    torch.save(job[1].state_dict(), path / "optimizer.pt")
    torch.save(job[2].state_dict(), path / "scheduler.pt")
    torch.save({"python": (3, (1, 2), None)}, path / "rng_state.pth")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return path


def accelerates(path: Path, job: Job) -> Path:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*job)
    accelerator.save_state(str(path))
    return path


def files(**options: Any) -> Callable[[Path, Job], Path]:
    def write(path: Path, job: Job) -> Path:
        return Path(convert(tag(path / "run", job), path / "files", to="files", durable=False, **options).target)

    return write


def colossalais(path: Path, job: Job) -> Path:
    """Its booster's sharded files, in the directories of its own examples; see tests/migrate/sources.md."""
    states = {"modeling": job[0].state_dict(), "optimizer": job[1].state_dict()["state"]}
    for folder, name in (("modeling", "pytorch_model"), ("optimizer", "pytorch_optim")):
        (path / folder).mkdir(parents=True)
        places = {}
        for number, (key, value) in enumerate(states[folder].items(), start=1):
            places[key] = f"{name}-{number:05}.bin"
            torch.save({key: value}, path / folder / places[key])
        metadata = {"param_groups": "pytorch_optim_group.bin"} if folder == "optimizer" else {}
        index = {"metadata": {**metadata, "total_size": 1}, "weight_map": places}
        (path / folder / f"{name}.bin.index.json").write_text(json.dumps(index))
    torch.save(job[1].state_dict()["param_groups"], path / "optimizer" / "pytorch_optim_group.bin")
    torch.save(job[2].state_dict(), path / "lr_scheduler")
    (path / "running_states.json").write_text(json.dumps({"epoch": 0, "step": 3, "sample_start_index": 12}))
    return path


WITH_OPTIMIZER: dict[str, Callable[[Path, Job], Path]] = {
    "a tag": tag,
    "a directory of tags": tags,
    "a step": lambda path, job: tags(path, job) / "3",
    "an archive": tar(tag, "step_3.tar.xz", "w:xz"),
    "an archive by a short name": tar(tag, "step_3.tbz2", "w:bz2"),
    "a tag in an archive": tar_of_tags,
    "a script's file": file_of(
        "x.pt", lambda job: {"model": job[0].state_dict(), "optimizer": job[1].state_dict(), "step": 3}
    ),
    "a script's other file": file_of(
        "x.pth", lambda job: {"model_state_dict": job[0].state_dict(), "optimizer_state_dict": job[1].state_dict()}
    ),
    "a script's file with its settings": file_of(
        "x.pt",
        lambda job: {
            "model": {"width": 3},
            "optimizer": {"name": "adamw"},
            "model_state_dict": job[0].state_dict(),
            "optimizer_state_dict": job[1].state_dict(),
        },
    ),
    "a script's file called an archive": file_of(
        "checkpoint.pth.tar", lambda job: {"state_dict": job[0].state_dict(), "optimizer": job[1].state_dict()}
    ),
    "Lightning": file_of("x.ckpt", lightning),
    "Lightning's directory": lambda path, job: file_of("last.ckpt", lightning)(path, job).parent,
    "Composer": file_of("ep0-ba3", by_names),
    "Composer's directory": composers,
    "torch DCP": dcp,
    "transformers' Trainer": trainers,
    "accelerate": accelerates,
    "files of torch": files(),
    "safetensors files": files(use_safetensors=True),
    "a file of torch for each": files(unshard_strategy="one_file_per_tensor"),
    "chunks": files(unshard_strategy="chunks", size_per_shard="1KB", use_safetensors=True),
    "ColossalAI": colossalais,
}
MODEL_ONLY: dict[str, Callable[[Path, Job], Path]] = {
    "a state dict": file_of("x.bin", lambda job: job[0].state_dict()),
    "one safetensors file": safetensors,
    "a link to a safetensors file": cached,
    "the only file": lambda path, job: file_of("x.pt", lambda job: job[0].state_dict())(path, job).parent,
    "shards": shards,
    "an index": lambda path, job: shards(path, job) / "model.safetensors.index.json",
    "Hugging Face": hugging_face,
    "a packed directory": tar(hugging_face, "model.tgz", "w:gz"),
}
SOURCES = WITH_OPTIMIZER | MODEL_ONLY


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def differs(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, job: Job) -> list[str]:
    """The tensors that are not those of the job, and the learning rate."""
    wrong = [
        name for name, tensor in model.state_dict().items() if not torch.equal(whole(tensor), job[0].state_dict()[name])
    ]
    if optimizer is None:
        return wrong
    states, saved = optimizer.state_dict()["state"], job[1].state_dict()["state"]
    wrong += [
        f"{number} {name}"
        for number, state in saved.items()
        for name, value in state.items()
        if not torch.equal(whole(states[number][name]), value)
    ]
    return wrong + ([] if optimizer.param_groups[0]["lr"] == 1e-3 else ["lr"])


@pytest.mark.parametrize("source", SOURCES)
def test_it_loads_and_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str) -> None:
    """Into a live model, with the optimizer if it is there; through a Checkpointer too; each question is answered."""
    job = trained()
    path = SOURCES[source](tmp_path / "there", job)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0) if source in WITH_OPTIMIZER else None
    content = load_checkpoint(path, model=model, optimizer=optimizer)
    assert [] == differs(model, optimizer, job)
    if source in ("a tag", "an archive", "a tag in an archive", "a script's file"):
        assert {"step": 3} == content
    Checkpointer(path).load(model=(other := Net()))
    assert [] == differs(other, None, job)
    opened = open_checkpoint(path)
    assert {f"model/{name}" for name in job[0].state_dict()} <= {*opened.metadata}
    assert torch.equal(job[0].first.weight, next(load_keys(path, ["model/first.weight"])))
    assert () == verify_checkpoint(path).problems
    for command in ("inspect", "verify", "doctor"):
        assert 0 == main([command, str(path)]), capsys.readouterr()
    again = tag(tmp_path / "again", job)
    made = convert(path, tmp_path / "made", to="tag", names="own", durable=False).target
    for one in (path, made):
        names = [each.name for each in diff_checkpoints(again, one).tensors if each.name[:5] == "model"]
        assert [] == names
    assert 0 == main(["diff", str(path), str(path)]), capsys.readouterr()


@pytest.mark.parametrize("source", ["transformers' Trainer", "accelerate", "ColossalAI"])
def test_what_lies_beside_the_optimizer_loads_too(tmp_path: Path, source: str) -> None:
    """The scheduler; and what the trainer kept of the run is user content."""
    job = trained()
    path = WITH_OPTIMIZER[source](tmp_path / "there", job)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    content = load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert job[2].state_dict() == scheduler.state_dict()
    assert [] == differs(model, optimizer, job)
    kept = {"accelerate": None, "ColossalAI": {"running_states": {"epoch": 0, "step": 3, "sample_start_index": 12}}}
    assert kept.get(source, {"trainer_state": {"global_step": 3}}) == content


def test_of_several_optimizers_none_is_guessed(tmp_path: Path) -> None:
    """accelerate's files do not say whose parameters are whose; the model alone loads, and nothing is damaged."""
    job = trained()
    path = accelerates(tmp_path / "there", job)
    (path / "optimizer_1.bin").write_bytes((path / "optimizer.bin").read_bytes())
    model = Net()
    with pytest.raises(UnsupportedState, match=r"several optimizers, optimizer\.bin and .*optimizer_1\.bin"):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    load_checkpoint(path, model=model)
    assert [] == differs(model, None, job)
    assert () == verify_checkpoint(path).problems


@pytest.mark.parametrize("safe", [False, True])
def test_master_weights_stay_master_weights(tmp_path: Path, safe: bool) -> None:
    """In plain files they are among the entries of a parameter; from there they go into a tag again."""
    model, optimizer, _ = trained()
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    for name, entries in state["state"].items():
        entries["master_weights"] = model.state_dict()[name] + 1e-6
    (tmp_path / "whole").mkdir()
    torch.save(model.state_dict(), tmp_path / "whole" / "model.pt")
    torch.save(state, tmp_path / "whole" / "optim.pt")
    convert(tmp_path / "whole", tmp_path / "tag", to="tag", durable=False)
    convert(tmp_path / "tag", tmp_path / "files", to="files", use_safetensors=safe, durable=False)
    for path in ("whole", "tag", "files"):
        opened = open_checkpoint(tmp_path / path)
        assert opened.parts.master_weights
        found = opened.read("optim/first.weight/master_weights")
        assert torch.equal(model.first.weight + 1e-6, found)


@pytest.mark.parametrize(
    ("source", "file", "content"),
    [
        ("chunks", "optim.json", {"state": 3, "param_groups": [{}]}),
        ("safetensors files", "optim.json", {"state": {}, "param_groups": {"params": 1}}),
        ("ColossalAI", "optimizer/pytorch_optim.bin.index.json", {"weight_map": {"x": "pytorch_optim-00001.bin"}}),
        ("ColossalAI", "optimizer/pytorch_optim.bin.index.json", {"metadata": {"param_groups": "../x"}}),
    ],
)
def test_a_damaged_document_is_said(tmp_path: Path, source: str, file: str, content: Any) -> None:
    """By the class of damage, before anything changes."""
    path = WITH_OPTIMIZER[source](tmp_path / "there", trained())
    (path / file).write_text(json.dumps(content))
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MalformedFile):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def old_weights(path: Path, job: Job) -> Path:
    """A Hugging Face directory of before safetensors."""
    torch.save(job[0].state_dict(), hugging_face(path, job) / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    return path


@pytest.mark.parametrize(
    ("write", "file"),
    [(trainers, "optimizer.pt"), (accelerates, "optimizer.bin"), (old_weights, "pytorch_model.bin")],
)
def test_damage_that_the_files_own_sums_tell_changes_nothing(
    tmp_path: Path, write: Callable[[Path, Job], Path], file: str
) -> None:
    """One bit of the weights, or of the optimizer beside them."""
    job = trained()
    path = write(tmp_path / "there", job)
    bits = job[0].first.weight if write is old_weights else job[1].state[job[0].first.weight]["exp_avg"]
    flip(path / file, (path / file).read_bytes().index(bits.detach().numpy().tobytes()))
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DigestMismatch):
        load_checkpoint(path, None, model, None if write is old_weights else torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("source", "file"), [("safetensors files", "optim.safetensors"), ("chunks", "optim/index.json")]
)
def test_a_lost_file_of_the_optimizer_is_missed(tmp_path: Path, source: str, file: str) -> None:
    """It is no optimizer that never made a step."""
    path = WITH_OPTIMIZER[source](tmp_path / "there", trained())
    (path / file).unlink()
    model = Net()
    with pytest.raises(PartNotFound, match=r"optim\.safetensors"):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("source", ["a file of torch for each", "chunks", "ColossalAI"])
def test_files_of_two_saves_are_refused(tmp_path: Path, source: str) -> None:
    """What an index names is in its files, and nothing else is."""
    path = WITH_OPTIMIZER[source](tmp_path / "there", trained())
    folder = path / ("modeling" if source == "ColossalAI" else "model")
    index = next(folder.glob("*index.json"))
    content = json.loads(index.read_text())
    content["weight_map"]["another"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpoint, match="another"):
        load_checkpoint(path, model=Net())


@pytest.mark.parametrize("source", ["a file of torch for each", "ColossalAI", "chunks of torch"])
def test_what_another_file_holds_too_is_refused(tmp_path: Path, source: str) -> None:
    """An entry of the optimizer that the index gives to one file, and that another one has as well, or instead."""
    chunks = files(unshard_strategy="chunks", size_per_shard="200B")
    path = (chunks if source == "chunks of torch" else WITH_OPTIMIZER[source])(tmp_path / "there", trained())
    index = next((path / ("optimizer" if source == "ColossalAI" else "optim")).glob("*index.json"))
    first, second, *_ = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
    (index.parent / first).write_bytes((index.parent / second).read_bytes())
    model = Net()
    with pytest.raises(CorruptCheckpoint, match="two saves"):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("source", MODEL_ONLY)
def test_what_has_no_optimizer_says_so(tmp_path: Path, source: str) -> None:
    """Before anything changes."""
    path = SOURCES[source](tmp_path / "there", trained())
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PartNotFound, match="optimizer=None"):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_another_model_is_refused(tmp_path: Path) -> None:
    """By the names that differ, whatever the form."""
    job = trained()
    for number, source in enumerate(("a state dict", "one safetensors file", "torch DCP", "Hugging Face")):
        path = SOURCES[source](tmp_path / str(number), job)
        with pytest.raises(KeyMismatch, match="weight"):
            load_checkpoint(path, model=torch.nn.Linear(4, 9))


def test_what_was_taken_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = SOURCES["Lightning"](tmp_path / "there", trained())
    load_checkpoint(path, model=Net())
    assert "the model under 'state_dict', the optimizer under 'optimizer_states'" in caplog.text
    two_optimizers = {**lightning(trained()), "optimizer": trained()[1].state_dict(), "scheduler": None}
    two_optimizers["history"] = np.ones(2)
    content = load_checkpoint(file_of("x.ckpt", lambda job: two_optimizers)(tmp_path / "two", trained()), model=Net())
    assert content["optimizer_states"][0]["state"], "one is taken, and the other is user content"
    assert "scheduler" not in content
    assert [1.0, 1.0] == content["history"].tolist()
    load_checkpoint(SOURCES["the only file"](tmp_path / "alone", trained()), model=Net())
    assert "alone holds no tags: its file alone/x.pt is loaded" in caplog.text


def test_a_tag_may_hold_files_of_others(tmp_path: Path) -> None:
    """By its path it is a tag all the same, though they look like another program's checkpoint."""
    job = trained()
    path = tag(tmp_path / "run", job)
    torch.save({}, path / "rng.pth")
    hugging_face(tmp_path / "hf", job)
    for file in ("config.json", "model.safetensors"):
        (path / file).write_bytes((tmp_path / "hf" / file).read_bytes())
    model = Net()
    assert {"step": 3} == load_checkpoint(path, model=model)
    assert [] == differs(model, None, job)
    assert open_checkpoint(path).manifest is not None


def test_no_code_is_run(tmp_path: Path) -> None:
    """A pickle with more than data is refused by name; so is what no reader knows."""
    path = file_of("x.pt", lambda job: {"model": job[0].state_dict(), "hook": print})(tmp_path / "there", trained())
    with pytest.raises(UnsafePickle, match="print"):
        load_checkpoint(path, model=Net())
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match="empty or absent"):
        load_checkpoint(tmp_path / "empty", model=Net())


def test_a_url_names_one_too() -> None:
    """A tag, and a file beside tags."""
    run, job = f"memory://{uuid.uuid4().hex}", trained()
    with Checkpointer(run) as checkpointer:
        checkpointer.save("step_3", *job, {"step": 3})
    close_checkpointers()
    model = Net()
    assert {"step": 3} == load_checkpoint(f"{run}/step_3", model=model)
    assert [] == differs(model, None, job)
    assert "step_3" == open_checkpoint(f"{run}/step_3").tag


def loaded_by_ranks(rank: int, paths: list[str], with_optimizer: bool) -> list[list[str]]:
    """Load each path into an FSDP2 model; return what differs."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for path in paths:
        torch.manual_seed(7)
        model = Net()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=7.0) if with_optimizer else None
        load_checkpoint(path, model=model, optimizer=optimizer)
        found.append(differs(model, optimizer, trained()))
    return found


@pytest.mark.once
def test_ranks_take_their_shards(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Four of FSDP2, from what has no ranks."""
    for sources, with_optimizer in ((WITH_OPTIMIZER, True), (MODEL_ONLY, False)):
        written = [write(tmp_path / name, trained()) for name, write in sources.items()]
        assert 4 * [len(written) * [[]]] == gloo_ranks.run(loaded_by_ranks, [*map(str, written)], with_optimizer)


def test_a_tag_is_a_checkpoint_by_its_path(tmp_path: Path) -> None:
    """For ``has_checkpoint`` too, as load takes it; weights of others in a run's directory are none to resume from."""
    model, optimizer, _ = trained()
    with Checkpointer(tmp_path / "run") as saver:
        saver.save("step_3", model, optimizer)
    convert(tmp_path / "run" / "step_3", tmp_path / "step_3.tar")
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "begun" / "model").mkdir(parents=True)
    (tmp_path / "begun" / "checkpoint").write_text("1")
    paths = ("run", "run/step_3", "run/step_3/", "step_3.tar", "run/step_3/model", "begun", ".", "absent")
    assert [True] * 4 + [False] * 4 == [has_checkpoint(f"{tmp_path}/{path}") for path in paths]


class Counting(torch.nn.Module):
    """A module whose state is no tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_script_s_model_of_extra_state_alone_is_a_model(tmp_path: Path, nested: bool) -> None:
    """The state dict itself, and beside a step."""
    state = Counting(3).state_dict()
    torch.save({"model": state, "step": 7} if nested else state, tmp_path / "model.pt")
    live = Counting(0)
    assert ({"step": 7} if nested else None) == load_checkpoint(tmp_path / "model.pt", model=live)
    assert 3 == live.count


def test_a_script_s_state_under_a_key_of_its_own_is_told_how_to_be_read(tmp_path: Path) -> None:
    """The advice was to choose another tag, of a file."""
    torch.save({"net": {"w": torch.ones(2)}, "step": 7}, tmp_path / "model.pt")
    with pytest.raises(PartNotFound, match="convert a script's file with model_key="):
        load_checkpoint(tmp_path / "model.pt", model={})


def test_a_file_called_done_beside_a_model_makes_no_tag_of_it(tmp_path: Path) -> None:
    """A script leaves one after a download: the directory was a complete tag, which held nothing."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "done").touch()
    assert ["model/w"] == open_checkpoint(tmp_path).keys()


def test_a_model_may_have_an_optimizer_s_keys_as_names(tmp_path: Path) -> None:
    """It was a damaged optimizer, by an error of Python's."""
    weights = {"state": torch.ones(2), "param_groups": torch.zeros(3)}
    torch.save(weights, tmp_path / "model.pt")
    state: dict[str, Any] = {}
    load_checkpoint(tmp_path / "model.pt", model=state)
    assert all(torch.equal(weights[name], state[name]) for name in weights)


def test_a_key_that_ends_like_extra_state_is_the_script_s(tmp_path: Path) -> None:
    """Beside a model, and without one."""
    settings = {"model": {"has_extra_state": False}, "step": 7}
    torch.save({**settings, "state_dict": {"w": torch.ones(2)}}, tmp_path / "both.pt")
    torch.save({"step": 7, "my_extra_state": {"x": 1}}, tmp_path / "content.pt")
    state: dict[str, Any] = {}
    assert settings == load_checkpoint(tmp_path / "both.pt", model=state)
    assert ["w"] == list(state)
    assert {"step": 7, "my_extra_state": {"x": 1}} == load_checkpoint(tmp_path / "content.pt")


def test_state_by_number_that_is_of_another_parameter_is_refused(tmp_path: Path) -> None:
    """Param groups in another order, of as many parameters: the shapes tell. Nothing was said, and nothing fitted."""
    model, optimizer, _ = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    other = Net()
    exchanged = torch.optim.AdamW([other.second.weight, other.second.bias, other.first.weight, other.first.bias])
    with pytest.raises(ShapeMismatch, match=r"optim/second.weight/exp_avg: saved with shape \(9, 4\)"):
        load_checkpoint(tmp_path / "state.pt", model=other, optimizer=exchanged)
    assert not exchanged.state
