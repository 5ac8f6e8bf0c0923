"""Checkpoints on a laptop without Linux: ``python -m tests.support.bare_system DIRECTORY OUT``.

``DIRECTORY`` holds the tag ``step_1`` of two tensor-parallel ranks.

Takes away what Windows lacks, or macOS, before nxd_ckpt is imported. Only what other libraries need to be imported at
all stays.
"""

import mmap
import multiprocessing.resource_tracker
import os
import pkgutil
import platform
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

MODULES = ["fcntl", "resource", "pwd", "grp", "termios"]
CALLS = [
    "preadv", "pwritev", "pread", "pwrite", "readv", "writev", "fdatasync", "sched_getaffinity",
    "register_at_fork", "getuid", "geteuid", "uname", "setpriority", "PRIO_PROCESS", "fork", "sysconf",
    "posix_fallocate", "posix_fadvise", "getloadavg", "mkfifo",
    *(f"O_{flag}" for flag in ("DIRECT", "DIRECTORY", "CLOEXEC", "NONBLOCK", "NOCTTY", "NOFOLLOW", "SYNC", "DSYNC")),
]
MAPS = ["MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_ANON", "MAP_POPULATE", "MADV_HUGEPAGE", "MADV_DONTNEED"]


LEFT_OUT = tuple(f"nxd_ckpt.{name}" for name in ("testing", "emulation", "integrations", "cli.__main__"))


def take_away() -> None:
    multiprocessing.resource_tracker.ensure_running()
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    if hasattr(shutil, "_rmtree_unsafe"):  # from Python 3.14 on the choice is made at its import
        shutil._rmtree_impl = shutil._rmtree_unsafe  # type: ignore[attr-defined]
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, CALLS), (mmap, MAPS)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    os.supports_follow_symlinks.discard(os.utime)
    platform.system = lambda: "Windows"
    platform.node = lambda: "laptop"


def import_everything() -> None:
    """But for what tests and trials use, on Linux, and what belongs to other packages."""
    import nxd_ckpt

    for module in pkgutil.walk_packages(nxd_ckpt.__path__, "nxd_ckpt."):
        if not module.name.startswith(LEFT_OUT):
            import_module(module.name)


def run(*arguments: object) -> None:
    from nxd_ckpt.cli.main import main

    assert 0 == main([*map(str, arguments)]), arguments


def read_and_convert(directory: Path, out: Path) -> None:
    """By the command and the functions."""
    from nxd_ckpt import Topology, load_checkpoint, open_checkpoint

    tag = directory / "step_1"
    run("list", directory)
    run("inspect", tag, "--tensors")
    run("verify", tag)
    run("cp", tag, out / "copy" / "step_1")
    run("convert", "--to", "tag", tag, out / "one", "--tp", 1)
    run("diff", tag, out / "one")
    run("convert", "--to", "files", tag, out / "plain")
    run("convert", "--to", "dcp", tag, out / "dcp")
    run("convert", "--to", "tag", out / "dcp", out / "back")
    for name in ("step.tar", "step.tar.gz"):
        run("convert", "--to", "tar", tag, out / name)
        run("verify", out / name)
    expected = open_checkpoint(directory).read("model/w")
    for place, options in ((out / "step.tar.gz", {}), (directory, {"pre_download": True, "work_dir": out / "work"})):
        state: dict[str, torch.Tensor] = {}
        load_checkpoint(place, "step_1", state, topology=Topology(tp=2), **options)  # type: ignore[arg-type]
        assert torch.equal(expected.chunk(2)[0], state["w"])


def saving_says_what_it_lacks(out: Path) -> None:
    from nxd_ckpt import save_checkpoint
    from nxd_ckpt.errors import UnsupportedSystem

    with pytest.raises(UnsupportedSystem, match="saving needs file locks"):
        save_checkpoint(out / "new", "step_1", {"w": torch.ones(1)})
    assert not (out / "new").exists()


if __name__ == "__main__":
    take_away()
    import_everything()
    read_and_convert(Path(sys.argv[1]), Path(sys.argv[2]))
    saving_says_what_it_lacks(Path(sys.argv[2]))
    print("all of it works")
