"""What migrating a tag of neuronx-distributed costs: ``python -m tools.bench.migrate --gib 2``.

Writes a Llama of random numbers and its AdamW state in float32 as NxD's ranks do on tp=2, and migrates it to a Hugging
Face directory, a torch DCP directory and a tag, again and again, in turn with ``cp`` and ``sync`` of the same bytes. Of
each round: how many times ``cp`` a migration took, in seconds and in processor seconds; and memory beyond torch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.bench.convert import MIB, run
from tools.bench.host import cache
from tools.bench.hugging_face import config_of, timed

TP = 2
HIDDEN, INTERMEDIATE, VOCAB = 4096, 11264, 4096
LAYER = 3 * 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
"""Bytes of a layer and its moments, in float32."""

MAKE = """
import pathlib, sys, torch

place, layers, hidden, wide, vocab, tp = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
at = {"self_attn.q_proj": (hidden // tp, hidden), "self_attn.k_proj": (hidden // tp, hidden),
      "self_attn.v_proj": (hidden // tp, hidden), "self_attn.o_proj": (hidden, hidden // tp),
      "mlp.gate_up_proj": (2 * wide // tp, hidden), "mlp.down_proj": (hidden, wide // tp),
      "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
shapes = {"model.embed_tokens.weight": (vocab // tp, hidden)}
for layer in range(layers):
    shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in at.items()}
shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab // tp, hidden)}

def state():
    return {name: torch.ones(shape) if "norm" in name else torch.rand(shape) for name, shape in shapes.items()}

for part in ("model", "optim"):
    (place / part).mkdir(parents=True)
for rank in range(tp):
    file = f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
    torch.save(state(), place / "model" / file)
    moments = zip(state().values(), state().values())
    entries = {index: {"step": 3, "exp_avg": one, "exp_avg_sq": two} for index, (one, two) in enumerate(moments)}
    group = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "params": list(entries)}
    torch.save({"state": entries, "param_groups": [group]}, place / "optim" / file)
for marker in ("checkpoint", "done"):
    (place / marker).write_text("1")
(place.parent / "names").write_text("\\n".join(shapes))
"""

MEASURE = """
import pathlib, resource, sys, time, torch
from nxd_ckpt import convert

form, source, target, config = sys.argv[1:]
names = (pathlib.Path(source).parent / "names").read_text().split()
usage = lambda: resource.getrusage(resource.RUSAGE_SELF)
before, started = usage(), time.monotonic()
more = {"optimizer": True, "size_per_shard": 256 * 2**20} if form == "hf" else {}
convert(source, target, to=form, names="hf", config=config, saved_param_names=[[names]], **more)
after = usage()
print(time.monotonic() - started,
      after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
      (after.ru_maxrss - before.ru_maxrss) * 1024)
"""

FORMS = ("hf", "dcp", "tag")
Cost = tuple[float, float, float]
"""Seconds, processor seconds, and bytes of memory."""


def copied(source: Path, target: Path) -> Cost:
    """That of ``cp`` and ``sync``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = timed(["cp", "-r", str(source), str(target)]) + timed(["sync"])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 0.0


def migrated(form: str, source: Path, target: Path) -> Cost:
    """That of a migration, durable."""
    seconds, processor, nbytes = run(MEASURE, form, source, target, source.parent).split()[-3:]
    return float(seconds), float(processor), float(nbytes)


def one_round(source: Path, backwards: bool) -> dict[str, Cost]:
    """Everybody once, from the page cache; each output is removed before the next begins."""
    acts: dict[str, Callable[[Path], Cost]] = {"cp": lambda target: copied(source, target)}
    for form in FORMS:
        acts[form] = lambda target, form=form: migrated(form, source, target)  # type: ignore[misc]
    found = {}
    for name in sorted(acts, reverse=backwards):
        target = source.parent / "out" / f"step_{name}"
        target.parent.mkdir()
        cache(source)
        os.sync()
        found[name] = acts[name](target)
        shutil.rmtree(target.parent)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the tag in GiB (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="of each, in turn (default: 5)")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    args = parser.parse_args()
    layers = max(1, round((args.gib * 2**30 - 3 * 4 * 2 * VOCAB * HIDDEN) / LAYER))
    with tempfile.TemporaryDirectory(prefix="bench_migrate_", dir=args.directory) as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps({**config_of(layers), "vocab_size": VOCAB}))
        source = directory / "step_3"
        run(MAKE, source, layers, HIDDEN, INTERMEDIATE, VOCAB, TP)
        rounds = [one_round(source, backwards=bool(number % 2)) for number in range(args.rounds)]
        nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{nbytes / 2**30:.2f} GiB, tp={TP}, {args.rounds} rounds, load {load}")
    for name in ("cp", *FORMS):
        seconds, processor = (statistics.median(one[name][at] for one in rounds) for at in (0, 1))
        ratio = statistics.median(one[name][0] / one["cp"][0] for one in rounds)
        memory = max(one[name][2] for one in rounds) / MIB
        print(f"  {name:4} {seconds:6.2f} s ({ratio:.2f} x cp), {processor:5.2f} processor seconds, {memory:4.0f} MiB")


if __name__ == "__main__":
    main()
