"""``python -m nxd_ckpt.emulation --nproc N (SCRIPT | -m MODULE) ARGS``."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from nxd_ckpt.emulation.launcher import launch


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the ranks, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nxd_ckpt.emulation",
        description="Run a torch-xla training script in several processes on a machine without accelerators.",
        epilog="NXD_CKPT_EMULATION_TIMEOUT: seconds that a collective waits for the other ranks (600).",
    )
    parser.add_argument("--nproc", type=_count, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--grace", type=float, default=5.0, metavar="SECONDS", help="time to end when another rank fails (5)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", help="training script, run unchanged on every rank")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if find_spec("torch_xla") is None:
        parser.error("torch-xla is not installed: pip install 'torch==2.9.*' 'torch-xla==2.9.*'")
    command = [*(["-m"] if options.module else []), options.script, *options.arguments]
    return launch(options.nproc, command, grace=options.grace)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
