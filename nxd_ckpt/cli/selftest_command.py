"""``nxd-ckpt selftest``: see within minutes that nxd_ckpt works on this hardware and this storage."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command

_REPORT = "nxd-ckpt-selftest.json"


def _run(args: argparse.Namespace) -> int:
    from nxd_ckpt.examine.selftest_ranks import run_selftest

    if not 0 < args.size <= 2**40:
        raise argparse.ArgumentTypeError(f"--size must be more than 0 (MiB), found {args.size:g}")
    test = run_selftest(
        args.dir or ".",
        device=args.device,
        ranks=args.ranks,
        nbytes=int(args.size * 2**20),
        storage_options=args.storage_options,
        timeout=args.timeout,
    )
    if test is None:  # one rank of a torchrun: rank 0 shows the page
        return 0
    document = test.document()
    text.show(document, _lines(document, _written(args.report, document)), as_json=args.json, wide=True)
    return 0 if test else 1


def _written(path: str, document: dict[str, Any]) -> str:
    """Write the report and return what the page says of it."""
    try:
        Path(path).write_text(json.dumps(document, indent=2))
    except OSError as error:
        print(f"nxd-ckpt: warning: {path}: no report was written: {error.strerror}", file=sys.stderr)
        return ""
    return f"report, to attach to an issue: {path}"


def _lines(document: dict[str, Any], report: str) -> Iterator[str]:
    from nxd_ckpt.examine.selftest import page_lines

    yield from page_lines(document)
    if report:
        yield report


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="neuron, xla, cuda, cpu or another that torch knows (default: what is found)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks to start, 2 or more (default: 2)")
    parser.add_argument(
        "--size",
        type=float,
        default=256.0,
        metavar="MIB",
        help="MiB that each rank saves to measure speed; with few the speeds say little (default: 256)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time after which what has not finished has failed (default: 300)",
    )
    parser.add_argument("--report", default=_REPORT, metavar="FILE", help=f"the report (default: {_REPORT})")


SELFTEST = Command(
    "selftest",
    example="nxd-ckpt selftest --device neuron /fsx/run1",
    summary="check that nxd_ckpt works on this hardware and storage",
    description=(
        "Train a small model on the device, on two ranks or more; save, kill, resume, load on the CPU, and compare; "
        "ask the storage for what it must promise; measure stall and speed beside a plain copy and plain files. It "
        "starts its ranks itself, or is started by torchrun (torchrun ... -m nxd_ckpt.cli selftest). All files are in "
        "a folder of DIR that is removed at the end. The report has versions, settings of Neuron and XLA, times and "
        "tracebacks, and no credentials. Exit code 0 if all is well, 1 if a check failed, 2 if nothing can be tested."
    ),
    operands=(
        ("DIR?", "the directory or URL to be tested, where checkpoints will be (default: the current directory)"),
    ),
    add_flags=_add_flags,
    run=_run,
    code_of_error=2,
)
