"""Train a small model in TorchTitan 0.3's containers under FSDP2, checkpointed by nxd_ckpt, and go on where it ended.

::

    torchrun --nproc_per_node 2 examples/train_torchtitan.py      # twice: the second run goes on after the first
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from nxd_ckpt.integrations.torchtitan import CheckpointManager  # in place of TorchTitan's own


class Numbers(IterableDataset):
    """Data of one rank, which knows its place."""

    at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield torch.full((8,), float(self.at)).sin()

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class TrainState:
    """The trainer's counters."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


dist.init_process_group("gloo")  # the group and the mesh of your device: "neuron", "cuda", ...
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})]
optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
schedulers = LRSchedulersContainer(optimizers, lambda step: 0.9**step)
loader, state = ParallelAwareDataloader(Numbers(), rank, ranks, batch_size=4), TrainState()
manager = CheckpointManager.Config(enable=True, interval=2, keep_latest_k=2, async_mode="async").build(
    dataloader=loader,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedulers,
    states={"train_state": state},
    sd_adapter=None,
    base_folder="outputs",
)
manager.load()  # the latest complete checkpoint, if there is one
first = state.step + 1
for batch in loader:
    state.step += 1
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    manager.maybe_wait_for_staging()
    optimizers.step()
    optimizers.zero_grad()
    schedulers.step()
    manager.save(state.step)  # last_step=True makes the run's last save one of the model alone
    if state.step == first + 3:
        break
manager.maybe_wait_for_staging()
manager.maybe_wait_for_saving()
manager.close()
if rank == 0:
    print(f"steps {first} to {state.step} on {ranks} ranks: loss {loss.item():.4f}")
dist.destroy_process_group()
