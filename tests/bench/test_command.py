"""``python -m tools.bench`` from end to end, on states of a few MiB."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import heed_ctrl_c, run_program
from tools.bench.contestants.contract import Contestant
from tools.bench.results import ASYNC, COLD, RETURNED, SAVE, SLOWDOWN, STALL, WARM
from tools.bench.rounds import Rounds
from tools.bench.scenarios import SCENARIOS, Scenario
from tools.bench.spec import Spec
from tools.bench.worker import run
from tools.bench.workloads import build
from tools.bench.world import World

ROOT = Path(__file__).parents[2]
TINY = ("--scale", "0.002", "--rounds", "1")


BENCH = f"""
import os, runpy

os.chdir({str(ROOT)!r})
os.environ["PYTHONPATH"] = {str(ROOT)!r}
runpy.run_module("tools.bench", run_name="__main__")
"""


def bench(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(BENCH, "--directory", directory, *arguments)


def rows(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["measure"], row["contestant"]): row for row in json.loads(file.read_text())["rows"]}


@pytest.mark.soak
def test_what_plugins_cost_is_measured(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tools.bench.plugins", "--mib", "16", "--rounds", "1", "--directory", tmp_path)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (0, 4) == (done.returncode, done.stdout.count(" x direct;")), done.stderr


def test_every_measure_of_a_scenario_has_a_round(tmp_path: Path) -> None:
    """Every measure of nxd_ckpt has one round, the files are written, and nothing is left in the directory."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    files = [f"--json={out / 'a.json'}", f"--markdown={out / 'a.md'}", f"--picture={out / 'a.svg'}"]
    done = bench(work, *TINY, "--only", "W1 cpu 1p", *files)
    assert (0, []) == (done.returncode, list(work.iterdir())), done.stderr
    found = rows(out / "a.json")
    ours = [(measure, "nxd_ckpt") for measure in (SAVE, ASYNC, STALL, SLOWDOWN)]
    ours += [(measure, f"nxd_ckpt, verify={how}") for measure in (WARM, COLD) for how in ("True", '"reading"', "False")]
    ours += [(RETURNED, "nxd_ckpt, durable=False")]
    assert dict.fromkeys(ours, 1) == {key: len(found[key]["values"]) for key in ours}
    assert "nxd_ckpt" in (out / "a.md").read_text()
    assert (out / "a.svg").read_text().startswith("<svg")
    assert "== W1 cpu 1p" in done.stdout


def test_a_peer_that_is_not_installed_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured all the same, whichever peers this environment has."""
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.delitem(sys.modules, "tools.bench.contestants.safetensors_file", raising=False)
    scenario = Scenario("W2", "cpu", 1, ("safetensors", "torch.save"), (SAVE,), rounds=1, other_rounds=1)
    measured, _ = run(Spec(scenario, 0, str(tmp_path), 0.002))
    found = {row.contestant: (len(row.values), row.missing.partition(":")[0]) for row in measured}
    assert {"safetensors": (0, "not installed"), "torch.save": (1, "")} == found


def test_a_contestant_that_fails_is_a_row_and_a_failure(tmp_path: Path) -> None:
    """What it raised is in the table of a later report too, whose exit code tells that something was wrong."""
    about = {"scenario": "W1 cpu 1p", "measure": SAVE}
    failed = {**about, "contestant": "torch.save", "missing": "OSError: disk on fire"}
    rows = [failed, {**about, "contestant": "nxd_ckpt", "values": [0.5]}]
    (tmp_path / "a.json").write_text(json.dumps({"about": {}, "sizes": {"W1 cpu 1p": [1024, 2]}, "rows": rows}))
    done = bench(tmp_path, f"--from-json={tmp_path / 'a.json'}")
    assert 1 == done.returncode
    assert "OSError: disk on fire" in done.stdout
    assert "0.500 s" in done.stdout


def test_a_quick_run_reports_ratios_only(tmp_path: Path) -> None:
    """Seconds of so few bytes mislead; what failed is named all the same."""
    about = {"scenario": "W1 cpu 1p", "measure": SAVE}
    rows = [about | {"contestant": "nxd_ckpt", "values": [1.5]}, about | {"contestant": "x", "missing": "OSError: no"}]
    (tmp_path / "a.json").write_text(json.dumps({"about": {}, "sizes": {"W1 cpu 1p": [0, 0]}, "rows": rows}))
    done = bench(tmp_path, "--quick", f"--from-json={tmp_path / 'a.json'}")
    assert 1 == done.returncode
    assert "== Targets" in done.stdout
    assert "== W1 cpu 1p" not in done.stdout
    assert "W1 cpu 1p, x: OSError: no" in done.stdout


def test_a_load_of_other_values_does_not_count(tmp_path: Path) -> None:
    """Speed is not measured of a contestant that does not bring back what it saved."""

    class Forgetful(Contestant):
        measures = frozenset({WARM})

        def save(self, durable: bool) -> None:
            self.next_path().write_text("nothing")

        def load(self, how: str) -> None:
            return

    state, world = build("W2", torch.device("cpu"), 0.001), World(0, 1, tmp_path / "meeting")
    scenario = Scenario("W2", "cpu", 1, ("forgetful",), (WARM,), rounds=1, other_rounds=1)
    rounds = Rounds(scenario, [Forgetful("forgetful", state, tmp_path, world)], state, world)
    rounds.warm_up()
    rounds.play(0)
    assert [((), "WrongValues")] == [(row.values, row.missing.partition(":")[0]) for row in rounds.rows()]


@pytest.mark.soak
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """Files are removed and ranks ended, whether the run is interrupted or told to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, "-m", "tools.bench", "--directory", str(tmp_path), *TINY, "--only", "W1 cpu 1p"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=heed_ctrl_c) as running:
            assert running.stderr is not None
            for line in running.stderr:
                if "warming up" in line:
                    break
            running.send_signal(number)
            running.stderr.read()
        assert (128 + number, []) == (running.returncode, list(tmp_path.iterdir()))


def test_too_little_room_is_said_before_anything_runs(tmp_path: Path) -> None:
    """With what is needed, what there is, and what to do."""
    done = bench(tmp_path, "--scale", "100000", "--only", "W2 cpu 1p")
    assert (2, []) == (done.returncode, list(tmp_path.iterdir()))
    assert "W2 cpu 1p needs" in done.stderr
    assert "use --scale" in done.stderr


def test_scenarios_are_found_by_their_names(tmp_path: Path) -> None:
    """`--list` names what would run; a word that no name has is an error that names them all."""
    names = [scenario.name for scenario in SCENARIOS]
    assert len(names) == len(set(names))
    assert [name for name in names if "W2" in name] == bench(tmp_path, "--list", "--only", "W2").stdout.split("\n")[:-1]
    absent = bench(tmp_path, "--only", "W9")
    assert (2, names) == (absent.returncode, absent.stdout.split("\n")[:-1])
