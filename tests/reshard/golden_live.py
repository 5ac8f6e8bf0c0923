"""A rank of another job that loads what NxD 0.18 wrote, and what it must hold then."""

from typing import Any

import torch

from nxd_ckpt import Topology, load_checkpoint
from tests.golden.checkpoints import groups_like, module_like
from tests.live.doubles import ExpertShardedOptimizer, ShardedOptimizer
from tests.reshard.golden import TAG, GoldenModel
from tests.reshard.ranks import Pipeline, entries_of
from tests.tag.equality import difference


class Live:
    """A rank of another job, on plain torch, with nothing of the checkpoint in it."""

    def __init__(self, golden: GoldenModel, at: Topology) -> None:
        self.wanted, self.at, self.zero1 = golden.held_on(at), at, golden.zero1
        self.stage = module_like(self.wanted)
        self.model: Any = Pipeline(self.stage) if at.pp > 1 else self.stage
        groups = groups_like(self.wanted, self.stage)
        settings: dict[str, Any] = {"lr": 0.5, "betas": (0.5, 0.5)}
        masters = golden.saved.config["master_in_ckpt"]
        dp_groups, expert_dp_groups = ([at.replicas(at.coordinates, expert=expert)] for expert in (False, True))
        if not golden.zero1:
            self.optimizer: Any = torch.optim.AdamW(groups, **settings)
        elif at.ep == 1:
            self.optimizer = ShardedOptimizer(groups, at.rank, dp_groups, save_master_weights=masters, **settings)
        else:
            self.optimizer = ExpertShardedOptimizer(
                groups, at.rank, dp_groups, expert_dp_groups, save_master_weights=masters, **settings
            )

    def load(self, golden: GoldenModel, **options: Any) -> None:
        load_checkpoint(golden.saved.directory, TAG, self.model, self.optimizer, topology=self.at, **options)

    def entries(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter; ``master`` is what a ZeRO-1 optimizer steps on."""
        named = dict(self.stage.named_parameters(remove_duplicate=False))
        found = {}
        for name, _, key, state, _ in entries_of(self.optimizer, named):
            found[name] = {**state.get(key, {}), **({"master": key.detach()} if self.zero1 else {})}
        return found

    def options(self) -> dict[str, list[dict[str, Any]]]:
        named = dict(self.stage.named_parameters(remove_duplicate=False))
        return {
            name: [{option: group[option] for option in ("lr", "weight_decay", "betas")} for group in groups]
            for name, _, _, _, groups in entries_of(self.optimizer, named)
        }


def check(golden: GoldenModel, live: Live) -> None:
    """Model, moments, steps, what is stepped on, and options are this rank's part of what was held."""
    assert None is difference(live.wanted["model"], dict(live.stage.state_dict()))
    found = live.entries()
    for name, wanted in live.wanted["entries"].items():
        if not live.zero1:  # a torch optimizer that had no state counts in tensors, whatever the tag counts in
            wanted = {**wanted, "step": torch.tensor(float(wanted["step"]))}
        unsaved = {"master": found[name].get("master")} if live.zero1 and "master" not in wanted else {}
        assert None is difference({**wanted, **unsaved}, found[name], name)
    wanted_options = golden.options()
    for name, options in live.options().items():
        assert [wanted_options[name]] * len(options) == options
