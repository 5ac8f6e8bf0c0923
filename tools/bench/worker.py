"""One rank of one scenario, in a process of its own: ``python -m tools.bench.worker SPEC``."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from tools.bench.contestants import make
from tools.bench.contestants.contract import Contestant
from tools.bench.results import NOT_INSTALLED, Row
from tools.bench.rounds import Rounds
from tools.bench.spec import Spec, parse
from tools.bench.workloads import State, build
from tools.bench.world import World


def run(spec: Spec) -> tuple[list[Row], State]:
    """All rounds of this rank; the rows, and the state that they are about."""
    directory, scenario = Path(spec.directory), spec.scenario
    world = World(spec.rank, scenario.processes, directory / "meeting", shards=scenario.device == "fsdp2")
    mesh = init_device_mesh("cpu", (world.size,)) if world.shards else None
    state = build(scenario.workload, _device(scenario.device), scenario.scale * spec.scale, mesh)
    state.settle()
    contestants, missing = _contestants(spec, state, world)
    rounds = Rounds(scenario, contestants, state, world)
    _say(spec, "warming up")
    rounds.warm_up()
    for number in range(scenario.rounds):
        _say(spec, f"round {number + 1} of {scenario.rounds}")
        rounds.play(number)
    for contestant in contestants:
        contestant.close()
    world.barrier()
    world.close()
    return [*rounds.rows(), *missing], state


def _contestants(spec: Spec, state: State, world: World) -> tuple[list[Contestant], list[Row]]:
    made: list[Contestant] = []
    missing: list[Row] = []
    for name in spec.scenario.contestants:
        try:
            made += make(name, state, Path(spec.directory), world)
        except ImportError as error:
            missing.append(Row(spec.scenario.name, "", name, missing=f"{NOT_INSTALLED}: {error}"))
    return made, missing


def _device(name: str) -> torch.device:
    if name in ("cpu", "fsdp2"):
        return torch.device("cpu")
    import torch_xla

    device: torch.device = torch_xla.device()
    return device


def _say(spec: Spec, words: str) -> None:
    if spec.rank == 0:
        print(f"{spec.scenario.name}: {words}", file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    """The parent holds the other end of standard input: when it is gone, however it ended, so is this process."""
    os.read(0, 1)  # not sys.stdin: its lock would be held at exit
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    spec = parse(sys.argv[1])
    rows, state = run(spec)
    if spec.rank == 0:
        data = {"rows": [asdict(row) for row in rows], "size": (state.nbytes, len(state.tensors))}
        (Path(spec.directory) / "rows.json").write_text(json.dumps(data))
    sys.stderr.flush()
    os._exit(0)  # everything is said: a thread that some peer left behind must not turn an orderly exit into a crash


if __name__ == "__main__":
    main()
