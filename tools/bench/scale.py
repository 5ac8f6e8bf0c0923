"""What many tensors and many ranks cost: ``python -m tools.bench.scale``.

One rank saves and loads 25,000, 50,000 and 100,000 tensors of 32 bytes; rank 0 collects, judges and commits what 1,024,
4,096 and 16,384 ranks voted, whose votes are written to disk by this process; and the same on a mesh of that many
ranks, fsdp x tp, which hold 2,000 tensors; with the memory that such a rank plans in. Microseconds for each tensor, and
for each rank, stay the same if the cost is linear.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from nxd_ckpt import Checkpointer, Partition, Topology
from nxd_ckpt.commit.commit import Commit, commit
from nxd_ckpt.commit.publication import Staged
from nxd_ckpt.commit.session import Session
from nxd_ckpt.commit.voting import AttemptVotes
from nxd_ckpt.coordination.control_files import staging_dir, verdict_dir
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import (
    CRC_BLOCK,
    FileEntry,
    ParameterSpec,
    Parts,
    RankIndex,
    TensorEntry,
    dump_index,
    load_index,
)
from nxd_ckpt.core.mesh import Layout, Mesh, MeshGroup, MeshPlace, Placed, RankStructure, Shard, groups_of
from nxd_ckpt.core.retention_rules import Last
from nxd_ckpt.core.votes import Verdict, Vote
from nxd_ckpt.formats.state import ModelState, SaveState, StateTensor
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.loading.filters import Filter
from nxd_ckpt.loading.load_context import load_context
from nxd_ckpt.loading.load_planner import LoadPlanner
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.saving.plan import SavePlan, plan_save
from nxd_ckpt.saving.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.surroundings import gc_paused
from nxd_ckpt.tag.choosing import choose_tag, open_complete_tag
from tools.bench.host import peak, reset_peak

TENSORS, RANKS = (25_000, 50_000, 100_000), (1_024, 4_096, 16_384)
ATTEMPT = "bench-1"
MESH, TP, MESH_TENSORS = ("fsdp", "tp"), 8, 2_000

ResultT = TypeVar("ResultT")


class Clock:
    """Seconds of each step, by name, as ``now`` counts them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}

    def __call__(self, step: str, work: Callable[[], ResultT]) -> ResultT:
        started = self._now()
        result = work()
        self.seconds[step] = self._now() - started
        return result


def many_tensors(directory: Path, count: int) -> dict[str, float]:
    """Seconds of what a save and a load of ``count`` tensors do beside moving bytes."""
    clock = Clock(time.perf_counter)
    state = {f"layers.{number}.weight": torch.full((8,), float(number)) for number in range(count)}
    with Checkpointer(directory, durable=False) as checkpointer:
        for tag in ("first", "second"):
            pending = checkpointer.save(tag, state, async_save=True)
            pending.wait()
    clock.seconds |= {"stage": pending.timings["stage_seconds"], "commit": pending.timings["commit_seconds"]}
    storage, here = LocalStorage(directory), Topology()
    data = storage.read(f"second/{names.index_file(here.coordinates)}")
    index = clock("index load", lambda: load_index(data, "index"))
    clock("index dump", lambda: dump_index(index))
    opened = clock("open", lambda: open_complete_tag(storage, choose_tag(storage, "second")))
    options = LoadOptions(verify=True)  # as a load from a file system has it
    context = load_context(opened, here, open_model(state), None, options, Filter(options))
    with gc_paused():
        clock("load plan", LoadPlanner(context).trees)
    return clock.seconds


def many_ranks(directory: Path, count: int) -> dict[str, float]:
    """CPU seconds of what ``count`` ranks' votes make rank 0 do, and of what the verdict makes any other."""
    clock = Clock(time.process_time)
    topology = Topology(dp=count)
    index = dump_index(RankIndex(topology.coordinates, {}, ()))
    _decide(clock, directory, topology, {"tag": "step"}, index, Commit(Staged(ATTEMPT, "step"), Parts()))
    return clock.seconds


def mesh_ranks(directory: Path, count: int) -> dict[str, float]:
    """The same of ``count`` ranks of a mesh; besides, what a first save makes of their words, and a rank's plan."""
    clock, topology = Clock(time.process_time), Topology(dp=count)
    groups, plan = _mesh_plan(clock, topology)
    entries = (_entry(file, tensor) for file in plan.files for tensor in file.tensors)
    index = RankIndex(topology.coordinates, {}, tuple(entries), plan.parameters, None, plan.mesh)
    written = clock("leader's index", lambda: dump_index(index))
    request = Commit(Staged(ATTEMPT, "step"), plan.parts, parameters=plan.parameters, groups=groups)
    _decide(clock, directory, topology, plan.agreed("step", topology), written, request)
    return clock.seconds


def mesh_memory(count: int) -> int:
    """Bytes by which this process grows at most for what one rank of such a mesh knows and plans."""
    before = reset_peak()
    _mesh_plan(Clock(time.process_time), Topology(dp=count))
    return peak() - before


def _mesh_plan(clock: Clock, topology: Topology) -> tuple[list[MeshGroup], SavePlan]:
    """What a first save makes of all ranks' words, and the plan of rank 0."""
    held, ranks = _mesh_state(topology.world_size), tuple(range(topology.world_size))
    words = [RankStructure("same", [MeshPlace("mesh", MESH, held.mesh.shape, rank)]) for rank in ranks]
    words[0] = RankStructure("same", [MeshPlace("mesh", MESH, held.mesh.shape, 0, ranks)])
    groups = clock("groups", lambda: groups_of(words))
    return groups, clock("one plan", lambda: plan_save(SaveState(held.state), topology, groups))


def _decide(
    clock: Clock, directory: Path, topology: Topology, plan: Mapping[str, Any], index: bytes, request: Commit
) -> None:
    """All ranks vote, rank 0 with this index; it commits, and a rank learns of it and opens the tag."""
    storage = LocalStorage(directory, durable=False)
    storage.make_dir(verdict_dir(ATTEMPT))
    for rank in range(topology.world_size):
        storage.write(f"{staging_dir(ATTEMPT)}/{names.index_file(topology.coordinates_of(rank))}", index)
    line = FileEntry(len(index), zlib.crc32(index))
    votes = [Vote(rank, plan=plan, replica="same", index=line) for rank in range(topology.world_size)]

    def cast_all() -> None:
        for vote in votes:
            AttemptVotes(storage, ATTEMPT).cast(vote)

    clock("all votes", cast_all)
    collected = clock("collect", lambda: AttemptVotes(storage, ATTEMPT).collect(topology.world_size, 60.0))
    session = Session(storage, topology, "run", 60.0)
    clock("judge, commit", lambda: commit(session, topology, collected, replace(request, rules=[Last(2)])))
    AttemptVotes(storage, ATTEMPT).announce(Verdict())
    clock("one verdict", lambda: AttemptVotes(storage, ATTEMPT).await_verdict("step", 60.0))
    clock("open", lambda: open_complete_tag(storage, choose_tag(storage, "step")))


class _MeshState(NamedTuple):
    """The model of rank 0, and the mesh that it is on."""

    mesh: Mesh
    state: ModelState


def _mesh_state(count: int) -> _MeshState:
    """Matrices as FSDP2 over tensor parallelism cuts them, by turns along either dimension, and norms."""
    mesh = Mesh(MESH, (count // TP, TP), tuple(range(count)))
    layouts = [
        (Layout(mesh, (Shard(0, TP), Shard(0))), (16_384, 4_096)),
        (Layout(mesh, (Shard(0), Shard(1))), (16_384, 4_096)),
        (Layout(mesh, (Shard(0), None)), (16_384,)),
    ]
    tree, about, specs = dict[str, Any](), dict[Any, StateTensor](), dict[str, ParameterSpec]()
    for number in range(MESH_TENSORS):
        layout, shape = layouts[number % len(layouts)]
        name = f"layers.{number}.weight"
        tree[name] = Assembly("float32", layout.local_shape(shape, (0, 0)), ())
        specs[name] = ParameterSpec("float32", shape, Partition())
        about[name,] = StateTensor(f"model/{name}", specs[name], placed=Placed(layout, shape, (0, 0)))
    return _MeshState(mesh, ModelState(tree, lambda: about, is_placed=True, specify=lambda: specs))


def _entry(file: PlannedFile, tensor: NamedTensor) -> TensorEntry:
    """As if it had been written."""
    storage = file.image.storages[tensor.storage]
    digests = (0,) * -(-storage.nbytes // CRC_BLOCK)
    place = tensor.name, file.key, storage.offset, storage.nbytes
    return TensorEntry(*place, tensor.dtype, tensor.shape, digests, tensor.pieces)


def table(title: str, counts: Sequence[int], measure: Callable[[Path, int], dict[str, float]], directory: Path) -> None:
    """Print a column of seconds, and of microseconds for each, for each count."""
    columns = []
    for count in counts:
        place = directory / f"{title}-{count}"
        columns.append(measure(place, count))
        shutil.rmtree(place)
    print(f"{title:>16}" + "".join(f"{count:>22,}" for count in counts))
    for step in columns[0]:
        cells = [(column[step], column[step] / count * 1e6) for column, count in zip(columns, counts, strict=True)]
        print(f"{step:>16}" + "".join(f"{seconds:>9.3f} s {each:>7.2f} us" for seconds, each in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", help="where to work (default: a temporary directory)")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench_scale_", dir=args.directory))
    try:
        many_tensors(directory / "warm-up", 1_000)
        memory = [mesh_memory(count) for count in RANKS]  # first: what others have freed would be used again
        table("tensors", TENSORS, many_tensors, directory)
        table("ranks, CPU", RANKS, many_ranks, directory)
        table("mesh ranks, CPU", RANKS, mesh_ranks, directory)
        print(f"{'memory':>16}" + "".join(f"{nbytes / 2**20:>9.1f} MiB{'':>9}" for nbytes in memory))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
