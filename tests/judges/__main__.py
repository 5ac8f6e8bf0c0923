"""``python -m tests.judges``: let others judge our plug-ins, and what they take the place of; count, also into
docs/reliability.md."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.judges.chaos import PLUG_INS, VERDICTS, judged
from tests.reliability import date_and_commit, put, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.judges", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the counts into docs/reliability.md")
    given = parser.parse_args()
    rows = []
    for target, (framework, _) in PLUG_INS.items():
        for ours in (True, False):
            with tempfile.TemporaryDirectory() as scratch:
                counts = judged(target, Path(scratch, "runs"), ours=ours)
            saved_by = "our plug-in" if ours else "itself"
            rows.append([framework, saved_by, counts.total(), *(counts[verdict] for verdict in VERDICTS)])
    text = table(rows, ["framework", "saved by", "runs", *VERDICTS])
    print(text)
    if given.write:
        put("ckpt-chaos", f"{table(date_and_commit())}\n\n{text}")


if __name__ == "__main__":
    main()
