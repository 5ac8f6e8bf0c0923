"""Calls that meet a hostile file, in a process of their own with a limit on memory; what each does, as JSON lines.

``python -m tests.hostile.places DIRECTORY PATH`` tries every kind of hostile file in place of the PATH below DIRECTORY,
each in a copy of its own.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Checkpointer, Topology, has_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.tag.verify import verify_checkpoint

MEMORY = 3 * 2**30
"""Bytes of address space beyond what the process has when it begins: a sparse file of 1 TB does not fit."""


OUT = "../outside"
"""From the checkpoint directory, where somebody else's files are."""


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


KINDS: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "FIFO": os.mkfifo,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link out": lambda path: path.symlink_to(next(above for above in path.parents if above.name == "directory") / OUT),
    "brackets": lambda path: path.write_bytes(b"[" * 100_000),
    "sparse": _sparse,
    "wrong types": lambda path: path.write_text('{"format_version": 1, "kind": [], "tag": {}, "attempt": 1}'),
    "names": lambda path: path.write_text('{"attempt": "../../../outside", "tag": "x", "run_id": "\\ud800"}'),
}


def model() -> dict[str, Any]:
    return {"weight": torch.ones(3)}


def load(path: Path) -> object:
    found: dict[str, Any] = {}
    Checkpointer(path).load("one", found)
    return {name: value.tolist() for name, value in found.items()}


def save(path: Path) -> object:
    with Checkpointer(path, timeout=0.5, topology=Topology(), durable=False) as checkpointer:
        checkpointer.save("three", model(), num_kept_ckpts=5)
        checkpointer.save("one", model())
    return None


def listed(path: Path) -> object:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        code = main(["list", str(path), "--json"])
    if code:
        return code
    return [tag["tag"] for tag in json.loads(out.getvalue())["tags"]]


CALLS: dict[str, Callable[[Path], object]] = {
    "has_checkpoint": has_checkpoint,
    "load": load,
    "verify": lambda path: list(verify_checkpoint(path, "one").problems),
    "list": listed,
    "save": save,
}


def attempt(call: Callable[[Path], object], path: Path) -> dict[str, Any]:
    try:
        return {"value": call(path)}
    except CheckpointError as error:
        return {"error": type(error).__name__, "told": str(error)}
    except BaseException as error:  # what is never to be seen
        return {"raw": f"{type(error).__name__}: {error}"}


def run(kept: Path, place: str) -> None:
    """One line for each kind: what every call did, and whether what lies outside is as it was."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for kind, make in KINDS.items():
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(_try(Path(scratch), kept, place, kind, make)), flush=True)


def _try(scratch: Path, kept: Path, place: str, kind: str, make: Callable[[Path], object]) -> dict[str, Any]:
    directory, outside = scratch / "directory", scratch / "outside"
    shutil.copytree(kept, directory)
    (outside / "alice").mkdir(parents=True)
    (outside / "alice" / "file").write_text("hers")
    path = directory / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    done = {name: attempt(call, directory) for name, call in CALLS.items()}
    untouched = [p.relative_to(outside).as_posix() for p in sorted(outside.rglob("*"))] == ["alice", "alice/file"]
    return {"kind": kind, "outside": untouched, "calls": done}


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
