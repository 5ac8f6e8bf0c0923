"""``python -m tests.simulation.broken``: break a promise on purpose, in a copy of the code, and see which schedule
notices."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import NamedTuple

from tests.reliability import REPOSITORY, date_and_commit, put, table
from tests.simulation.__main__ import PLACES
from tests.simulation.schedule import Schedule, run

_COORDINATION, _SAVE = "nxd_ckpt/runtime/coordination", "nxd_ckpt/runtime/save"
_JOURNAL, _LEASE, _REPLACEMENT = (f"{_COORDINATION}/{name}.py" for name in ("journal", "lease", "replacement"))
_COMMIT, _PUBLICATION, _SAVING, _VOTING, _WRITING = (
    f"{_SAVE}/{name}.py" for name in ("commit", "publication", "saving", "voting", "writing")
)
_IDENTITY = "nxd_ckpt/runtime/tag/identity.py"
_DISK, _S3 = "nxd_ckpt/testing/simulation/disk_storage.py", "nxd_ckpt/storage/s3/storage.py"


class Break(NamedTuple):
    """``edits`` of files: what is there once, and what is put in its place. Only schedules that ``may_show`` it are
    run."""

    what: str
    place: str
    edits: Mapping[str, tuple[str, str]]
    may_show: Callable[[Schedule], bool] = lambda schedule: True


class Found(NamedTuple):
    """The ``seed`` of the schedule that failed, if one did, after so many ``schedules``."""

    seed: int | None
    schedules: int


def _replaces(schedule: Schedule) -> bool:
    """Whether it saves a tag twice."""
    return len({save.tag for save in schedule.saves}) < len(schedule.saves)


def _renames_twice(schedule: Schedule) -> bool:
    """Whether it replaces a tag where names cannot be exchanged."""
    return _replaces(schedule) and not getattr(schedule, "swaps", True)


def _ends(schedule: Schedule) -> bool:
    """Whether what rank 0 does is interrupted."""
    return schedule.rank == 0 and schedule.fault in ("kill", "power", "error", "stall")


def _stands_still(schedule: Schedule) -> bool:
    return schedule.fault == "stall" or bool(schedule.rival)


def _is_taken_over(schedule: Schedule) -> bool:
    """Whether another job comes while rank 0 stands still."""
    return schedule.late is None


_BEATS_OVER = {
    _LEASE: (
        "                    _beat(self._storage, self._lease, beat)",
        "                    self._storage.write(LEASE, _encode(self._lease))\n"
        "                    _beat(self._storage, self._lease, beat)",
    )
}
_VOTES = {_VOTING: ("        if not missing:\n", "        if found:\n")}
_LEASE_IS_FREE = ("    if runs is not None:\n        return runs\n", "    return False\n")
_LEASE_IS_HELD = (_LEASE_IS_FREE[0], "    return True\n")
_IS_NOT_ASKED_AGAIN = {
    _IDENTITY: ("        if word is None or word != self.word:\n", "        if word is None:\n"),
}
_MISMATCH = """    if found != expected.crc32:
        raise DigestMismatch(f"{where}: expected CRC-32 {expected.crc32:08x}, found {found:08x}: its bytes changed")
"""

BREAKS = [
    Break(
        "The directory is not synced after the rename that publishes a tag.", "disk",
        {_JOURNAL: ("restore = replacement.undo\n        _sync(storage)\n", "restore = replacement.undo\n")},
    ),
    Break(
        "The directory of the indexes is not synced.", "disk",
        {_WRITING: ('        storage.sync_dir(os.path.dirname(f"{publication.folder}/{key}"))\n', "")},
    ),
    Break(
        "The directories of the data are not synced.", "disk",
        {_WRITING: ("        for folder in sorted(folders, reverse=True):", "        for folder in ():")},
    ),
    Break(
        "The files of the data are not synced.", "disk",
        {
            _DISK: (
                'self._storage._call("fsync", self._key, self._file.sync)',
                'self._storage._call("fsync", self._key, self._file.sync if ".json" in self._key else lambda: None)',
            )
        },
    ),
    Break(
        "The attempt's own directory is not synced before it is renamed.", "disk",
        {_PUBLICATION: ("        storage.sync_dir(self.folder)\n        self.must", "        self.must")},
    ),
    Break(
        "A tag is published without a look whether all ranks' files are still there.", "disk",
        {_PUBLICATION: ("        self.must_hold(storage, self._not_listed(storage, files))\n", "")},
        _is_taken_over,
    ),
    Break(
        "A heartbeat writes the lease, too.", "disk", _BEATS_OVER, _is_taken_over,
    ),
    Break(
        "An old tag is removed before its successor is there.", "disk",
        {_JOURNAL: ("        replacement.make()\n", "        storage.remove(tag)\n        replacement.make()\n")},
        lambda schedule: _replaces(schedule) and schedule.fault in ("kill", "power", "error", "stall"),
    ),
    Break(
        "An old tag is removed, not set aside, where names cannot be exchanged.", "disk",
        {
            _REPLACEMENT: (
                "            storage.rename(self.target, self.aside)\n            storage.rename(self.finished",
                "            storage.remove(self.target)\n            storage.rename(self.finished",
            )
        },
        _renames_twice,
    ),
    Break(
        "A replacement has no journal.", "disk",
        {_JOURNAL: ('            storage.write(JOURNAL, json.dumps({"attempt": attempt, "tag": tag}).encode())\n', "")},
        lambda schedule: _renames_twice(schedule) and schedule.rank == 0,
    ),
    Break(
        "An interrupted replacement is not finished.", "disk",
        {_JOURNAL: ("        _replacement(storage, *announced).settle()\n", "        pass\n")},
        lambda schedule: _renames_twice(schedule) and _ends(schedule),
    ),
    Break(
        "A save whose sync failed is not undone.", "disk",
        {_JOURNAL: ("        _restore(replacement, restore)\n        raise\n", "        raise\n")},
        lambda schedule: schedule.rank == 0 and schedule.fault in ("error", "sync"),
    ),
    Break("Rank 0 does not wait for the votes of the others.", "disk", _VOTES),
    Break(
        "The verdict comes before the commit.", "disk",
        {
            _SAVING: (
                "            commit(session, session.topology, votes, request)\n",
                "            voting.announce(session.storage, self.attempt, replace(Verdict(), tag=self.tag))\n"
                "            commit(session, session.topology, votes, request)\n",
            )
        },
    ),
    Break(
        "A rank does not wait for the verdict.", "disk",
        {
            _SAVING: (
                "            return voting.await_verdict("
                "session.storage, self.attempt, self.tag, self._patience, gone)\n",
                "            return Verdict()\n",
            )
        },
    ),
    Break(
        "A rank does not give up on rank 0.", "disk",
        {
            _VOTING: (
                "if leaving() or last_words.are_over([0] if gone() else []) or patience.is_over(len(listed), signs):",
                "if leaving():",
            )
        },
    ),
    Break(
        "Rank 0 does not give up on a rank.", "disk",
        {_VOTING: ("patience.is_over(len(found), partial(_progress, storage, attempt, names, ranks))", "False")},
    ),
    Break(
        "The manifest is not written.", "disk",
        {_COMMIT: ("    publication.put(storage, names.MANIFEST, dump_manifest(manifest))\n", "")},
    ),
    Break(
        "Retention removes one tag more.", "disk",
        {
            _COMMIT: (
                "        for tag in judgement.retention.surplus:",
                "        for tag in tags:",
            )
        },
    ),
    Break("The lease of a live job is taken.", "disk", {_LEASE: _LEASE_IS_FREE}),
    Break("The lease of a dead job is never taken.", "disk", {_LEASE: _LEASE_IS_HELD}),
    Break(
        "Neither tensors nor files are compared with their digests when they are loaded.", "disk",
        {
            "nxd_ckpt/runtime/tag/range_reader.py": (
                "                raise mismatch(where", "                mismatch(where"
            ),
            "nxd_ckpt/runtime/tag/verification.py": (_MISMATCH, ""),
        },
        lambda schedule: getattr(schedule, "rots", False),
    ),
    Break(
        "A reader does not look again whether the tag is the one that it opened.", "disk", _IS_NOT_ASKED_AGAIN,
        lambda schedule: schedule.reads and _replaces(schedule),
    ),
    Break("Rank 0 does not wait for the votes of the others.", "store", _VOTES),
    Break(
        "Ranks write before rank 0 has made room.", "store",
        {_SAVING: ("                self._await_opening()\n", "                pass\n")},
    ),
    Break(
        "A tag is not emptied before it is saved anew.", "store",
        {_PUBLICATION: ("            self._empty(session)\n        for", "            pass\n        for")},
    ),
    Break(
        "A tag is made visible before its manifest is written.", "store",
        {
            _COMMIT: (
                "    publication.put(storage, names.MANIFEST, dump_manifest(manifest))\n"
                "    publication.publish(session, order_time, indexes)\n",
                "    publication.publish(session, order_time, indexes)\n"
                "    publication.put(storage, names.MANIFEST, dump_manifest(manifest))\n",
            )
        },
    ),
    Break(
        "A save in place declares no intent.", "store",
        {_PUBLICATION: ("        intents.declare(storage, staging_dir(self.attempt), self.tag)\n", "")},
    ),
    Break(
        "What a dead job's uploads left is not removed.", "store",
        {
            _S3: (
                "        for name, upload_id in self._bucket.uploads(key, self._bucket.below(key)):",
                "        for name, upload_id in ():",
            )
        },
        lambda schedule: getattr(schedule, "part", None) == 400,
    ),
    Break(
        "A key is taken without the condition that it is free.", "store",
        {_S3: ('uuid.uuid4().hex, IfNoneMatch="*")', "uuid.uuid4().hex)")},
    ),
    Break("The lease of a live job is taken.", "store", {_LEASE: _LEASE_IS_FREE}),
    Break(
        "`done` is not removed first.", "store",
        {
            _PUBLICATION: (
                '        remove_if(storage, f"{self.tag}/{DONE}", session.confirm)\n        remove_if',
                "        remove_if",
            )
        },
        _replaces,
    ),
    Break(
        "The lease is not looked at again before `done` is written.", "store",
        {
            _PUBLICATION: (
                "        session.require()\n        try:\n            created", "        try:\n            created"
            )
        },
        _stands_still,
    ),
    Break(
        "A heartbeat writes the lease, too.", "store", _BEATS_OVER, _is_taken_over,
    ),
    Break(
        "What a tag consists of is removed whoever holds the lease by then.", "store",
        {_S3: ("            if not confirm():\n                return False\n", "")},
        _is_taken_over,
    ),
    Break(
        "A reader does not look again whether the tag is the one that it opened.", "store", _IS_NOT_ASKED_AGAIN,
        lambda schedule: schedule.reads,
    ),
]


def schedules_until_noticed(number: int, limit: int) -> Found:
    """Run the schedules that may show it, from seed 0 on, until one fails, in this process and with its code."""
    gc.disable()
    logging.disable(logging.CRITICAL)
    one = BREAKS[number]
    runs = 0
    for seed in range(limit):
        schedule = PLACES[one.place](seed)
        if not one.may_show(schedule):
            continue
        runs += 1
        try:
            run(schedule)
        except AssertionError:
            return Found(seed, runs)
    return Found(None, runs)


def broken(number: int, limit: int) -> Found:
    """The same in another process, with a copy of the code that is broken."""
    with tempfile.TemporaryDirectory() as copy:
        for part in ("nxd_ckpt", "tests/simulation"):
            copytree(REPOSITORY / part, Path(copy, part), ignore=ignore_patterns("__pycache__"))
        for part in ("tests/__init__.py", "tests/reliability.py"):
            Path(copy, part).write_bytes((REPOSITORY / part).read_bytes())
        for name, (old, new) in BREAKS[number].edits.items():
            path = Path(copy, name)
            path.write_text(path.read_text().replace(old, new))
        code = f"from tests.simulation.broken import *; print(*schedules_until_noticed({number}, {limit}))"
        environment = {**os.environ, "PYTHONPATH": copy, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        seed, runs = done.stdout.split()
    found = Found(None if seed == "None" else int(seed), int(runs))
    print(f"{BREAKS[number].place}: {BREAKS[number].what} {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.broken", description=__doc__)
    parser.add_argument("--limit", type=int, default=20_000, help="the seeds to try (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="how many at once (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write what was found into docs/reliability.md")
    given = parser.parse_args()
    origin = date_and_commit()  # the checkout may move on while it runs
    with ThreadPoolExecutor(given.processes) as threads:
        found = list(threads.map(partial(broken, limit=given.limit), range(len(BREAKS))))
    rows = [
        [one.what, one.place, "none" if seed is None else f"{seed:,}", f"{runs:,}"]
        for one, (seed, runs) in zip(BREAKS, found, strict=True)
    ]
    text = table(rows, ["what was broken", "place", "failed at schedule", "after schedules"])
    if given.write:
        put("broken on purpose", f"On {origin[0][1]}, at commit {origin[1][1]}:\n\n{text}")
    raise SystemExit(1 if any(seed is None for seed, _ in found) else 0)


if __name__ == "__main__":
    main()
