"""One small run, as each Neuron trainer would have saved it, for the pages that migrate it."""

import json
from pathlib import Path


def write_old_runs(directory: Path) -> None:
    """``nxd/step_3``, ``nxdt/checkpoints``, ``optimum/checkpoint-3`` and ``nemo/checkpoints``, of the same three steps.

    With config.json, the names for NxD's optimizer, and ``log.json``: the losses of the next two steps of the old run.
    """
    from tests.hugging_face.reference import Job, Model  # transformers takes seconds to import
    from tests.migrate.old_run import STEPS, old_run
    from tests.migrate.written import names_by_group, write_nxd, write_nxdt, write_optimum
    from tests.migrate.written_by_nemo import NemoJob, write_nemo

    run = old_run(Job(Model(heads=8, head_dim=4), tp=4, qkv="fused", copies=2))
    write_nxd(directory / "nxd" / f"step_{STEPS}", run, dp=2)
    write_nxdt(directory / "nxdt", run, dp=2)
    write_optimum(directory / "optimum", run, dp=2)
    write_nemo(directory / "nemo" / "checkpoints", run, NemoJob(tp=2, pp=2, dp=2))
    (directory / "config.json").write_text(json.dumps(run.job.model.config))
    (directory / "names.json").write_text(json.dumps(names_by_group(run)))
    (directory / "log.json").write_text(json.dumps(run.next_losses))
