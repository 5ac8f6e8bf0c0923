"""What Hugging Face directories cost: ``python -m tools.bench.hugging_face --gib 2``.

Makes a Llama-shaped model of random numbers, saved on tp=8, exports it, imports the result for tp=8, and loads that as
one of eight ranks would, again and again: seconds, for the first two to be held against a ``cp`` and ``sync`` of the
same bytes, and memory beyond an interpreter with torch, for a load beyond the rank's own part of the model too. That
must stay below two shards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from tools.bench.convert import MIB, run
from tools.bench.host import cache

TP = 8
HIDDEN, INTERMEDIATE, VOCAB, HEADS = 4096, 11264, 16384, 32
LAYER = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
ENDS = 4 * 2 * VOCAB * HIDDEN
"""Bytes of a layer, and of what is before and behind them, in float32."""

MAKE = """
import sys, torch
from nxd_ckpt import Topology, finalize_checkpoint, save_checkpoint

directory, layers, hidden, wide, vocab, tp = sys.argv[1], *map(int, sys.argv[2:])
at = {"self_attn.q_proj": (hidden // tp, hidden), "self_attn.k_proj": (hidden // tp, hidden),
      "self_attn.v_proj": (hidden // tp, hidden), "self_attn.o_proj": (hidden, hidden // tp),
      "mlp.gate_up_proj": (2 * wide // tp, hidden), "mlp.down_proj": (hidden, wide // tp),
      "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
shapes = {"model.embed_tokens.weight": (vocab // tp, hidden)}
for layer in range(layers):
    shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in at.items()}
shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab // tp, hidden)}
for rank in range(tp):
    model = {name: torch.ones(shape) if "norm" in name else torch.rand(shape) for name, shape in shapes.items()}
    save_checkpoint(directory, "saved", model, topology=Topology(tp=tp, rank=rank), run_id="make", async_save=True)
finalize_checkpoint()
"""

MEASURE = """
import pathlib, resource, sys, time, torch
from nxd_ckpt import Topology, convert, load_checkpoint

what, source, target, config, shard, tp = sys.argv[1:]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def load():
    saved = torch.load(next(pathlib.Path(target).glob("model/*_tp_rank_00_*.pt")), mmap=True)
    model = torch.nn.Module()
    with torch.device("meta"):  # of the shapes that a rank has, without memory until they are loaded
        for name, tensor in saved.items():
            *path, last = name.split(".")
            place = model
            for part in path:
                if part not in place._modules:
                    place.add_module(part, torch.nn.Module())
                place = place._modules[part]
            place.register_parameter(last, torch.nn.Parameter(torch.empty(tensor.shape)))
    load_checkpoint(source, model=model, topology=Topology(tp=int(tp)))
    return sum(parameter.nbytes for parameter in model.parameters())

acts = {
    "export": lambda: convert(source, target, to="hf", config=config, size_per_shard=int(shard)) and 0,
    "import": lambda: convert(source, target, to="tag", names="nxd", tp=int(tp)) and 0,
    "load": load,
}
before = peak()
started = time.monotonic()
held = acts[what]()
print(time.monotonic() - started, peak() - before - held)
"""


def config_of(layers: int) -> dict[str, object]:
    """The model's config.json."""
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
    }


def timed(command: list[str]) -> float:
    """Seconds of a command, its output thrown away."""
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def copied(source: Path) -> float:
    """Seconds that ``cp`` and ``sync`` take for all of ``source``, from the page cache."""
    cache(source)
    target = source.with_name("copied")
    seconds = timed(["cp", "-r", str(source), str(target)]) + timed(["sync"])
    shutil.rmtree(target)
    return seconds


def measured(what: str, directory: Path, shard: int) -> tuple[float, float]:
    """Seconds of the act, durable, and the bytes that its process grew by at most."""
    places = {
        "export": (directory / "run" / "saved", directory / "hf"),
        "import": (directory / "hf", directory / "imported" / "step_0"),
        "load": (directory / "hf", directory / "run" / "saved"),
    }
    source, target = places[what]
    if what != "load":
        shutil.rmtree(target, ignore_errors=True)
    cache(source)
    seconds, nbytes = map(float, run(MEASURE, what, source, target, directory, shard, TP).split()[-2:])
    return seconds, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the model in GiB (default: 2)")
    parser.add_argument("--shard", type=int, default=256, metavar="MIB", help="size_per_shard (default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn (default: 3)")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    args = parser.parse_args()
    layers = max(1, round((args.gib * 2**30 - ENDS) / LAYER))
    with tempfile.TemporaryDirectory(prefix="bench_hugging_face_", dir=args.directory) as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(config_of(layers)))
        run(MAKE, directory / "run", layers, HIDDEN, INTERMEDIATE, VOCAB, TP)
        os.sync()
        copies: list[float] = []
        rows: dict[str, list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            copies.append(copied(directory / "run" / "saved"))
            for what in ("export", "import", "load"):
                rows.setdefault(what, []).append(measured(what, directory, args.shard * MIB))
        nbytes = sum(path.stat().st_size for path in (directory / "hf").iterdir())
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{nbytes / 2**30:.2f} GiB, tp={TP}, shards of {args.shard} MiB, median of {args.rounds} rounds, load {load}")
    print(f"  cp and sync        {statistics.median(copies):6.2f} s")
    names = {"export": "export", "import": "import for tp=8", "load": "load, 1 of 8 ranks"}
    for what, found in rows.items():
        seconds, memory = statistics.median(each[0] for each in found), max(each[1] for each in found) / MIB
        print(f"  {names[what]:18} {seconds:6.2f} s  memory beyond torch {memory:5.0f} MiB")


if __name__ == "__main__":
    main()
