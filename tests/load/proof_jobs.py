"""Saves and loads that show whether broken code is noticed, see `proof_edits`."""

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.replaced_code import replace_code

REPOSITORY = Path(__file__).parents[2]

Change = tuple[str, str, str]
"""A file of the package, what is there once, and what is put in its place."""


def run(
    change: Change | None,
    is_of_save: bool,
    saving: str,
    loading: str,
    directory: str,
    world_size: int,
    rank: int,
    answer: Connection,
) -> None:
    """Save and load, one of them with the code changed; answer with the class and the text of the error, if any."""
    logging.disable()
    if world_size > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{directory}-store", rank=rank, world_size=world_size)
    try:
        broken, sound = (None, None) if change is None else _codes_of(*change)
        jobs()[saving](Path(directory), True)  # imports everything, and saves
        if change is not None and broken is not None and sound is not None:
            replace_code(sound, broken)
            if is_of_save:
                directory = f"{directory}-broken"
                jobs()[saving](Path(directory), True)
                replace_code(broken, sound)
        jobs()[loading](Path(directory), True)
        answer.send(("", ""))
    except Exception as error:
        answer.send((type(error).__name__, str(error)))


def _codes_of(file: str, old: str, new: str) -> tuple[Any, Any]:
    path = REPOSITORY / file
    text = path.read_text()
    if text.count(old) != 1:
        raise LookupError(f"{file} has {text.count(old)} times {old!r}, expected once")
    module = import_module(file.removesuffix(".py").replace("/", "."))
    origin = str(module.__file__)
    return compile(text.replace(old, new), origin, "exec"), compile(text, origin, "exec")


def jobs() -> dict[str, Callable[[Path, bool], Any]]:
    """Jobs by name; each takes a directory of its own, and the option ``prove``."""
    kinds = [
        "plain", "stepped", "by name", "dicts", "lists", "own state", "filtered", "reversed", "hooks", "content",
    ]  # fmt: skip
    sizes = {"same": "dp2tp2", "more dp": "dp4", "more tp": "tp4", "stages": "tp2pp2"}
    return {
        **{f"save {kind}": partial(_save, kind) for kind in kinds},
        **{f"load {kind}": partial(_load, kind) for kind in kinds},
        "save ranks": _save_ranks,
        **{f"load ranks, {name}": partial(_load_ranks, size, True) for name, size in sizes.items()},
        **{f"load ranks, {name}, no masters": partial(_load_ranks, size, False) for name, size in sizes.items()},
        "save exact": partial(_save_exact, True),
        "load exact": _load_exact,
        "save rounded": partial(_save_exact, False),
        "load rounded": _load_rounded,
        "save mesh": _save_mesh,
        "load mesh": partial(_load_mesh, False),
        "load mesh, columns": partial(_load_mesh, True),
        "save hugging face": _save_hugging_face,
        "load hugging face": _load_hugging_face,
    }


def _model(seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 64, bias=False),
        torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False),
    )  # fmt: skip
    model[0].to(memory_format=torch.channels_last)
    model[5].weight = model[3].weight  # tied
    return model


def _optimizer(model: Any, rate: float = 0.01) -> Any:
    import torch

    wide = [one for one in model.parameters() if one.dim() > 1]
    narrow = [one for one in model.parameters() if one.dim() < 2]
    groups: Any = [{"params": wide}, {"params": narrow, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, amsgrad=True)


def _train(model: Any, optimizer: Any, scheduler: Any = None, steps: int = 2) -> None:
    import torch

    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def _made(kind: str, seed: int, trained: bool) -> dict[str, Any]:
    """The arguments of a save or a load."""
    import torch
    from torch.optim import lr_scheduler as lr

    model = _model(seed)
    optimizer = _optimizer(model, 0.01 if seed else 0.02)
    scheduler: Any = lr.StepLR(optimizer, 1)
    if kind == "lists":
        scheduler = [lr.StepLR(optimizer, 1), lr.CosineAnnealingLR(optimizer, 7)]
    if trained or kind == "stepped":
        _train(model, optimizer, None if kind == "lists" else scheduler, 1 if seed else 2)
    if kind == "lists":
        scheduler[0].last_epoch = 3 - seed
    if kind == "stepped" and seed:  # what the tag lacks
        first = next(iter(optimizer.state.values()))
        first["stale"] = torch.ones(3)
        optimizer.state["whole"] = 1
    if kind == "stepped" and not seed:
        optimizer.state.pop(model[4].weight)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if kind == "own state" and not seed:
        for number, state in enumerate(optimizer.state.values()):
            state["history"] = [torch.full((2,), float(number)), {"steps": number}]
            state["flag"] = True
    if kind == "by name":
        other = torch.nn.Linear(3, 3)
        second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        other(torch.ones(1, 3)).sum().backward()
        second.step() if not seed else None
        named = {"first": model, "second": other}
        return {"model": named, "optimizer": {"first": optimizer, "second": second}}
    if kind == "dicts" and seed:
        return {"model": {}, "optimizer": {}, "scheduler": {}}
    if kind == "content":
        objects["rank_content"] = {} if seed else {"position": 7}
    if kind == "reversed" and seed:
        wide = [one for one in model.parameters() if one.dim() > 1][::-1]
        narrow = [one for one in model.parameters() if one.dim() < 2]
        groups: Any = [{"params": wide}, {"params": narrow, "weight_decay": 0.0}]
        objects["optimizer"] = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
        objects["scheduler"] = None
    if kind == "hooks" and seed:
        model[4].register_load_state_dict_pre_hook(lambda *_: None)
    return objects


def _save(kind: str, directory: Path, prove: bool) -> None:
    from nxd_ckpt import save_checkpoint

    made = _made(kind, 0, True)
    save_checkpoint(directory, "t", durable=False, **made)


def _load(kind: str, directory: Path, prove: bool) -> None:
    from nxd_ckpt import load_checkpoint

    made = _made(kind, 1, False)
    filters: dict[str, Any] = {}
    if kind == "filtered":
        filters["ignore_keys"] = ["model/3.*", "optim/1.*"]
    load_checkpoint(directory, "t", prove=prove, **made, **filters)


def _save_ranks(directory: Path, prove: bool) -> None:
    import torch

    from tests.reshard.ranks import save_job
    from tests.reshard.transformer import layout_of, weights_of

    weights = weights_of(torch.bfloat16)
    save_job(directory, weights, layout_of("dp2tp2", weights))


def _load_ranks(sizes: str, master_weights: bool, directory: Path, prove: bool) -> None:
    import torch

    from tests.reshard.ranks import fresh, load_rank
    from tests.reshard.transformer import layout_of, weights_of

    weights = weights_of(torch.bfloat16)
    layout = layout_of(sizes, weights, master_weights=master_weights)
    for number, at in enumerate(layout.ranks):
        live = fresh(weights, layout, at, stepped=bool(number % 2))
        load_rank(directory, live, partitions=layout.partitions, prove=prove)


def _zero1(dtype: Any, seed: int, master_weights: bool) -> Any:
    import torch

    from tests.live.doubles import ShardedOptimizer

    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 5).to(dtype)
    settings: Any = {"lr": 1.0, "save_master_weights": master_weights}
    optimizer = ShardedOptimizer([{"params": list(model.parameters())}], 0, [[0]], **settings)
    return model, optimizer


def _save_exact(is_exact: bool, directory: Path, prove: bool) -> None:
    import torch

    from nxd_ckpt import save_checkpoint

    if is_exact:
        model = torch.nn.Linear(6, 5)
        save_checkpoint(directory, "t", model, torch.optim.AdamW(model.parameters()), durable=False)
        return
    saved, optimizer = _zero1(torch.bfloat16, 0, True)
    with torch.no_grad():
        for group in optimizer.base_optimizer.param_groups:
            for shard in group["params"]:
                shard.add_(torch.rand_like(shard) / 1000)
    save_checkpoint(directory, "t", saved, optimizer, durable=False)


def _load_exact(directory: Path, prove: bool) -> None:
    """Float32 weights into bfloat16 ones with float32 master weights."""
    import torch

    from nxd_ckpt import load_checkpoint

    model, optimizer = _zero1(torch.bfloat16, 1, True)
    load_checkpoint(directory, "t", model, optimizer, prove=prove)


def _load_rounded(directory: Path, prove: bool) -> None:
    """Bfloat16 weights with master weights into float32 ones."""
    import torch

    from nxd_ckpt import load_checkpoint

    torch.manual_seed(1)
    model = torch.nn.Linear(6, 5)
    load_checkpoint(directory, "t", model, torch.optim.AdamW(model.parameters()), prove=prove)


def _mesh_job(in_columns: bool, seed: int) -> tuple[Any, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    from tests.mesh import jobs

    model, mesh = jobs.net(seed=seed), init_device_mesh("cpu", (2,))
    if in_columns:
        for block in model.blocks.values():
            parallelize_module(block, mesh, {"up": RowwiseParallel(), "down": RowwiseParallel()})
    else:
        jobs.sharded(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def _save_mesh(directory: Path, prove: bool) -> None:
    import torch

    from nxd_ckpt import save_checkpoint

    model, optimizer = _mesh_job(False, 0)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    save_checkpoint(directory, "t", model, optimizer, durable=False)


def _load_mesh(in_columns: bool, directory: Path, prove: bool) -> None:
    from nxd_ckpt import load_checkpoint

    load_checkpoint(directory, "t", *_mesh_job(in_columns, 1), prove=prove)


def _save_hugging_face(directory: Path, prove: bool) -> None:
    from tests.hugging_face.reference import Model
    from tests.hugging_face.saved import write_model

    write_model(directory, Model())


def _load_hugging_face(directory: Path, prove: bool) -> None:
    """Into rounded weights, of which ZeRO-1's shards are exact copies."""
    import torch

    from nxd_ckpt import Topology, load_checkpoint
    from tests.hugging_face.reference import Job, Model
    from tests.hugging_face.saved import live, local_state, write_model
    from tests.live.doubles import ShardedOptimizer

    weights = write_model(directory, Model())
    model = live(local_state(Job(Model()), weights, Topology()), dtype=torch.bfloat16)
    optimizer = ShardedOptimizer([{"params": list(model.parameters())}], 0, [[0]], lr=1.0, save_master_weights=True)
    load_checkpoint(directory, model=model, optimizer=optimizer, weights_only=True, prove=prove)
