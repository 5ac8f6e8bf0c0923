"""One small checkpoint of every layout that is recognised, and how each is migrated."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nxd_ckpt import convert
from tests.hugging_face.reference import Job, Model
from tests.migrate.old_run import STEPS, OldRun
from tests.migrate.written import (
    names_by_group,
    write_legacy,
    write_nxd,
    write_nxdt,
    write_old_optimum,
    write_optimum,
    write_pickled_optimum,
)
from tests.migrate.written_adapter import write_adapter
from tests.migrate.written_by_dcp import by_name, write_tiered
from tests.migrate.written_by_nemo import NemoJob, write_nemo
from tests.migrate.written_by_torch_xla import write_fsdp, write_xm_save

JOB = Job(Model(layers=1, heads=4, head_dim=2), tp=2, qkv="linear", copies=1)
PLAIN = Job(Model(layers=1, heads=4, head_dim=2), tp=2)
APART = Job(Model(layers=1, heads=4, head_dim=2), tp=2, fused_mlp=False)
STAGES = Job(Model(layers=2, heads=4, head_dim=2), tp=2, pp=2)


def untrained(job: Job) -> OldRun:
    """Numbers in the place of a training."""
    state = job.model.state()
    moments = {"exp_avg": {name: tensor / 3 for name, tensor in state.items()}}
    return OldRun(job, state, moments, {"last_epoch": STEPS}, 0.1, [])


class Layout(NamedTuple):
    """``write`` makes it in a directory, and returns what is migrated."""

    write: Callable[[Path], Path]
    form: str = "tag"
    names: bool = False
    """Whether nothing says whose the optimizer's entries are."""
    job: Job = PLAIN


def _xm_save(folder: Path) -> Path:
    write_xm_save(folder / "run" / "last.pth", untrained(PLAIN))
    return folder / "run"


def _dcp(folder: Path) -> Path:
    convert(_xm_save(folder), folder / "dcp", names="hf", to="dcp")
    return folder / "dcp"


LAYOUTS: Mapping[str, Layout] = {
    "nxd": Layout(lambda folder: write_nxd(folder / "step_3", untrained(STAGES), dp=2), names=True, job=STAGES),
    "nxd xser": Layout(lambda folder: write_nxd(folder / "step_3", untrained(PLAIN), xser=True), names=True),
    "nxd 0.1": Layout(lambda folder: write_legacy(folder / "last", untrained(PLAIN)), names=True),
    "nxdt": Layout(lambda folder: write_nxdt(folder, untrained(JOB), dp=2), job=JOB),
    "optimum": Layout(lambda folder: write_optimum(folder, untrained(STAGES), dp=2), job=STAGES),
    "optimum 0.1": Layout(lambda folder: write_pickled_optimum(folder, untrained(APART)), job=APART),
    "optimum 0.0 xser": Layout(lambda folder: write_old_optimum(folder, untrained(APART)), job=APART),
    "adapter": Layout(lambda folder: write_adapter(folder, PLAIN), form="hf"),
    "nemo": Layout(lambda folder: write_nemo(folder / "ckpt", untrained(STAGES), NemoJob(pp=2, dp=2)), job=STAGES),
    "tiered": Layout(lambda folder: write_tiered(folder / "job", by_name(untrained(PLAIN)), STEPS)),
    "tiered by ray": Layout(lambda folder: write_tiered(folder / "job", by_name(untrained(PLAIN)), STEPS, by_ray=True)),
    "fsdp": Layout(lambda folder: write_fsdp(folder / "old", untrained(PLAIN))),
    "xm.save": Layout(_xm_save),
    "dcp": Layout(_dcp),
}


def options_of(name: str, folder: Path) -> dict[str, Any]:
    """What the migration is told, and the form that is made."""
    layout, config = LAYOUTS[name], folder / "config.json"
    config.write_text(json.dumps(layout.job.model.config))
    given = {"saved_param_names": names_by_group(untrained(layout.job))} if layout.names else {}
    return {"to": layout.form, "config": config, **given}
