"""Live models load straight from a Hugging Face directory: each rank its slices, on any sizes, and all or none."""

import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file, save_file

from nxd_ckpt import Checkpointer, Topology, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    DtypeMismatch,
    InvalidArgument,
    KeyMismatch,
    PartNotFound,
    ShapeMismatch,
)
from nxd_ckpt.live import torch_xla as device
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.hugging_face.jobs import jobs
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, live, local_state, ranks_of, write_files, write_model
from tests.support.rank_pool import RankPool, WorkerError

JOB = Job(Model(heads=8), tp=4, qkv="linear", copies=2)


def held(model: torch.nn.Module) -> State:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def options_of(job: Job) -> dict[str, Any]:
    return {"kv_size_multiplier": job.copies, "hardware": job.hardware}


@given(job=jobs())
def test_every_rank_holds_what_a_conversion_by_hand_gives_it(
    tmp_path_factory: pytest.TempPathFactory, job: Job
) -> None:
    path = tmp_path_factory.mktemp("hf")
    state = write_model(path, job.model, shards=2)
    for at in ranks_of(job):
        expected = local_state(job, state, at)
        model = live(expected)
        assert load_checkpoint(path, model=model, topology=at, **options_of(job)) is None
        assert [] == differences(expected, held(model))


def test_a_rank_reads_hardly_more_than_its_part(tmp_path: Path) -> None:
    """Of files much larger than their headers: at most 1.1 times the bytes that it holds, with gaps between columns."""
    job = Job(Model(heads=8, head_dim=32, intermediate=512, vocab=512), tp=4, qkv="linear", copies=2)
    state = write_model(tmp_path, job.model, shards=2)
    log: list[Operation] = []
    for at in ranks_of(job):
        expected = local_state(job, state, at)
        model = live(expected)
        log.clear()
        storage = HookedStorage(LocalStorage(tmp_path), log.append)
        Checkpointer(tmp_path, topology=at, storage=storage).load(model=model, **options_of(job))
        assert [] == differences(expected, held(model))
        columns = ("o_proj.weight", "down_proj.weight")
        own = sum(tensor.nbytes * (job.tp if name.endswith(columns) else 1) for name, tensor in expected.items())
        assert sum(one.nbytes for one in log) <= 1.1 * own


def test_a_model_on_the_meta_device_gets_memory_for_its_part(tmp_path: Path) -> None:
    """Gets memory for this rank's part; parameters stay the same objects, with attributes, and so do ties."""
    state = write_model(tmp_path, JOB.model)
    at = Topology(tp=4, rank=2)
    expected = local_state(JOB, state, at)
    model = live(expected, device="meta")
    before = dict(model.named_parameters())
    before["lm_head.weight"].partition_dim = 0  # type: ignore[attr-defined]
    before["model.norm.weight"].requires_grad_(False)
    load_checkpoint(tmp_path, model=model, topology=at, **options_of(JOB))
    assert [] == differences(expected, held(model))
    after = dict(model.named_parameters())
    assert [] == [name for name in before if after[name] is not before[name]]
    assert vars(after["lm_head.weight"])["partition_dim"] == 0
    assert ["model.norm.weight"] == [name for name, parameter in after.items() if not parameter.requires_grad]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_are_loaded(tmp_path: Path, device: str) -> None:
    """A head that the files leave out is that of the embedding, tied in the live model or not."""
    model = Model()
    state = model.state()
    del state["lm_head.weight"]
    write_files(tmp_path, {**model.config, "tie_word_embeddings": True}, state)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    job = Job(model, fused_mlp=False)
    apart, tied = live(local_state(job, state, Topology()), device), live(local_state(job, state, Topology()), device)
    tied.lm_head.weight = tied.model.embed_tokens.weight  # type: ignore[union-attr]
    for one in (apart, tied):
        load_checkpoint(tmp_path, model=one)
        assert [] == differences(state, held(one))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_numbers_take_the_live_dtype(tmp_path: Path, saved: torch.dtype, dtype: torch.dtype) -> None:
    """Wider or narrower, if its range is no smaller."""
    state = {name: tensor.to(saved) for name, tensor in Model().state().items()}
    write_files(tmp_path, Model().config, state)
    job = Job(Model(), tp=2)
    for at in ranks_of(job):
        expected = {name: tensor.to(dtype) for name, tensor in local_state(job, state, at).items()}
        model = live(expected)
        load_checkpoint(tmp_path, model=model, topology=at)
        assert [] == differences(expected, held(model))


def test_a_state_dict_is_overwritten_in_place(tmp_path: Path) -> None:
    state = write_model(tmp_path, Model())
    job = Job(Model())
    expected = local_state(job, state, Topology())
    model = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    memory = {name: tensor.data_ptr() for name, tensor in model.items()}
    load_checkpoint(tmp_path, model=model)
    assert [] == differences(expected, model)
    assert memory == {name: tensor.data_ptr() for name, tensor in model.items()}


def test_an_empty_dict_is_filled_with_the_files_tensors(tmp_path: Path) -> None:
    """Under their own names; without config.json too, and of one file."""
    state = write_model(tmp_path, Model())
    whole: State = {}
    load_checkpoint(tmp_path, model=whole)
    assert [] == differences(state, whole)
    save_file(state, tmp_path / "alone.safetensors")
    renamed: State = {}
    load_checkpoint(tmp_path / "alone.safetensors", model=renamed, key_mapping={"last": "model.norm.weight"})
    assert torch.equal(state["model.norm.weight"], renamed["last"])


def test_a_store_is_loaded_from(tmp_path: Path) -> None:
    state = write_model(tmp_path, Model(), shards=3)
    name = uuid.uuid4().hex
    fsspec.filesystem("memory").put(str(tmp_path), f"/{name}/model", recursive=True)
    for at in ranks_of(Job(Model(), tp=2)):
        expected = local_state(Job(Model(), tp=2), state, at)
        model = live(expected, device="meta")
        load_checkpoint(f"memory://{name}/model", model=model, topology=at)
        assert [] == differences(expected, held(model))


def load_onto_device(rank: int, path: str) -> tuple[list[str], int]:
    """Names whose values on this rank's device are others than the files', and the graphs that the load compiled."""
    import torch_xla

    at = ranks_of(JOB)[rank]
    expected = local_state(JOB, load_file(Path(path) / "model.safetensors"), at)
    model = live(expected).to(torch_xla.device())
    torch_xla.sync(wait=True)  # what was begun before the load does not count
    before = device.compile_count()
    load_checkpoint(path, model=model, topology=at, timeout=600.0, **options_of(JOB))
    compiled = device.compile_count() - before
    return differences(expected, {name: tensor.cpu() for name, tensor in held(model).items()}), compiled


@pytest.mark.xla
def test_devices_get_their_parts(xla_ranks: RankPool, tmp_path: Path) -> None:
    """To the last bit, and nothing is compiled for it."""
    write_model(tmp_path, JOB.model)
    assert [([], 0)] * 4 == xla_ranks.run(load_onto_device, str(tmp_path))


def test_a_tag_in_the_directory_goes_first(tmp_path: Path) -> None:
    """A run that saves into the directory that it started from resumes from what it saved."""
    write_model(tmp_path, Model())
    save_checkpoint(tmp_path, "step_1", {"a": torch.ones(2)})
    model: dict[str, Any] = {}
    load_checkpoint(tmp_path, model=model)
    assert ["a"] == list(model)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda model: delattr(model.model, "norm"),
            r"unexpected in the checkpoint: 'model\.norm\.weight'; load with strict=False",
        ),
        (
            lambda model: model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1))),
            r"no rule for 'extra'",
        ),
        (
            lambda model: model.register_buffer("computed", torch.zeros(2, device="meta"), persistent=False),
            r"computed of the live model are on the meta device and in no file",
        ),
    ],
)
def test_names_that_differ_are_refused(
    tmp_path: Path,
    change: Callable[[torch.nn.Module], None],
    complaint: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Are refused, and nothing is changed; with strict=False the rest is loaded, and a warning says what is not."""
    state = write_model(tmp_path, Model())
    model = live(local_state(Job(Model()), state, Topology()))
    change(model)
    before = {name: tensor.clone() for name, tensor in held(model).items()}
    with pytest.raises(KeyMismatch, match=complaint):
        load_checkpoint(tmp_path, model=model)
    assert [] == differences(before, held(model))
    with caplog.at_level(logging.WARNING, "nxd_ckpt"):
        load_checkpoint(tmp_path, model=model, strict=False)
    assert "strict=False" in caplog.text
    assert torch.equal(state["lm_head.weight"], held(model)["lm_head.weight"])


def test_a_tensor_that_the_files_lack(tmp_path: Path) -> None:
    """Is refused, as is one that is tied to it, and with strict=False left as it is."""
    state = write_model(tmp_path, Model())
    whole = live(local_state(Job(Model()), state, Topology()))
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(KeyMismatch, match=r"has no tensor model\.norm\.weight; is it"):
        load_checkpoint(tmp_path, model=whole)
    load_checkpoint(tmp_path, model=whole, strict=False)
    assert [-1.0] == held(whole)["model.norm.weight"].unique().tolist()
    assert torch.equal(state["lm_head.weight"], held(whole)["lm_head.weight"])
    kept = {name: tensor for name, tensor in state.items() if "embed" not in name and "lm_head" not in name}
    write_files(tmp_path, {**Model().config, "tie_word_embeddings": True}, kept)
    with pytest.raises(KeyMismatch, match=r"nor model\.embed_tokens\.weight, to which it is tied"):
        load_checkpoint(tmp_path, model=live({"lm_head.weight": state["lm_head.weight"]}))


def test_what_is_left_out_needs_no_rule_and_no_tensor(tmp_path: Path) -> None:
    """It keeps its live value; weights alone are loaded also where an optimizer is given, which keeps its state."""
    state = write_model(tmp_path, Model())
    whole = live(local_state(Job(Model()), state, Topology()))
    whole.register_parameter("adapter", torch.nn.Parameter(torch.full((2,), -1.0)))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=9.0)
    ignored = ["model/adapter", "model/model.norm.*"]
    load_checkpoint(tmp_path, model=whole, optimizer=optimizer, ignore_keys=ignored, load_weights_only=True)
    assert [-1.0] == torch.cat([held(whole)["adapter"], held(whole)["model.norm.weight"]]).unique().tolist()
    assert torch.equal(state["lm_head.weight"], held(whole)["lm_head.weight"])
    assert ({}, 9.0) == (dict(optimizer.state), optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("kind", "complaint", "arguments"),
    [
        (PartNotFound, "without optimizer; it holds model.* weights_only=True", {"optimizer": {}}),
        (PartNotFound, "without scheduler; it holds model", {"scheduler": {}}),
        (InvalidArgument, "loaded into a live model", {"model": {}, "topology": Topology(tp=2)}),
        (InvalidArgument, "loaded into a live model", {"model": {}, "mapping": "llama"}),
        (InvalidArgument, "loaded into a live model", {"model": None}),
        (InvalidArgument, "pre_download= is for the tags", {"pre_download": True}),
        (KeyMismatch, r"no name begins with prefix='module\.'", {"prefix": "module.", "strict": False}),
        (KeyMismatch, r"matches nothing with 'model/norm.weight' \(did", {"ignore_keys": ["model/norm.weight"]}),
        (InvalidArgument, "neither one of .*llama.* nor the path of a file", {"mapping": "another"}),
        (KeyMismatch, "no rule for", {"mapping": "gpt_neox"}),
        (ShapeMismatch, r"q_proj\.weight: 16 elements along dimension 0", {"topology": Topology(tp=2)}),
        (CheckpointNotFound, "no tag 'step_1'", {"tag": "step_1"}),
    ],
)
def test_arguments_that_cannot_be(
    tmp_path: Path, kind: type[CheckpointError], complaint: str, arguments: dict[str, Any]
) -> None:
    state = write_model(tmp_path, Model())
    model = live(local_state(Job(Model()), state, Topology()))
    before = {name: tensor.clone() for name, tensor in held(model).items()}
    with pytest.raises(kind, match=complaint):
        load_checkpoint(tmp_path, **{"model": model, **arguments})
    assert [] == differences(before, held(model))


def test_a_dtype_of_a_smaller_range_is_refused(tmp_path: Path) -> None:
    """As float16 for numbers that were float32 or bfloat16."""
    state = write_model(tmp_path, Model())
    model = live(local_state(Job(Model()), state, Topology()), dtype=torch.float16)
    with pytest.raises(DtypeMismatch, match=r"float32, the live one is float16, which has a smaller range"):
        load_checkpoint(tmp_path, model=model)


PIPELINE = Job(Model(), tp=2, pp=2)


def load_one_rank(rank: int, path: str, broken: int | None) -> State:
    """What the rank holds after the load, or after it failed; ``broken`` has a parameter of another shape."""
    state = load_file(Path(path) / "model.safetensors")
    at = ranks_of(PIPELINE)[rank]
    model = live(local_state(PIPELINE, state, at), device="meta" if broken is None else "cpu")
    if rank == broken:
        model.get_submodule("model.layers.1.mlp.down_proj").weight = torch.nn.Parameter(torch.zeros(3, 3))
    try:
        load_checkpoint(path, model=model, topology=at, timeout=600.0)
    except CheckpointError:
        found = held(model).values()
        assert {float(value) for tensor in found if not tensor.is_meta for value in tensor.unique()} <= {-1.0, 0.0}
        raise
    return held(model)


def test_the_ranks_of_a_job_load_together(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Each its part, from the meta device; a failing rank fails all of them, and nothing is changed on any."""
    state = write_model(tmp_path, PIPELINE.model)
    found = gloo_ranks.run(load_one_rank, str(tmp_path), None)
    expected = [local_state(PIPELINE, state, at) for at in ranks_of(PIPELINE)]
    assert [[], [], [], []] == [differences(*pair) for pair in zip(expected, found, strict=True)]
    outcomes = gloo_ranks.start(load_one_rank, str(tmp_path), 3).result(return_errors=True)
    causes = [outcome.cause for outcome in outcomes if isinstance(outcome, WorkerError)]
    assert [ShapeMismatch] * 4 == [type(cause) for cause in causes]
