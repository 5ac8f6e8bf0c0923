"""A device that stands for ``neuron``: neuron_device.cpp, built by this machine's compiler, once for each torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

SOURCE = Path(__file__).with_name("neuron_device.cpp")
COMPILER = "g++"


def can_be_built() -> bool:
    return shutil.which(COMPILER) is not None


def built(cache: Path) -> Path:
    """The library, from the directory ``cache`` if it was built there before. Building takes ten seconds, so another
    process that wants it meanwhile waits."""
    made_of = SOURCE.read_bytes() + f"{torch.__version__} {torch.__file__}".encode()
    library = cache / f"device-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache) as directory:
                unfinished = Path(directory) / library.name
                _compile(unfinished)
                os.replace(unfinished, library)
    return library


def _compile(library: Path) -> None:
    torch_directory = Path(torch.__file__).parent
    include, lib = torch_directory / "include", torch_directory / "lib"
    command = [COMPILER, "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{lib}", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)


def register(library: Path) -> None:
    """Give this process the device ``neuron``, for good."""
    torch.ops.load_library(library)
    rename_privateuse1_backend("neuron")
    module: Any = ModuleType("torch.neuron")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module("neuron", module)


def counts() -> dict[str, int]:
    """How often this process waited for events, streams and whole devices, and copied without waiting."""
    names = ("copies that did not block", "events", "streams", "devices")
    return dict(zip(names, torch.ops.test_device.counts(), strict=True))
