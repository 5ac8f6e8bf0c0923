"""``python -m nxd_ckpt.run (SCRIPT | -m MODULE) ARGS``: a program written for neuronx-distributed, saved by nxd_ckpt.

It calls `nxd_ckpt.install` and then runs the program, unchanged. Also under torchrun: ``torchrun --nproc-per-node 32 -m
nxd_ckpt.run SCRIPT ARGS``.
"""

from __future__ import annotations

import sys

from nxd_ckpt.drop_in.install import install
from nxd_ckpt.drop_in.script import run

_USAGE = "usage: python -m nxd_ckpt.run (SCRIPT | -m MODULE) ARGS"


def main(command: list[str]) -> None:
    """Run the program that the command line names."""
    if not command or command[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if command else 2)
    if command[0].startswith("-") and (command[0] != "-m" or len(command) < 2):
        sys.exit(f"{_USAGE}; found {command[0]}")
    install()
    run(command)


if __name__ == "__main__":
    main(sys.argv[1:])
