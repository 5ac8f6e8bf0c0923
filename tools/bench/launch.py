"""Scenarios run in processes of their own, which end with this one, and leave no file behind."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.host import available_memory, free_space
from tools.bench.results import EVERYONE, NOT_INSTALLED, Row
from tools.bench.scenarios import Scenario
from tools.bench.spec import Spec

ROOT = Path(__file__).resolve().parents[2]

NBYTES = {"W1": 2**30, "W2": 2000 * 2**19, "W3": 12 * 170_300_000}
"""Bytes of a workload at scale 1; of one that is not here next to nothing."""

MEMORY = 7
"""Of each process, in multiples of its state: state, ballast, a floor's image, staging of ours and of a peer's."""

DISK = 1.2
"""Of each contestant, in multiples of the state: its latest save."""


class ScenarioFailed(Exception):
    """A process of a scenario ended with an error, which it has printed."""


class NoRoom(Exception):
    """Memory or disk space would not do."""


def check_room(scenarios: list[Scenario], directory: Path, scale: float) -> None:
    """Raises NoRoom if the largest scenario would not fit."""
    for scenario in scenarios:
        nbytes = NBYTES.get(scenario.workload, 2**24) * scenario.scale * scale
        memory = int(MEMORY * scenario.processes * nbytes)
        disk = int(DISK * (2 * len(scenario.contestants) + 1) * nbytes)
        for what, needed, found in (
            ("memory", memory, available_memory()),
            (f"space in {directory}", disk, free_space(directory)),
        ):
            if needed > found:
                raise NoRoom(
                    f"{scenario.name} needs {needed / 2**30:.1f} GiB of {what}, and {found / 2**30:.1f} GiB are free: "
                    "use --scale, --only, --quick or another --directory"
                )


def run(scenario: Scenario, directory: Path, scale: float) -> tuple[list[Row], tuple[int, int]]:
    """The rows of ``scenario``, and its state's bytes and tensors.

    Raises:
        ScenarioFailed: see there.
    """
    if scenario.device == "xla" and importlib.util.find_spec("torch_xla") is None:
        return [Row(scenario.name, "", EVERYONE, missing=f"{NOT_INSTALLED}: torch_xla")], (0, 0)
    place = Path(tempfile.mkdtemp(prefix="scenario_", dir=directory))
    try:
        _run_ranks(scenario, place, scale)
        data = json.loads((place / "rows.json").read_text())
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return [Row.from_json(row) for row in data["rows"]], tuple(data["size"])


def _run_ranks(scenario: Scenario, place: Path, scale: float) -> None:
    ranks = [_start(scenario, rank, place, scale) for rank in range(scenario.processes)]
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.05)
        if any(codes):
            raise ScenarioFailed(f"{scenario.name}: exit codes of its ranks: {codes}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _start(scenario: Scenario, rank: int, place: Path, scale: float) -> subprocess.Popen[bytes]:
    spec = Spec(scenario, rank, str(place), scale)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PJRT_DEVICE": "CPU",
        "LOCAL_WORLD_SIZE": str(scenario.processes),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "tools.bench.worker", spec.dump()]
    # A session of its own: an interrupt is for this process alone, which then ends its ranks and removes their files.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment, cwd=ROOT, start_new_session=True
    )
