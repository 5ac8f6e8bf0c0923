"""``python -m tests.hostile.whole_checkpoints DIRECTORY SEED CASES`` damages one file after the other, and reads.

DIRECTORY holds checkpoints to play with. A case changes one file of one checkpoint, reads it in every way there is, and
puts the file back. Pickles in torch files are changed inside of a container that is right again, so that their digest
does not shield them. Memory and CPU time of the process are limited. What leaves a reader and is no CheckpointError
is printed, with its case.
"""

import io
import json
import logging
import random
import resource
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nxd_ckpt import Topology, convert, has_checkpoint, load_checkpoint, open_checkpoint
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.hugging_face.mappings import find_mapping
from nxd_ckpt.layouts.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.hostile.damage import damaged, damaged_inside, damaged_json

MEMORY = 2**30
"""Bytes of addresses beyond those mapped once whole checkpoints were read: torch with CUDA maps several GiB."""
CPU_SECONDS = 20

def changed(rng: random.Random, path: Path, data: bytes, other: bytes) -> bytes:
    if rng.random() < 0.6:
        if zipfile.is_zipfile(io.BytesIO(data)):
            return damaged_inside(rng, data, other)
        if path.suffix == ".json":
            return damaged_json(rng, data, other)
    return damaged(rng, data, other)


def readings(checkpoint: Path, scratch: Path) -> Iterator[Callable[[], object]]:
    """Everything that reads a checkpoint."""
    if (checkpoint / ".metadata").exists():
        yield lambda: convert(checkpoint, scratch / "tag", to="tag", overwrite=True)
    elif checkpoint.suffix == ".tar":
        yield lambda: open_storage(str(checkpoint)).list()
        yield lambda: load_checkpoint(str(checkpoint), model={}, topology=Topology(dp=2))
    elif (checkpoint / "model.safetensors").exists():
        yield lambda: hugging_face(checkpoint)
    else:
        sizes = Topology(**json.loads((checkpoint / "sizes").read_text()))
        yield lambda: has_checkpoint(checkpoint)
        yield lambda: verify_checkpoint(checkpoint)
        parts: dict[str, Any] = {"model": {}, "optimizer": {}}
        if checkpoint.name != "legacy":
            parts["scheduler"] = {}
        if checkpoint.name.startswith("ours"):
            parts["rank_content"] = {}
        yield lambda: load_checkpoint(checkpoint, **parts, topology=sizes)
        yield lambda: load_checkpoint(checkpoint, model={}, topology=sizes, verify=False)
        yield lambda: open_checkpoint(checkpoint).user_content()
        yield lambda: open_checkpoint(checkpoint).metadata


def hugging_face(checkpoint: Path) -> None:
    held = HuggingFaceDirectory(LocalStorage(checkpoint))
    for name in held.names:
        held.tensor(name)
    mapping = find_mapping(checkpoint / "mapping.json", held.config)
    sizes = mapping.sizes(held.config, 1, "trn1")
    mapping.required(sizes)
    mapping.matches(["model.layers.0.mlp.down_proj.weight"])


def main(directory: Path, seed: int, cases: int) -> int:
    warnings.simplefilter("ignore")
    logging.disable()
    resource.setrlimit(resource.RLIMIT_CPU, (60 + cases * 2, 120 + cases * 2))
    checkpoints = sorted(path for path in directory.iterdir() if path.name != "scratch")
    for checkpoint in checkpoints:
        for read in readings(checkpoint, directory / "scratch"):
            read()  # what is whole is read: else damage would prove nothing
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    failures = 0
    for case in range(seed, seed + cases):
        rng = random.Random(case)
        checkpoint = rng.choice(checkpoints)
        files = [checkpoint] if checkpoint.is_file() else sorted(filter(Path.is_file, checkpoint.rglob("*")))
        path, other = rng.choice([file for file in files if file.name != "sizes"]), rng.choice(files)
        whole = path.read_bytes()
        path.write_bytes(changed(rng, path, whole, other.read_bytes()))
        for number, read in enumerate(readings(checkpoint, directory / "scratch")):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            try:
                read()
            except CheckpointError:
                pass
            except BaseException:
                failures += 1
                print(f"case {case}: {path.relative_to(directory)}, reading {number}\n{traceback.format_exc()}")
            if resource.getrusage(resource.RUSAGE_SELF).ru_utime - before > CPU_SECONDS:
                failures += 1
                print(f"case {case}: {path.relative_to(directory)}, reading {number}: more than {CPU_SECONDS} s of CPU")
        path.write_bytes(whole)
    return failures


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), 1))
