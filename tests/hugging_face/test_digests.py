"""Digests out of the door: what is written as plain files carries them, we compare them, and others read the files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import huggingface_hub
import pytest
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from nxd_ckpt import (
    convert,
    diff_checkpoints,
    load_checkpoint,
    load_keys,
    open_checkpoint,
    save_checkpoint,
    unshard_checkpoint,
)
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import CorruptCheckpoint, DigestMismatch
from nxd_ckpt.formats.safetensors import DIGESTS
from nxd_ckpt.verify import verify_checkpoint
from tests.hugging_face.saved import live

State = dict[str, torch.Tensor]


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tag of a Llama with its optimizer, and its config.json."""
    path = tmp_path_factory.mktemp("run")
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    model.config.save_pretrained(path)
    save_checkpoint(path, "step_1", model, optimizer, durable=False)
    return path


def _hf(run: Path, out: Path, **options: Any) -> None:
    convert(run / "step_1", out, to="hf", config=run, durable=False, **options)


def _files(run: Path, out: Path, **options: Any) -> None:
    unshard_checkpoint(run / "step_1", out, durable=False, **options)


OUTPUTS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "hf": (_hf, {}),
    "hf, cast, in several files": (_hf, {"dtype": "bfloat16", "size_per_shard": "10KB"}),
    "hf with its optimizer": (_hf, {"optimizer": True}),
    "safetensors": (_files, {"use_safetensors": True}),
    "safetensors, one for each tensor": (_files, {"use_safetensors": True, "unshard_strategy": "one_file_per_tensor"}),
    "torch files": (_files, {}),
}


@pytest.mark.parametrize("form", OUTPUTS)
def test_one_flipped_bit_is_found_in_every_file_of_tensors(run: Path, tmp_path: Path, form: str) -> None:
    """By verify; nothing else is reported, and every content has a digest but that of JSON files."""
    write, options = OUTPUTS[form]
    write(run, tmp_path / "out", **options)
    files = [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".safetensors", ".pt")]
    documents = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.json"))
    for path in files:
        top = path if form == "torch files" else path.parent
        whole = verify_checkpoint(top)
        assert () == whole.problems
        assert whole.undigested <= documents
        assert whole.verified > 0
        data = bytearray(path.read_bytes())
        at = len(data) - 1 if path.suffix == ".safetensors" else data.index(_of_a_tensor(path))
        data[at] ^= 1
        path.write_bytes(data)
        assert 1 == len(verify_checkpoint(top).problems), path
        data[at] ^= 1
        path.write_bytes(data)


def _of_a_tensor(path: Path) -> bytes:
    """The bytes of a tensor in a torch file."""
    content = torch.load(path, weights_only=True)
    state = content["state"]["lm_head.weight"] if "state" in content else content
    return bytes(max(state.values(), key=torch.Tensor.numel).contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("size_per_shard", ["5GB", "10KB"])
def test_a_changed_byte_is_refused_before_anything_changes(run: Path, tmp_path: Path, size_per_shard: str) -> None:
    """By a load, by what reads single tensors, by conversions and by a full diff, by name; verify=False reads it."""
    _hf(run, tmp_path / "good", size_per_shard=size_per_shard)
    _hf(run, tmp_path / "hf", size_per_shard=size_per_shard)
    path = next(path for path in (tmp_path / "hf").glob("*.safetensors") if "lm_head.weight" in load_file(path))
    rows = load_file(path)["lm_head.weight"].numpy().tobytes()
    data = path.read_bytes()
    path.write_bytes(data.replace(rows, rows[:-1] + bytes([rows[-1] ^ 1])))
    model = llama().requires_grad_(False)
    model.lm_head.weight.fill_(7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    refused: list[Callable[[], Any]] = [
        lambda: load_checkpoint(tmp_path / "hf", model=model),
        lambda: open_checkpoint(tmp_path / "hf").read("model/lm_head.weight", slice(63, 64)),
        lambda: list(load_keys(tmp_path / "hf", ["model/lm_head.weight"])),
        lambda: convert(tmp_path / "hf", tmp_path / "tag" / "step_0", to="tag", names="nxd", durable=False),
        lambda: diff_checkpoints(tmp_path / "good", tmp_path / "hf", full=True),
    ]
    for call in refused:
        with pytest.raises(DigestMismatch, match=r"lm_head\.weight.*write it without 'nxd_ckpt\.crc32'"):
            call()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    load_checkpoint(tmp_path / "hf", model=model, verify=False)
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])
    path.write_bytes(data)
    load_checkpoint(tmp_path / "hf", model=model)
    assert diff_checkpoints(tmp_path / "good", tmp_path / "hf").same_digests == len(before)


def test_a_slice_is_verified_by_its_blocks(tmp_path: Path) -> None:
    """A part of a large tensor is read without the rest: damage elsewhere in it is not seen, and need not be.

    Nor does an empty tensor, which lies where the next one does, stand for it.
    """
    state = {"empty": torch.empty(0), "w": torch.arange(3 * CRC_BLOCK // 4.0).view(3, -1)}
    save_checkpoint(tmp_path / "run", "t", state, durable=False)
    unshard_checkpoint(tmp_path / "run" / "t", tmp_path / "out", use_safetensors=True, durable=False)
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    model = live(state)
    with pytest.raises(DigestMismatch, match="'model/w'"):
        load_checkpoint(path, model=model)
    assert -1.0 == float(model.state_dict()["w"].max())
    assert CRC_BLOCK // 4 - 1.0 == float(open_checkpoint(path).read("model/w", slice(1)).max())
    with pytest.raises(DigestMismatch, match="'model/w'"):
        open_checkpoint(path).read("model/w", slice(2, 3))
    opened = open_checkpoint(path).opened
    with opened.reader() as reader:
        for name, leaf in opened.model_tree(Coordinates()).items():
            reader.verify(leaf, name)
        with pytest.raises(DigestMismatch, match="'w'"):
            reader.finish()


@pytest.mark.parametrize("kept", [False, True])
def test_a_file_that_another_program_wrote_again(run: Path, tmp_path: Path, kept: bool) -> None:
    """As a rule it drops our digests, and then the file counts as its own. If it ``kept`` them, they still say what
    changed: the same tensors in another order are fine, others are refused, and the message says what to do.
    """
    _hf(run, tmp_path)
    path = tmp_path / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata() if kept else {"format": "pt"}
    state, model = load_file(path), llama()
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "the same": lambda tensor: tensor,
        "other values": lambda tensor: tensor + 1,
        "another dtype": torch.Tensor.half,
    }
    for what, change in changes.items():
        save_file({name: change(state[name]) for name in reversed(state)}, path, metadata=metadata)
        if kept and what != "the same":
            with pytest.raises(CorruptCheckpoint, match=r"write it without 'nxd_ckpt\.crc32' in its __metadata__"):
                load_checkpoint(tmp_path, model=model)
            assert verify_checkpoint(tmp_path).problems
        else:
            load_checkpoint(tmp_path, model=model)
            assert torch.equal(change(state["lm_head.weight"]).float(), model.lm_head.weight)
            assert () == verify_checkpoint(tmp_path).problems


def _through_dcp(path: Path, state: State) -> State:
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp_load(read, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return read


def _through_accelerate(path: Path, state: State) -> State:
    model = llama()
    accelerate.load_checkpoint_in_model(model, str(path))
    return dict(model.state_dict())


def _through_the_hub(path: Path, state: State) -> State:
    model = llama()
    huggingface_hub.load_torch_model(model, path)
    return dict(model.state_dict())


def _by_slices(path: Path, state: State) -> State:
    read: State = {}
    for file in path.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata().keys() == {"format", DIGESTS}
            read |= {name: opened.get_slice(name)[:] for name in opened.keys()}  # noqa: SIM118
    return read


READERS: dict[str, Callable[[Path, State], State]] = {
    "safetensors, slices": _by_slices,
    "accelerate": _through_accelerate,
    "huggingface_hub": _through_the_hub,
    "torch.distributed.checkpoint": _through_dcp,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("size_per_shard", ["5GB", "10KB"])
def test_other_programs_read_files_with_digests(run: Path, tmp_path: Path, reader: str, size_per_shard: str) -> None:
    _hf(run, tmp_path, size_per_shard=size_per_shard)
    state = {name: open_checkpoint(run).read(f"model/{name}") for name in llama().state_dict()}
    found = READERS[reader](tmp_path, state)
    assert dict.fromkeys(state, True) == {name: torch.equal(found[name], state[name]) for name in found}
