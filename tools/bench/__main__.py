"""The command: ``python -m tools.bench --help``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.bench import launch
from tools.bench.picture import svg
from tools.bench.report import sections
from tools.bench.results import EVERYONE, NOT_INSTALLED, Results, Row, from_json
from tools.bench.scenarios import QUICK_ROUNDS, QUICK_SCALE, ROUNDS, SCALE, SCENARIOS, Scenario
from tools.bench.targets import TARGETS, judge

PACKAGES = ("torch", "torch_xla", "safetensors", "ai2-olmo-core", "isal", "numpy")


def chosen(args: argparse.Namespace) -> list[Scenario]:
    """The scenarios to run, with rounds as asked for."""
    if args.only:
        found = [each for each in SCENARIOS if any(word in each.name for word in args.only)]
    else:
        found = [each for each in SCENARIOS if each.quick or not args.quick]
    if not args.full:
        most = QUICK_ROUNDS if args.quick else ROUNDS
        found = [replace(each, rounds=min(each.rounds, most)) for each in found]
    if args.rounds is not None:
        found = [replace(each, rounds=args.rounds) for each in found]
    return found


def about(args: argparse.Namespace, scale: float) -> dict[str, Any]:
    """What the numbers depend on, besides the code."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "Linux": platform.release()}
    return {**machine, "Python": platform.python_version(), "versions": versions, "scale": scale}


def run(scenarios: list[Scenario], directory: Path, scale: float) -> Results:
    """All of them, one after the other; one that fails is a row that says so."""
    results = Results()
    for scenario in scenarios:
        started = time.monotonic()
        try:
            rows, size = launch.run(scenario, directory, scale)
        except launch.ScenarioFailed as error:
            rows, size = [Row(scenario.name, "", EVERYONE, missing=str(error))], (0, 0)
        results.rows += rows
        results.sizes[scenario.name] = size
        print(f"{scenario.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return results


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    size = made.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="ratios of some scenarios, a sixteenth of the bytes")
    size.add_argument("--full", action="store_true", help="all of the bytes, 7 rounds, as targets ask for")
    made.add_argument("--only", action="append", metavar="WORD", help="scenarios whose name has it; may be repeated")
    made.add_argument("--scale", type=float, help="bytes of the workloads, in multiples of the full ones")
    made.add_argument("--rounds", type=int, help="that count, for what a target is about")
    made.add_argument("--directory", help="where to write, on the disk to be measured (default: a temporary one)")
    made.add_argument("--json", metavar="FILE", help="every round of everything")
    made.add_argument("--markdown", metavar="FILE", help="the tables, for docs/performance.md")
    made.add_argument("--picture", metavar="FILE", help="bars, as an SVG")
    made.add_argument(
        "--from-json", action="append", metavar="FILE", help="run nothing: report what earlier runs left there"
    )
    made.add_argument("--list", action="store_true", help="only name the scenarios")
    return made


def report(results: Results, args: argparse.Namespace) -> None:
    """Print what was measured, and write the files that were asked for."""
    judged = [judge(target, results) for target in TARGETS if target.scenario in results.sizes]
    print("\n".join(sections(results, judged, ratios_only=args.quick)))
    if args.json:
        Path(args.json).write_text(json.dumps(results.as_json(), indent=1) + "\n")
    if args.markdown:
        Path(args.markdown).write_text("\n".join(sections(results, judged, markdown=True)))
    if args.picture:
        Path(args.picture).write_text(svg(results))


def measure(args: argparse.Namespace) -> Results:
    """Run what was asked for, in a directory that is removed however this ends.

    Raises:
        NoRoom, NotADirectoryError, FileNotFoundError: it cannot be run here.
    """
    scale = args.scale
    if scale is None:
        scale = 1.0 if args.full else QUICK_SCALE if args.quick else SCALE
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that files are removed
    with tempfile.TemporaryDirectory(prefix="nxd_ckpt_bench_", dir=args.directory) as name:
        launch.check_room(chosen(args), Path(name), scale)
        results = run(chosen(args), Path(name), scale)
    results.about = about(args, scale)
    return results


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if args.list or not chosen(args):
        print("\n".join(each.name for each in (chosen(args) or SCENARIOS)))
        return 0 if args.list else 2
    try:
        results = from_json([json.loads(Path(file).read_text()) for file in args.from_json or ()])
        if not args.from_json:
            results = measure(args)
    except KeyboardInterrupt:
        return 130
    except (launch.NoRoom, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(results, args)
    return int(any(row.missing and not row.missing.startswith(NOT_INSTALLED) for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
