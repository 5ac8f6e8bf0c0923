"""ckpt-chaos: a run is killed at every change of the file system in a save, resumes, and its outcome is judged.

The training scripts, the kills, the resumes and the verdicts are those of the package. What is ours: the line that puts
our plug-in into its script, and that each run is a fork, so that the frameworks are imported once.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate
import pytest
import pytorch_lightning
import transformers
from ckpt_chaos import runner

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.integrations.accelerate import Accelerator
from nxd_ckpt.integrations.lightning import CheckpointIO
from nxd_ckpt.integrations.transformers import Trainer
from nxd_ckpt.tag.verify import verify_checkpoint

LASTS = 600.0
"""Seconds after which a run hangs."""

VERDICTS = ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK")


def _with_trainer(script: Any) -> None:
    script.Trainer = Trainer


def _with_accelerator(script: Any) -> None:
    script.Accelerator = Accelerator


def _with_checkpoint_io(script: Any) -> None:
    trainer = partial(pytorch_lightning.Trainer, plugins=[CheckpointIO()])
    script.pl = SimpleNamespace(Trainer=trainer, seed_everything=pytorch_lightning.seed_everything)


PLUG_INS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "hf_trainer": (f"transformers {transformers.__version__}", _with_trainer),
    "accelerate_loop": (f"accelerate {accelerate.__version__}", _with_accelerator),
    "lightning_trainer": (f"Lightning {pytorch_lightning.__version__}", _with_checkpoint_io),
}
"""By the package's script: the framework, and what puts our plug-in into it."""


def judged(target: str, work: Path, *, ours: bool) -> Counter[str]:
    """How many kills got each verdict; the run that is not killed counts too. What is not passed is printed.

    Threads do not make all changes in the same order each time, so that a few may come to none: these do not count.
    """
    script = _script(target)
    with pytest.MonkeyPatch.context() as patch:
        if ours:
            PLUG_INS[target][1](_Patched(patch, script))
            patch.setitem(runner.NEWEST, target, _newest)
        patch.setattr(runner, "_launch", _launch)
        patch.setattr(runner, "ThreadPoolExecutor", _OneByOne)
        rows = runner.run_matrix(work, jobs=1, target=target)
    control = next(row for row in rows if row.label.startswith("no crash"))
    assert not ours or control.outcome.newest_complete_step == 10, "which checkpoints are complete is not seen"
    counted = [row for row in rows if row.crashed or row is control]
    for row in counted:
        if row.verdict != "PASS":
            print(f"{target}: {row.label}: {row.verdict} {row.outcome}")
    return Counter(row.verdict for row in counted)


class _Patched:
    """A module; what is set in it is undone."""

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.__dict__["_set"] = partial(patch.setattr, module)

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__["_set"](name, value)


class _OneByOne:
    """A pool without threads: what is forked from one does not end as the main thread does."""

    def __init__(self, jobs: int) -> None:
        self.map = map

    def __enter__(self) -> _OneByOne:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is under way."""


def _script(target: str) -> ModuleType:
    # It imports the larger of Lightning's two packages.
    sys.modules.setdefault("lightning", SimpleNamespace(pytorch=pytorch_lightning))  # type: ignore[arg-type]
    sys.modules.setdefault("lightning.pytorch", pytorch_lightning)
    sys.modules.setdefault("lightning.pytorch.callbacks", pytorch_lightning.callbacks)
    return import_module(runner.TARGETS[target])


def _launch(target: str, phase: str, out: Path, extra: Mapping[str, str] | None = None, ranks: int = 1) -> int:
    """As the package's own: its exit code."""
    out.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(target, phase, out, extra or {}))
    process.start()
    process.join(LASTS)
    code = process.exitcode
    assert code is not None, f"{phase} in {out} hangs"
    return code


def _run(target: str, phase: str, out: Path, extra: Mapping[str, str]) -> None:
    log = os.open(out.parent / f"{phase}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(extra)
    sys.argv = [target, phase, "--out", str(out)]
    _script(target).main()


def _newest(out: Path, healthy: object) -> int:
    """The step of the newest whole checkpoint that our plug-in wrote; 0 if there is none."""
    steps = [0]
    holding_tags = [(path, None) for path in out.glob("checkpoint-*")]
    tags = [(path.parent, path.name) for path in out.glob("checkpoints/ck-*.ckpt")]
    for directory, tag in [*holding_tags, *tags]:
        with suppress(CheckpointError):
            if not verify_checkpoint(directory, tag).problems:
                steps += map(int, re.findall(r"\d+", tag or directory.name)[-1:])
    return max(steps)
