"""Time and memory of stacks of 256 routed experts: ``python -m tools.bench.experts --layers 2``.

Makes a Hugging Face directory of a Qwen 3 with 256 experts of random bfloat16 numbers and brings it to each form: a tag
of one rank, whose tensors hold all experts, of eight expert-parallel ranks, back to a directory, to torch DCP, and to
TorchTitan, which stacks the experts. Again and again: seconds, to be held against a ``cp`` and ``sync`` of the same
bytes, and memory beyond an interpreter with torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from tools.bench.convert import MIB, run
from tools.bench.host import cache
from tools.bench.hugging_face import copied

EXPERTS = 256

CONFIG = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "vocab_size": 1024,
}

MAKE = """
import pathlib, sys, torch
from safetensors.torch import save_file

directory, layers, experts, hidden, wide = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
def rand(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)
places, ends = {}, {"model.embed_tokens.weight": rand(1024, hidden), "lm_head.weight": rand(1024, hidden),
                    "model.norm.weight": rand(hidden)}
for layer in range(layers):
    at = f"model.layers.{layer}"
    state = {f"{at}.self_attn.{name}_proj.weight": rand(hidden, hidden) for name in "qkvo"}
    state |= {f"{at}.self_attn.{name}_norm.weight": rand(hidden // 8) for name in "qk"}
    state |= {f"{at}.{name}_layernorm.weight": rand(hidden) for name in ("input", "post_attention")}
    state |= {f"{at}.mlp.gate.weight": rand(experts, hidden)}
    for expert in range(experts):
        for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
            state[f"{at}.mlp.experts.{expert}.{name}_proj.weight"] = rand(*shape)
    state |= ends if layer == 0 else {}
    places |= dict.fromkeys(state, f"model-{layer}.safetensors")
    save_file(state, directory / f"model-{layer}.safetensors", metadata={"format": "pt"})
import json
(directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
"""

MEASURE = """
import resource, sys, time, torch
from nxd_ckpt import convert

what, source, target, config = sys.argv[1:]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

acts = {
    "import": lambda: convert(source, target, to="tag", names="nxd"),
    "import for ep=8": lambda: convert(source, target, to="tag", names="nxd", dp=8, ep=8),
    "export": lambda: convert(source, target, to="hf", config=config),
    "migrate to dcp": lambda: convert(source, target, to="dcp", names="hf", config=config),
    "migrate to torchtitan": lambda: convert(source, target, to="torchtitan", config=config),
}
before = peak()
started = time.monotonic()
acts[what]()
print(time.monotonic() - started, peak() - before)
"""

FLOOR = """
import mmap, os, pathlib, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
from nxd_ckpt.formats.memory import copy_values
from nxd_ckpt.formats.crc32 import crc32

source, target, wide, hidden = pathlib.Path(sys.argv[1]), *sys.argv[2:3], *map(int, sys.argv[3:])
size = 32 * 2**20
buffers = [mmap.mmap(-1, size) for _ in range(2)]
scratch = torch.empty(size // 2, dtype=torch.bfloat16)

def read(file, at, buffer):
    count = os.preadv(file, [memoryview(scratch.view(torch.uint8).numpy())], at)
    experts = count // (2 * wide * hidden)
    shape = experts, wide, hidden
    values = scratch[: experts * wide * hidden].view(shape)
    out = torch.frombuffer(buffer, dtype=torch.bfloat16, count=values.numel()).view(experts, hidden, wide)
    for expert in range(experts):
        copy_values(out[expert], values[expert].t())
    return memoryview(buffer)[: -(-count // 4096) * 4096]

started = time.monotonic()
files = [os.open(path, os.O_RDONLY) for path in sorted(source.glob("*.safetensors"))]
tasks = [(file, at) for file in files for at in range(0, os.fstat(file).st_size, size)]
output = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as digester:
    ahead = reader.submit(read, *tasks[0], buffers[0])
    for number in range(len(tasks)):
        view = ahead.result()
        if number + 1 < len(tasks):
            ahead = reader.submit(read, *tasks[number + 1], buffers[(number + 1) % 2])
        digest = digester.submit(crc32, view)
        os.pwrite(output, view, number * size)
        digest.result()
os.fdatasync(output)
print(time.monotonic() - started)
"""


def make(directory: Path, layers: int, hidden: int, wide: int) -> None:
    """Write the Hugging Face directory; ``wide`` is the width of an expert."""
    sizes = {
        "hidden_size": hidden,
        "head_dim": hidden // 8,
        "moe_intermediate_size": wide,
        "num_hidden_layers": layers,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    run(MAKE, directory, layers, EXPERTS, hidden, wide)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="each of 768 tensors (default: 2)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden_size (default: 1024)")
    parser.add_argument("--intermediate", type=int, default=512, help="moe_intermediate_size (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn (default: 3)")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_experts_", dir=args.directory) as name:
        directory = Path(name)
        source = directory / "hf"
        make(source, args.layers, args.hidden, args.intermediate)
        os.sync()
        tag = directory / "run" / "step_0"
        forms = {
            "import": (source, tag),
            "import for ep=8": (source, directory / "parallel" / "step_0"),
            "export": (tag, directory / "exported"),
            "migrate to dcp": (tag, directory / "dcp"),
            "migrate to torchtitan": (tag, directory / "titan"),
        }
        copies: list[float] = []
        floors: list[float] = []
        rows: dict[str, list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            copies.append(copied(source))
            cache(source)
            floors.append(float(run(FLOOR, source, directory / "floor", args.intermediate, args.hidden)))
            (directory / "floor").unlink()
            for what, (origin, target) in forms.items():
                shutil.rmtree(target, ignore_errors=True)
                cache(origin)
                seconds, memory = map(float, run(MEASURE, what, origin, target, source).split()[-2:])
                rows.setdefault(what, []).append((seconds, memory))
        nbytes = sum(path.stat().st_size for path in source.iterdir())
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    tensor = args.hidden * args.intermediate * 2 / MIB
    about = f"{nbytes / 2**30:.2f} GiB, {EXPERTS} experts, {tensor:.3g} MiB a tensor"
    print(f"{about}, median of {args.rounds} rounds, load {load}")
    print(f"  cp and sync            {statistics.median(copies):6.2f} s")
    print(f"  floor                  {statistics.median(floors):6.2f} s")
    for what, measured in rows.items():
        seconds, memory = statistics.median(each[0] for each in measured), max(each[1] for each in measured) / MIB
        print(f"  {what:22} {seconds:6.2f} s  memory beyond torch {memory:5.0f} MiB")


if __name__ == "__main__":
    main()
