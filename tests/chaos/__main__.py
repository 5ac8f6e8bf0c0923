"""``python -m tests.chaos``: let others judge our plug-ins, and what they take the place of; count, also into
tests/counts.md."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.chaos.chaos import PLUG_INS, VERDICTS, judged
from tests.support.reliability import commit, put, rows_of, table

_HEADER = ["framework", "saved by", "commit", "runs", *VERDICTS]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=f"some of {', '.join(PLUG_INS)}; else all")
    parser.add_argument("--write", action="store_true", help="write the counts into tests/counts.md")
    given = parser.parse_args()
    rows = {(row[0], row[1]): row for row in rows_of("ckpt-chaos")} if given.write else {}
    for target in given.frameworks or PLUG_INS:
        for ours in (False, True):
            with tempfile.TemporaryDirectory() as scratch:
                counts = judged(target, Path(scratch, "runs"), ours=ours)
            key = PLUG_INS[target][0], "our plug-in" if ours else "itself"
            rows[key] = [*key, commit(), str(counts.total()), *(str(counts[verdict]) for verdict in VERDICTS)]
            if given.write:  # so far, and beside others
                put("ckpt-chaos", table(rows.values(), _HEADER))
    print(table(rows.values(), _HEADER))


if __name__ == "__main__":
    main()
