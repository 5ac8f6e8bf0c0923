"""``python -m tests.mutants``: change the modules that keep the promises, one place at a time, and see what notices.

Each module is tried with the tests of :data:`TESTS` only, the fastest that are about it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutants.accepted import ACCEPTED
from tests.support.reliability import REPOSITORY, commit, put, rows_of, table

_COMMIT = [
    f"tests/{name}.py"
    for name in ("commit/test_commit", "commit/test_publication", "protocol/test_retention", "protocol/test_store_tags")
]
_FILTERS = [
    f"tests/filters/{name}.py"
    for name in ("test_ignoring", "test_load", "test_save_ignore_keys", "test_shards", "test_stages")
]
_PICKLES = [
    *("tests/formats/test_unpickle.py", "tests/formats/test_pickle_edges.py"),
    *("tests/hostile/test_small_files.py", "tests/bad_input/test_pickles.py"),
]

TESTS: dict[str, list[str]] = {
    "core/votes": ["tests/core/test_votes.py"],
    "core/retention_rules": ["tests/core/test_retention.py"],
    "core/name_patterns": _FILTERS,
    "formats/machine": _PICKLES,
    "formats/plain_data": _PICKLES,
    "formats/safe_globals": _PICKLES,
    "formats/torch_globals": _PICKLES,
    "formats/inert": _PICKLES,
    "formats/unpickle": _PICKLES,
    "coordination/journal": ["tests/coordination/test_journal.py", "tests/coordination/test_taken_over.py"],
    "coordination/lease": ["tests/coordination/test_lease.py"],
    "live/ignoring": _FILTERS,
    "loading/filters": _FILTERS,
    "commit/commit": _COMMIT,
    "commit/publication": ["tests/commit/test_publication.py", "tests/coordination/test_taken_over.py"],
}


def tried(module: str) -> list[dict[str, Any]]:
    """What became of each mutant of a module: ``name``, ``line``, and ``outcome``: killed, survived or unreached."""
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = Path(scratch, "outcomes.json")
        plugin = ["-p", "tests.mutants.session", "--mutate", f"nxd_ckpt/{module}.py", "--outcomes", str(outcomes)]
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=30", "--basetemp", f"{scratch}/tests"]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, *options, *TESTS[module]]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        found: list[dict[str, Any]] = json.loads(outcomes.read_text())
        return found


def unexplained(module: str, outcomes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mutants that no test noticed, and of which nobody said why."""
    reasons = ACCEPTED.get(module, {})
    return [one for one in outcomes if one["outcome"] != "killed" and one["name"] not in reasons]


def row(module: str, outcomes: Sequence[dict[str, Any]]) -> list[object]:
    """A line of the page."""
    count = Counter(one["outcome"] for one in outcomes)
    left = len(unexplained(module, outcomes))
    explained = len(outcomes) - count["killed"] - left
    rate = f"{100 * (1 - left / len(outcomes)):.1f} %"
    return [f"`{module}`", commit(), len(outcomes), count["killed"], explained, left, rate]


_HEADER = ["module", "commit", "mutants", "killed", "survived, with a reason", "survived", "killed or with a reason"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"some of {', '.join(TESTS)}; by default all")
    parser.add_argument("--write", action="store_true", help="write the counts into tests/counts.md")
    given = parser.parse_args()
    strange = sorted({*given.modules} - TESTS.keys())
    if strange:
        parser.error(f"no such modules: {', '.join(strange)}")
    rows = {}
    for module in given.modules or TESTS:
        outcomes = tried(module)
        for one in unexplained(module, outcomes):
            print(f"{module}.py:{one['line']}: {one['outcome']}: {one['name']}")
        rows[f"`{module}`"] = row(module, outcomes)
        if given.write:  # so far, and beside others: a run of all takes hours on a busy machine
            put("mutants", table(({found[0]: found for found in rows_of("mutants")} | rows).values(), _HEADER))
    print(table(rows.values(), _HEADER))


if __name__ == "__main__":
    main()
