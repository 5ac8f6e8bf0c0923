"""A run that a trainer resumes by our plug-in is the uninterrupted one, for optimizers of the registry."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt.testing.resume import _first_difference, _leaves, _state
from tests.training.registry import OPTIMIZERS, OWN, Case

pytestmark = pytest.mark.filterwarnings("ignore:::pytorch_lightning", "ignore:::lightning_fabric")

Objects = tuple[Any, ...]


def by_lightning(directory: Path, optimizer: Any) -> tuple[Objects, Objects]:
    """What is live after three epochs; resumed after two of them."""
    from tests.integrations.lightning_run import every_epoch, fit

    def objects(module: Any) -> Objects:
        trainer = module.trainer
        return module, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler

    whole = fit(every_epoch(directory / "whole"), optimizer=optimizer)
    fit(every_epoch(directory / "part"), optimizer=optimizer, epochs=2)
    (last,) = (directory / "part").glob("last*")
    resumed = fit(every_epoch(directory / "rest"), optimizer=optimizer, ckpt_path=str(last), seed=5)
    return objects(whole), objects(resumed)


def by_transformers(directory: Path, optimizer: Any) -> tuple[Objects, Objects]:
    """After four steps; resumed after two of them."""
    from tests.integrations.transformers_run import Quick, trained

    class Chosen(Quick):
        optimizer: Any

        def create_optimizer(self, *args: Any, **options: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = optimizer(self.model.parameters(), lr=0.1)
            return self.optimizer

    def objects(trainer: Any) -> Objects:
        return trainer.model, trainer.optimizer, trainer.lr_scheduler

    whole = trained(directory / "whole", kind=Chosen)
    resumed = trained(directory / "rest", kind=Chosen, resume=str(directory / "whole" / "checkpoint-2"), seed=5)
    return objects(whole), objects(resumed)


def by_accelerate(directory: Path, optimizer: Any) -> tuple[Objects, Objects]:
    """After four steps; resumed after two of them."""
    from tests.integrations.accelerate_run import Job

    def objects(job: Any) -> Objects:
        return job.model, job.optimizer, job.schedule

    whole = Job(directory / "whole", optimizer=optimizer)
    whole.run(4)
    Job(directory / "part", optimizer=optimizer).run(2)
    resumed = Job(directory / "part", optimizer=optimizer)
    resumed.resume()
    resumed.run(2)
    return objects(whole), objects(resumed)


TRAINERS: dict[str, Callable[[Path, Any], tuple[Objects, Objects]]] = {
    "Lightning": by_lightning,
    "transformers": by_transformers,
    "accelerate": by_accelerate,
}
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    **{name: OPTIMIZERS[name] for name in ("SGD", "Adam", "NAdam", "Adafactor")},
    **{name: OWN[name] for name in ("Lion", "Muon", "Shampoo", "SOAP", "GaLore", "8 bits", "factored")},
    **{name: OWN[name] for name in ("schedule-free", "maximize")},
}
CAST = ("Lion", "8 bits", "GaLore")
"""What Lightning does not resume with any plug-in: it calls torch's ``Optimizer.load_state_dict``, which casts state to
the parameter's dtype, and takes text apart."""

CASES: dict[str, Case] = {
    f"{trainer}, {name}": Case(optimizer=optimizer, soak=name not in ("AdamW, fused", "SOAP"))
    for trainer in TRAINERS
    for name, optimizer in KINDS.items()
    if trainer != "Lightning" or name not in CAST
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if case.soak else []) for name, case in CASES.items()]
)
def test_a_run_that_a_trainer_resumes_is_the_uninterrupted_one(tmp_path: Path, name: str) -> None:
    """Weights, buffers, state and options of the optimizer, the schedule: values, types, dtypes, shapes, strides."""
    trainer = TRAINERS[name.partition(",")[0]]
    whole, resumed = trainer(tmp_path, CASES[name].optimizer)
    assert "" == _first_difference(dict(_leaves("", _state(whole))), dict(_leaves("", _state(resumed))))
