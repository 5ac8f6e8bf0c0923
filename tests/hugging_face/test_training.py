"""A Hugging Face model trains on where its ranks share it out, and goes back: transformers sees what they computed."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nxd_ckpt import convert
from nxd_ckpt.storage.urls import open_storage
from tests.conftest import BUCKET
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, local_state, weights
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
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.2,
}
ASYNC: dict[str, Any] = {"async_save": True}
XSER: dict[str, Any] = {"async_save": True, "use_xser": True}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama-mha": ("Llama", {}, {"tp": 2, "qkv": "coalesced"}, {"dp": 2, "zero1": True, "options": ASYNC}),
    "llama-gqa": (
        "Llama",
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
        {"tp": 4, "qkv": "linear", "copies": 2},
        {"tied": True, "options": XSER},
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 4}, {"tp": 2, "pp": 2, "qkv": "linear"}, {"device": "meta"}),
    "mixtral": (
        "Mixtral",
        {"num_key_value_heads": 4, "num_local_experts": 4},
        {"tp": 2, "ep": 2},
        {"dp": 2, "zero1": True, "options": XSER},
    ),
    "gpt-neox": ("GPTNeoX", {}, {"tp": 2, "pp": 2}, {"device": "xla", "options": ASYNC}),
}

# fp32 sums in another order, over ranks: relative to the largest logit, and for losses to themselves. Seen: up to 2e-6.
TOLERANCE = 1e-5


SOAK = ("llama-mha", "mistral", "mixtral", "gpt-neox")
"""What the other covers, and the tests of loads and exports, of experts too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in SOAK else []) for name in CASES]
)
def test_a_model_trains_on_and_goes_back(
    xla_ranks: RankPool, s3_server: S3Server, tmp_path: Path, name: str
) -> None:
    """Loaded from save_pretrained's files it computes transformers' logits, and has the losses of the same steps in one
    process. Exports before and after them hold the ranks' weights to the last bit; with these from_pretrained computes
    the same logits.
    """
    kind, changes, how, more = CASES[name]
    source = tmp_path / "hf"
    original = save_pretrained(source, kind, changes)
    family = {"Llama": "llama", "Mistral": "llama", "Mixtral": "mixtral", "GPTNeoX": "gpt_neox"}[kind]
    job = Job(Model(family, 2, 8, changes.get("num_key_value_heads", 8), 8, 48, 64, 4), **how)
    run = Run(job, str(source), str(tmp_path / "runs"), **more)
    if name == "llama-gqa":
        run = replace(run, source=uploaded(source, s3_server), storage_options=s3_server.options)

    outcomes: list[Outcome] = xla_ranks.run(train_on, run)

    assert [0] * 4 == [outcome.compiled for outcome in outcomes]
    last = [outcome for outcome in outcomes if outcome.losses]
    assert_close(logits(original), run.dp, [outcome.loaded for outcome in last])
    losses = torch.tensor([outcome.losses for outcome in last]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(train(original)), rtol=TOLERANCE, atol=0.0)

    assert [] == differences(weights(source), weights(exported(run, "loaded", source, tmp_path)))
    out = exported(run, "trained", source, tmp_path)
    state = weights(out)
    if run.tied:  # files leave the head out
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for rank, outcome in enumerate(outcomes):
        assert [] == differences(local_state(job, state, run.topology(rank)), outcome.weights)
    if run.zero1:  # in fp32 the optimizer's master weights are the weights
        master = exported(run, "trained", source, tmp_path / "master", master_weights=True)
        assert [] == differences(weights(out), weights(master))
    back = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert_close(logits(back), run.dp, [outcome.trained for outcome in last])


def save_pretrained(directory: Path, kind: str, changes: dict[str, Any]) -> Any:
    """A random model, norms and biases too, in several files."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
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


def exported(run: Run, tag: str, source: Path, directory: Path, **options: Any) -> Path:
    out = directory / tag
    options |= {"kv_size_multiplier": run.job.copies, "hardware": run.job.hardware, "size_per_shard": "100KB"}
    convert(Path(run.runs) / tag, out, to="hf", config=source, **options)
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


def assert_close(expected: torch.Tensor, dp: int, found: list[Any]) -> None:
    """The logits of a whole batch, and those of each rank of the last stage, whose order is that of batches."""
    parts = [part for part in expected.chunk(dp) for _ in range(len(found) // dp)]
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, parts, rtol=0.0, atol=TOLERANCE * largest)
