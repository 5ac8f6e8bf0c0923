"""A Hugging Face model trains on where its ranks share it out, and goes back: transformers sees what they computed."""

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nxd_ckpt import convert
from nxd_ckpt.storage.urls import open_storage
from tests.conftest import BUCKET
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, local_state, ranks_of, weights
from tests.hugging_face.training import ADAMW, STEPS, Outcome, Run, tokens_of, train_on
from tests.support.rank_pool import RankPool
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.xla

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.2,
}
JOB = Job(Model("llama", 2, 8, 2, 8, 48, 64), tp=4, qkv="linear", copies=2)

# fp32 sums in another order, over ranks: relative to the largest logit, and for losses to themselves. Seen: up to 2e-6.
TOLERANCE = 1e-5


def test_a_model_trains_on_and_goes_back(xla_ranks: RankPool, s3_server: S3Server, tmp_path: Path) -> None:
    """Loaded from save_pretrained's files it computes transformers' logits, and has the losses of the same steps in one
    process. Exports before and after them hold the ranks' weights to the last bit; with these from_pretrained computes
    the same logits.
    """
    source = tmp_path / "hf"
    original = save_pretrained(source)
    run = Run(JOB, uploaded(source, s3_server), str(tmp_path / "runs"), s3_server.options)

    outcomes: list[Outcome] = xla_ranks.run(train_on, run)

    assert [0] * 4 == [outcome.compiled for outcome in outcomes]
    assert_close(logits(original), [outcome.loaded for outcome in outcomes])
    losses = torch.tensor([outcome.losses for outcome in outcomes]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(train(original)), rtol=TOLERANCE, atol=0.0)

    assert [] == differences(weights(source), weights(exported(run, "loaded", source, tmp_path)))
    out = exported(run, "trained", source, tmp_path)
    state = weights(out)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # files leave the head out
    for at, outcome in zip(ranks_of(JOB), outcomes, strict=True):
        assert [] == differences(local_state(JOB, state, at), outcome.weights)
    back = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert_close(logits(back), [outcome.trained for outcome in outcomes])


def save_pretrained(directory: Path) -> Any:
    """A random model, norms too, in several files."""
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return model


def uploaded(directory: Path, server: S3Server) -> str:
    """The URL of a copy in the store."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    storage = open_storage(url, storage_options=server.options)
    for file in directory.iterdir():
        storage.write(file.name, file.read_bytes())
    return url


def exported(run: Run, tag: str, source: Path, directory: Path) -> Path:
    out = directory / tag
    convert(Path(run.runs) / tag, out, to="hf", config=source, kv_size_multiplier=JOB.copies, size_per_shard="100KB")
    return out


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        computed: torch.Tensor = model(input_ids=tokens_of(0)).logits
    return computed


def train(model: Any) -> list[float]:
    """The losses of the same steps on the whole batch, by transformers."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for step in range(STEPS):
        loss = model(input_ids=tokens_of(step), labels=tokens_of(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_close(expected: torch.Tensor, found: list[Any]) -> None:
    """The logits of the whole batch, and those of each rank."""
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, [expected] * len(found), rtol=0.0, atol=TOLERANCE * largest)
