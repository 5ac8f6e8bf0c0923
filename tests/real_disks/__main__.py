"""``python -m tests.real_disks``: the power of a mounted disk fails, or its system calls do, while jobs save to it."""

import argparse
import logging
import tempfile
import time
from pathlib import Path

from tests.real_disks.campaign import CUT, ERRORS, campaign
from tests.support.reliability import date_and_commit, put, table

KINDS = {True: "exchanges names, has links", False: "neither"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.real_disks", description=__doc__)
    parser.add_argument("--cuts", type=int, default=100, help="of the power, on each kind of file system")
    parser.add_argument("--errors", type=int, default=20, help="of each kind, as many")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="what decides when, but for threads")
    parser.add_argument("--write", action="store_true", help="write the counts into tests/counts.md")
    given = parser.parse_args()
    logging.disable()
    origin, rows = date_and_commit(), []
    for swaps, kind in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            counts = campaign(Path(folder), given.seed, swaps=swaps, cuts=given.cuts, errors=given.errors)
        rows.append([kind, *(counts[what] for what in (CUT, *ERRORS)), counts["missed"]])
        print(*rows[-1], sep=", ", flush=True)
    if given.write:
        header = ["file system", "power cut", *(f"`{what}`" for what in ERRORS), "came too late"]
        put("mounted", f"On {origin[0][1]}, commit {origin[1][1]}:\n\n{table(rows, header)}")


if __name__ == "__main__":
    main()
