"""A small job in TorchTitan's own containers, with our checkpoint manager; what each of two ranks does with it."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

if find_spec("triton") is None:  # kernels that 0.2.2 imports with everything, and checkpoints never call
    kernels: Any = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules.setdefault(kernels.__name__, kernels)

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from nxd_ckpt.integrations.torchtitan import AsyncMode, CheckpointManager, TitanCheckpointManager
from tests.integrations.killed import SAVES, note

IS_0_3 = hasattr(TitanCheckpointManager, "Config")


class Counter(torch.nn.Module):
    """Counts what passes, in a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x


class Model(torch.nn.Module):
    """Two layers, of which one is cut unevenly over two ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.counter: Any = Counter()
        self.embed = torch.nn.Linear(4, 5)
        self.head = torch.nn.Linear(5, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embed(self.counter(x)).tanh())
        return found


class Numbers(IterableDataset[torch.Tensor]):
    """Each rank's numbers, from where it stopped."""

    def __init__(self, rank: int) -> None:
        self._rank, self._at = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self._at += 1
            yield torch.full((4,), float(self._at * 10 + self._rank)).sin()

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


class TrainState:
    """As much of TorchTitan's trainer as it saves."""

    def __init__(self) -> None:
        self.step, self.ntokens_seen = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class Adapter(StateDictAdapter):  # type: ignore[misc]
    """Hugging Face's names: the same, behind "model."."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): tensor for name, tensor in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        return HuggingFaceStorageReader(path)


class LateStager(DefaultStager):
    """Stages what it is given after the model's next forward pass: staging runs beside training."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(StagingOptions(False, True, True, False))
        self.passed, self._thread = Event(), ThreadPoolExecutor(1)
        model.register_forward_hook(lambda *_: self.passed.set())

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Future[dict[str, Any]]:
        self.passed.clear()
        return self._thread.submit(self._staged, state_dict)

    def _staged(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.passed.wait()
        found: Any = super().stage(state_dict)
        return dict(found.result())


class Training:
    """A job on this rank, with a manager of the class ``kind``; ``options`` are those of its config."""

    def __init__(
        self,
        rank: int,
        directory: Path,
        *,
        seed: int = 1,
        kind: Any = CheckpointManager,
        ft: Any = None,
        **options: Any,
    ) -> None:
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(seed)
        self.model = Model()
        # As where activations are recomputed, so that names of modules are not those of the state dict.
        self.model.counter = checkpoint_wrapper(self.model.counter, checkpoint_fn=_called)
        fully_shard(self.model.embed, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizers, self.schedulers = _containers(self.model)
        self.loader = ParallelAwareDataloader(Numbers(rank), rank, ranks, batch_size=3)
        self.state = TrainState()
        self.manager = _manager(
            kind,
            options,
            ft=ft,
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.state},
            sd_adapter=Adapter(),
            base_folder=str(directory),
        )

    def run(
        self, until: int, last: bool = False, noted: Callable[[int, float], None] = lambda step, loss: None
    ) -> list[tuple[float, float]]:
        """Train as TorchTitan's trainer does, from where it is; the loss and learning rate of each step. Each loss is
        ``noted`` before its save."""
        late = None
        if self.manager.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            late = self.manager.stager = LateStager(self.model)
        found = []
        for batch in self.loader:
            self.state.step += 1
            self.state.ntokens_seen += batch.numel()
            lr = self.schedulers.schedulers[0].get_last_lr()[0]
            loss = self.model(batch).square().mean()
            self.optimizers.zero_grad()
            loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            found.append((float(loss), lr))
            noted(self.state.step, float(loss))
            self.manager.save(self.state.step, last_step=last and self.state.step == until)
            if self.state.step == until:
                break
        if late is not None:
            late.passed.set()
        self.manager.maybe_wait_for_staging()
        self.manager.close()  # as trainers end: the last save is under way
        return found


def _containers(model: torch.nn.Module) -> tuple[Any, Any]:
    """AdamW and a decay of its learning rate, in the containers of this release."""
    if IS_0_3:
        from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig

        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})]
        config: Any = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        optimizers = config.build(model_parts=[model])
    else:
        from torchtitan.components.lr_scheduler import LRSchedulersContainer

        optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.1, "foreach": False})
    return optimizers, LRSchedulersContainer(optimizers, _decay)


def _manager(kind: Any, options: dict[str, Any], *, ft: Any = None, **parts: Any) -> Any:
    """A manager of that class, as the trainer of this release makes it."""
    common = {"enable": True, "folder": "checkpoint", "interval": 2, **options}
    if IS_0_3:
        return kind.Config(**common).build(**parts)
    from torchtitan.config import Checkpoint

    return kind(checkpoint_config=Checkpoint(**common), ft_manager=ft, **parts)


def _called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Recompute nothing, which would be counted too."""
    return module(*args, **kwargs)


def _decay(step: int) -> float:
    return 0.9**step


def resumed(rank: int, directory: Path, mode: str) -> list[Any]:
    """Train six steps, and again from the fourth on in another job: the losses of the last two steps of each."""
    first = Training(rank, directory, keep_latest_k=2, async_mode=mode).run(6)
    again = Training(rank, directory, seed=2, async_mode=mode, load_only=True)
    assert again.manager.load(step=4)
    state = (again.state.step, again.state.ntokens_seen, int(again.model.counter.seen))
    latest = Training(rank, directory, seed=2, load_only=True)
    assert latest.manager.load()
    return [first[4:], again.run(6), state, latest.state.step]


def script(directory: Path, log: Path) -> None:
    """Train on one rank from the latest checkpoint on, and end as TorchTitan's trainers do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    training = Training(0, directory, keep_latest_k=2, async_mode="async", interval=1)
    training.manager.load()
    training.run(SAVES, noted=partial(note, log))
    dist.destroy_process_group()


def from_an_earlier_step(rank: int, directory: Path) -> list[int]:
    """Train six steps, go on from the second for two, and load the latest: the step and the tag that it is."""
    Training(rank, directory).run(6)
    earlier = Training(rank, directory)
    assert earlier.manager.load(step=2)
    earlier.run(4)
    latest = Training(rank, directory, load_only=True)
    assert latest.manager.load()
    return [latest.state.step, latest.manager._find_load_step()]


def continued(rank: int, directory: Path) -> list[Any]:
    """Two steps under TorchTitan's own manager, then under ours; the same without a break."""
    own = Training(rank, directory / "own", kind=TitanCheckpointManager)
    whole = own.run(4)
    Training(rank, directory / "both", kind=TitanCheckpointManager).run(2)
    taken_up = Training(rank, directory / "both", seed=2)
    assert taken_up.manager.load()
    return [whole[2:], taken_up.run(4)]


def last_save(rank: int, directory: Path) -> list[tuple[float, float]]:
    """The last save holds the model alone, in another dtype."""
    return Training(rank, directory, export_dtype="bfloat16", last_save_model_only=True).run(3, last=True)


def after_the_last_save(rank: int, directory: Path) -> list[str]:
    """The error of a run that is to go on from a tag of the model alone; and an earlier step, which loads."""
    Training(rank, directory, last_save_model_only=True).run(3, last=True)
    again = Training(rank, directory)
    try:
        again.manager.load()
    except CheckpointException as error:
        assert again.manager.load(step=2)
        return [str(error)]
    return []


def of_other_ranks(rank: int, directory: Path) -> list[str]:
    """The error of a run whose data are divided into other parts than the tag's; and the step after what it says."""
    Training(rank, directory).run(2)
    said = []
    for options in ({}, {"exclude_from_loading": ["dataloader"]}):
        again = Training(rank, directory, seed=2, **options)
        again.manager.states["dataloader"] = ParallelAwareDataloader(Numbers(rank), 2 + rank, 4, batch_size=3)
        before = [_whole(one).tolist() for one in again.model.parameters()]
        try:
            again.manager.load()
        except CheckpointException as error:
            said.append(str(error))
            assert before == [_whole(one).tolist() for one in again.model.parameters()]
    return [*said, str(again.state.step)]


class Replica:
    """As much of torchft's manager as checkpoints ask: the replica that saves, and its state's functions."""

    enabled = True

    def __init__(self, replica: int, saves: bool) -> None:
        self.replica_id = replica
        self.manager = SimpleNamespace(participating_rank=lambda: int(not saves), set_state_dict_fns=lambda *_: None)


def fault_tolerant(rank: int, directory: Path) -> list[Any]:
    """Two replicas: the first saves all, each its own data loader; the second is started again and reads on."""
    for replica in (0, 1):
        Training(rank, directory, ft=Replica(replica, saves=replica == 0), async_mode="async").run(2 + 2 * replica)
    again = Training(rank, directory, seed=2, ft=Replica(1, saves=False), async_mode="async")
    assert again.manager.load()
    return [again.state.step, again.loader.state_dict()]


def through_the_trainer(rank: int, directory: Path) -> list[str]:
    """The manager that a trainer's module has after the import of ours."""
    trainer = ModuleType("torchtitan.train")
    trainer.CheckpointManager = TitanCheckpointManager  # type: ignore[attr-defined]
    sys.modules[trainer.__name__] = trainer
    import nxd_ckpt.integrations.torchtitan_trainer

    assert nxd_ckpt.integrations.torchtitan_trainer
    return [f"{trainer.CheckpointManager.__module__}", _titan_file()]


def _titan_file() -> str:
    return str(sys.modules[TitanCheckpointManager.__module__].__file__)


def initially(rank: int, directory: Path, path: Path, hf: bool) -> list[Any]:
    """A model that another job, or Hugging Face, has."""
    training = Training(rank, directory, seed=3, initial_load_path=str(path), initial_load_in_hf=hf)
    assert training.manager.load()
    return [_whole(parameter).tolist() for parameter in training.model.parameters()]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
