"""``python -m tests.simulation.broken``: break a promise on purpose, in a copy of the code, and see which schedule
notices."""

import argparse
import gc
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree, ignore_patterns
from threading import Lock
from typing import Any, NamedTuple

from tests.simulation.__main__ import PLACES
from tests.simulation.crashes import enumerated
from tests.simulation.disk_schedule import DiskSchedule
from tests.simulation.lease_schedule import LeaseSchedule
from tests.simulation.saves import SAVES
from tests.simulation.schedule import Schedule, run
from tests.simulation.store_schedule import StoreSchedule
from tests.support.reliability import REPOSITORY, date_and_commit, put, rows_of, table

_JOURNAL, _LEASE, _GUESTS = (f"nxd_ckpt/coordination/{name}.py" for name in ("journal", "lease", "guests"))
_MANIFEST, _JUDGED = (f"nxd_ckpt/core/{name}.py" for name in ("manifest", "votes"))
_COMMIT, _PUBLICATION, _VOTING = (f"nxd_ckpt/commit/{name}.py" for name in ("commit", "publication", "voting"))
_BEGINNING, _BALLOT, _SAVED_FILES = (f"nxd_ckpt/saving/{name}.py" for name in ("save_attempt", "ballot", "writing"))
_IDENTITY = "nxd_ckpt/tag/identity.py"
_CHOOSING = "nxd_ckpt/tag/choosing.py"
_DISK, _S3 = "tests/simulation/world/disk_storage.py", "nxd_ckpt/storage/s3/s3_storage.py"
_LOCAL, _FILES, _SYSTEM = (f"nxd_ckpt/storage/{name}.py" for name in ("local", "local_files", "system"))
_HOSTS, _OWN = (f"nxd_ckpt/storage/hosts/{name}.py" for name in ("hosts_storage", "directory"))
_SESSION, _NEWS = "nxd_ckpt/commit/session.py", "nxd_ckpt/coordination/peers.py"

_EVERY_STATE = "every state"
"""The place where states are looked at that a loss of power may leave, see ``crashes``."""

_STATES = 1000
"""At most so many at each moment: where a sync is missing there may be more than fit into memory."""

SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    **PLACES,
    "a lost reply": DiskSchedule.with_a_lost_reply,
    "two faults": DiskSchedule.with_two_faults,
    "an undone save": DiskSchedule.with_power_lost_after_an_undone_save,
    "power after a takeover": DiskSchedule.with_power_lost_after_a_takeover,
    "power after a kill": DiskSchedule.with_power_lost_after_a_kill,
    "a launch after a swap": DiskSchedule.with_a_launch_after_a_swap,
    "a reader at a swap": DiskSchedule.with_reader_at_a_swap,
    "an undoing that fails": DiskSchedule.with_an_undoing_that_fails,
    "a takeover at a removal": DiskSchedule.with_a_takeover_at_a_removal,
    "ranks differ": DiskSchedule.with_ranks_that_differ,
    "lost replies": StoreSchedule.with_lost_replies,
    "store, taken over": StoreSchedule.with_a_takeover,
    "store, ranks differ": StoreSchedule.with_ranks_that_differ,
    "lease": LeaseSchedule.of,
    "lease, local": LeaseSchedule.of_system_calls,
}


class Break(NamedTuple):
    """In ``file`` is ``old``, once, in whose place ``new`` is put; and so on with ``also``. Only schedules that
    ``may_show`` it are run."""

    what: str
    place: str
    file: str
    old: str
    new: str = ""
    may_show: Callable[[Any], bool] = lambda schedule: True
    also: tuple[tuple[str, str, str], ...] = ()

    @property
    def edits(self) -> Sequence[tuple[str, str, str]]:
        return [(self.file, self.old, self.new), *self.also]


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


def _retains(schedule: Schedule) -> bool:
    return any(save.num_kept for save in schedule.saves)


def _must_not_replace(schedule: Schedule) -> bool:
    return any(save.overwrite is False for save in schedule.saves)


def _has_guests(work: Any) -> bool:
    """Whether files of others are in the tag."""
    return work.guest is not None


_BEAT = "                    _beat(self._storage, self._lease, beat)"
_BEATS_OVER = _LEASE, _BEAT, f"                    self._storage.write(LEASE, _encode(self._lease))\n{_BEAT}"
_RETURN = "                return ["
_VOTES = _VOTING, f"            if not missing:\n{_RETURN}", f"            if True:\n{_RETURN}"
_RUNS = "    if runs is not None:\n        return runs\n"
_IS_NOT_ASKED_AGAIN = _IDENTITY, " is None or fingerprint != self.fingerprint:\n", " is None:\n"

_SHARES_NONE = ((_GUESTS, "if storage.share(", "if False and storage.share("),)
_NAMES_SYNCED = "for folder in folders)"
_PUBLISHES = "    publication.publish(session, order_time, indexes, {names.MANIFEST: dump_manifest(manifest)})\n"

BREAKS = [
    Break(
        "Directory not synced after a tag's rename", "disk", _JOURNAL,
        "attempt, tag)\n        _sync(storage)\n", "attempt, tag)\n",
    ),
    Break(
        "Directory of the indexes not synced", "disk", _PUBLICATION,
        _NAMES_SYNCED, "for folder in folders if not folder.endswith('/index'))",
    ),
    Break(
        "Directories of the data not synced", "disk", _SAVED_FILES,
        "(partial(self._sync, folder) for folder in folders)", "()",
    ),
    Break(
        "Files of the data not synced", "disk", _DISK,
        'self._storage._call("fsync", self._key, self._file.sync)',
        'self._storage._call("fsync", self._key, self._file.sync if ".json" in self._key else lambda: None)',
    ),
    Break(
        "Attempt's directory not synced before its rename", "disk", _PUBLICATION,
        _NAMES_SYNCED, "for folder in folders if folder != self.folder)",
    ),
    Break(
        "Published without a look at all ranks' files", "disk", _PUBLICATION,
        "        self.must_hold(storage, self._not_listed(storage, files))\n", may_show=_is_taken_over,
    ),
    Break("Heartbeat writes the lease", "disk", *_BEATS_OVER, _is_taken_over),
    Break(
        "Old tag removed before its successor is there", "disk", _JOURNAL,
        "        _make(replacement, attempt, tag)\n",
        "        storage.remove(tag)\n        _make(replacement, attempt, tag)\n",
        lambda schedule: _replaces(schedule) and schedule.fault in ("kill", "power", "error", "stall"),
    ),
    Break(
        "Old tag removed, not set aside, where nothing exchanges names", "disk", _JOURNAL,
        "            storage.rename(self.target, self.aside)\n            storage.rename(self.finished",
        "            storage.remove(self.target)\n            storage.rename(self.finished",
        _renames_twice,
    ),
    Break(
        "Replacement has no journal", "disk", _JOURNAL,
        '            storage.write(JOURNAL, json.dumps({"attempt": attempt, "tag": tag}).encode())\n',
        may_show=lambda schedule: _renames_twice(schedule) and schedule.rank == 0,
    ),
    Break(
        "Interrupted replacement not finished", "disk", _JOURNAL,
        "        _settle(replacement, attempt)\n        _bring",
        "        _bring",
        lambda schedule: _renames_twice(schedule) and _ends(schedule),
    ),
    Break(
        "Save with a failed sync not undone", "disk", _JOURNAL,
        "            if not _restore(replacement, attempt, is_new):\n",
        "            if False:\n",
        lambda schedule: schedule.rank == 0 and schedule.fault in ("error", "sync"),
    ),
    Break(
        "Rank without a verdict does not sync the tag", "power after a kill", _BALLOT,
        '            storage.sync_dir("" if storage.renames else self._tag)  #', "            pass  #",
    ),
    Break(
        "Save undone that another rank counts as saved", "an undoing that fails", _JOURNAL,
        "        if not is_new or may_undo(storage, attempt):\n", "        if True:\n",
    ),
    Break("Rank 0 does not wait for votes", "disk", *_VOTES),
    Break(
        "Verdict before commit", "disk", _BALLOT,
        "            commit(session, session.topology, votes, request)\n",
        "            self._votes.announce(replace(Verdict(), tag=self._tag))\n"
        "            commit(session, session.topology, votes, request)\n",
    ),
    Break(
        "Undone save removed before its name is gone for good", "an undone save", _JOURNAL,
        '            storage.sync_dir("")\n    storage.remove(key)\n', "            pass\n    storage.remove(key)\n",
    ),
    Break(
        "Rank does not wait for the verdict", "disk", _BALLOT,
        "            verdict = "
        "self._votes.await_verdict(self._tag, self._files.patience, gone, self._answer)\n",
        "            verdict = Verdict()\n",
    ),
    Break(
        "Rank does not give up on rank 0", "disk", _VOTING,
        "if leaving() or watch.has_lost([0] if gone() else []) or watch.is_over(len(listed), signs):",
        "if leaving():",
    ),
    Break(
        "Rank 0 does not give up on a rank", "disk", _VOTING,
        "watch.is_over(len(by_rank), partial(self._progress, names, ranks))", "False",
    ),
    Break("Manifest not written", "disk", _COMMIT, ", {names.MANIFEST: dump_manifest(manifest)})", ")"),
    Break(
        "Manifest that no load reads is published", "disk", _MANIFEST,
        "    _require_readable(lambda: load_manifest(data, \"its manifest\"))\n",
        also=((_COMMIT, "        parts=request.parts,\n", "        parts=replace(request.parts, model=1),\n"),),
    ),
    Break(
        "Retention removes one tag more", "disk", _COMMIT,
        "        for tag in judgement.retention.surplus:", "        for tag in tags:",
    ),
    Break("Live job's lease taken", "disk", _LEASE, _RUNS, "    return False\n"),
    Break("Dead job's lease never taken", "disk", _LEASE, _RUNS, "    return True\n"),
    Break(
        "Load compares no digests", "disk", "nxd_ckpt/tag/range_reader.py",
        "                raise mismatch(where", "                mismatch(where",
        lambda schedule: getattr(schedule, "rots", False),
        (("nxd_ckpt/tag/verification.py", "len(data), crc32.crc32(data))", "len(data), expected.crc32)"),),
    ),
    Break(
        "Reader does not look again which tag it opened", "disk", *_IS_NOT_ASKED_AGAIN,
        lambda schedule: schedule.reads and _replaces(schedule),
    ),
    Break("Rank 0 does not wait for votes", "store", *_VOTES),
    Break(
        "Ranks write before rank 0 made room", "store", _BEGINNING,
        "            self._await_opening()  #", "            pass  #",
    ),
    Break(
        "Tag not emptied before it is saved again", "store", _PUBLICATION,
        "            self._empty(session)\n        for", "            pass\n        for",
    ),
    Break(
        "Visible before its manifest is written", "store", _COMMIT,
        _PUBLISHES,
        "    publication.publish(session, order_time, indexes)\n"
        "    publication.put(storage, {names.MANIFEST: dump_manifest(manifest)})\n",
    ),
    Break(
        "Save in place declares no intent", "store", _PUBLICATION,
        "        journal.declare(storage, staging_dir(self.attempt), self.tag)\n",
    ),
    Break(
        "Dead job's uploads not removed", "store", _S3,
        "        for name, upload_id in self._bucket.uploads(key, self._bucket.below(key)):",
        "        for name, upload_id in ():",
        lambda schedule: getattr(schedule, "part", None) == 400,
    ),
    Break(
        "Key taken without the condition that it is free", "store", _S3,
        'uuid.uuid4().hex, IfNoneMatch="*")', "uuid.uuid4().hex)",
    ),
    Break("Live job's lease taken", "store", _LEASE, _RUNS, "    return False\n"),
    Break(
        "`done` not removed first", "store", _PUBLICATION,
        '        storage.remove_if(f"{self.tag}/{DONE}", session.confirm)\n        remove_all',
        "        remove_all",
        _replaces,
    ),
    Break(
        "Lease not checked before `done`", "store", _PUBLICATION,
        "        session.require()\n        try:\n            content",
        "        try:\n            content",
        _stands_still,
    ),
    Break("Heartbeat writes the lease", "store", *_BEATS_OVER, _is_taken_over),
    Break(
        "Tag's content removed without a look at the lease", "store, taken over", _S3,
        "            if not confirm():\n                return False\n", may_show=_is_taken_over,
    ),
    Break(
        "Reader does not look again which tag it opened", "store", *_IS_NOT_ASKED_AGAIN,
        lambda schedule: schedule.reads,
    ),
    Break(
        "Order time ignores existing tags", "disk", _COMMIT,
        "order_time = _order_time(storage, tags, ", "order_time = _order_time(storage, (), ",
        lambda schedule: schedule.fault == "clock",
    ),
    Break(
        "Order time not set on `done`", "disk", _PUBLICATION,
        '        storage.set_time(f"{self.folder}/{DONE}", order_time)\n',
    ),
    *(
        Break("Votes not judged", place, _JUDGED, "        if vote.plan != first.plan:\n", "        if False:\n")
        for place in ("ranks differ", "store, ranks differ")
    ),
    *(
        Break(
            "Rank that left out a save takes the next one for it", place, _BEGINNING,
            "        if theirs is None or ", "        if isinstance(opened, str) or theirs is None or ",
        )
        for place in ("ranks differ", "store, ranks differ")
    ),
    Break(
        "Save passed over whose tag tells nothing", "ranks differ", _BEGINNING,
        "        if rank and not (is_over or ", "        if rank and not (theirs or ",
    ),
    Break(
        "Clean-up removes the staging of this attempt", "disk", _COMMIT,
        "        if (everyone_is_past and number <= counter) or votes.all_voted(world_size):\n", "        if True:\n",
    ),
    Break(
        "Retention before publication", "disk", _COMMIT,
        _PUBLISHES + "    if request.rules is not None:\n"
        "        unread = () if request.draining is None else request.draining.unread\n"
        "        # A file system is listed again: in a store that takes two requests for each tag.\n"
        "        retain(session, publication, request.rules, unread, None if storage.renames else tags)\n",
        "    if request.rules is not None:\n        retain(session, publication, request.rules)\n" + _PUBLISHES,
        _retains,
    ),
    Break(
        "Retention removes nothing", "disk", _COMMIT,
        "        for tag in judgement.retention.surplus:", "        for tag in ():", _retains,
    ),
    Break(
        "Retention does not look again at a surplus tag", "a takeover at a removal", "nxd_ckpt/commit/retention.py",
        "return info.tag in pins or not is_same", "return info.tag in pins",
    ),
    Break(
        "`overwrite=False` ignored", "disk", _PUBLICATION,
        "    return kind(session.attempt(counter), tag, overwrite)\n",
        "    return kind(session.attempt(counter), tag, None)\n",
        _must_not_replace,
    ),
    Break(
        "Journal dropped before the rename is synced", "every state", _JOURNAL,
        "        _make(replacement, attempt, tag)\n        _sync(storage)\n",
        "        _make(replacement, attempt, tag)\n        if is_open(storage):\n            _forget(storage)\n"
        "        _sync(storage)\n",
    ),
    Break(
        "Files of others not moved to the new tag", "every state", _JOURNAL,
        "            _bring_guests(replacement, attempt)\n            _forget", "            _forget",
        _has_guests, _SHARES_NONE,
    ),
    Break(
        "Files of others not moved by a recovery", "every state", _JOURNAL,
        "        _bring_guests(replacement, attempt)\n    except", "    except",
        _has_guests, _SHARES_NONE,
    ),
    Break(
        "Moves of files of others not synced", "every state", _GUESTS,
        "        storage.sync_dir(folder)\n\n\ndef _move", "        pass\n\n\ndef _move",
        _has_guests, ((_DISK, "    def share(self,", "    def _share(self,"),),
    ),
    Break(
        "Journal not synced before the renames", "every state", _JOURNAL,
        "partial(storage.sync_dir, HIDDEN), partial", "partial",
    ),
    Break(
        "Hidden directory not synced before the renames", "every state", _JOURNAL,
        'HIDDEN), partial(storage.sync_dir, ""))', "HIDDEN))",
    ),
    Break(
        "New job does not recover a dead one's replacement", "a launch after a swap", "nxd_ckpt/commit/session.py",
        "    journal.recover(storage)\n",
    ),
    Break(
        "Save does not recover an earlier one of its job", "an undoing that fails", _JOURNAL,
        "    recover(storage)  # an earlier swap of this job may not be finished yet\n",
    ),
    Break(
        "Reader does not recover a dead job's replacement", "disk", _CHOOSING,
        "            journal.recover(storage)\n",
        "            pass\n",
        lambda schedule: _renames_twice(schedule) and _ends(schedule),
    ),
    Break(
        "Reader recovers although the job lives", "a reader at a swap", _CHOOSING,
        " and not lease.job_lives(storage, patience=_SWAP_TAKES):", ":",
    ),
    Break(
        "Undoing of a save not synced", "an undone save", _JOURNAL,
        "        _sync(storage)\n        _forget(storage)\n    e", "        _forget(storage)\n    e",
    ),
    Break(
        "Failed save's files removed though it was visible", "an undone save", _BEGINNING,
        "self.writer is not None and storage.renames and not storage.is_file(done):",
        "self.writer is not None and storage.renames:",
    ),
    Break(
        "Trash emptied while there is a journal", "an undoing that fails", _JOURNAL,
        "        if is_open(storage):\n            return\n        names = [e", "        names = [e",
    ),
    Break(
        "Dead job's lease taken by `write`, not `exchange`", "lease", _LEASE,
        "        elif storage.exchange(LEASE, data, _encode(mine)):\n",
        "        else:\n            storage.write(LEASE, _encode(mine))\n",
    ),
    Break(
        "Exchange does not compare", "lease", _DISK,
        "            if self.read(key) != expected:\n                return False\n",
        "            expected = self.read(key)\n",
    ),
    Break(
        "Another job's lease released", "lease", _LEASE,
        "    if _repaired(storage, lease) == lease:\n        with suppress(OSError):\n"
        "            storage.remove(HEARTBEAT)  # before the lease: after that it may be the next holder's\n"
        "        storage.remove_if(LEASE, lambda: read(storage) == lease)\n",
        "    storage.remove(LEASE)\n",
    ),
    Break(
        "Holder gives no heartbeat", "lease", _LEASE,
        "        while not self._stop.wait(self._interval):\n", "        while False:\n",
    ),
    Break(
        "Put overwrites", "store", _PUBLICATION,
        "        if not storage.link_new(key, data) and storage.read(key) != data:\n",
        "        storage.write(key, data)\n        if False:\n",
    ),
    Break(
        "`done` does not name its attempt", "store", "nxd_ckpt/tag/identity.py",
        'f"{order_text(order_time)} {attempt}".encode()', "order_text(order_time).encode()",
    ),
    Break(
        "Lost reply to `done` not looked up", "lost replies", _PUBLICATION,
        "            content = self._content_after(storage, mark, error)  #", "            raise  #",
    ),
    Break(
        "Lease not checked after `done`", "store, taken over", _PUBLICATION,
        "        self._withdraw_if_swept(session, mark)\n",
    ),
    Break("Real `fdatasync` removed", "local", _SYSTEM, "        os.fdatasync(fd)\n", "        pass\n"),
    Break(
        "Real `fsync` of directories removed", "local", _LOCAL,
        "            sync_path(folder)\n", "            pass\n",
    ),
    Break(
        "New directory not synced into its parent", "local", _LOCAL,
        "        for folder in missing:\n            self._sync(os.path.dirname(folder))\n",
    ),
    Break(
        "Path to the directory of tags not synced", "local", _LOCAL,
        "            self._sync_way()\n", "            pass\n",
    ),
    Break("`O_EXCL` dropped", "lease, local", _FILES, '"O_CREAT", "O_EXCL", "O_CLOEXEC"', '"O_CREAT", "O_CLOEXEC"'),
    Break("`O_CREAT` dropped", "local", _FILES, '"O_CREAT", "O_EXCL", "O_CLOEXEC"', '"O_EXCL", "O_CLOEXEC"'),
    Break(
        "Rename in place of an exchange", "local", _SYSTEM,
        "_WORKING_DIRECTORY, _EXCHANGE = -100, 2", "_WORKING_DIRECTORY, _EXCHANGE = -100, 0", _replaces,
    ),
    Break(
        "Exchange claimed where it does not work", "local", _SYSTEM,
        "    if error in _CANNOT_EXCHANGE:\n        return False\n", "    return True\n", _renames_twice,
    ),
    Break(
        "New file renamed into place, not linked", "lease, local", _LOCAL,
        "        os.link(old, new)", "        os.replace(old, new)",
    ),
    Break(
        "Small files written in place", "local", _LOCAL,
        "        temporary = self._write_aside(key, data)\n        try:\n            _replace",
        "        _unlink(self._own(key))\n        writer = self.create(key, len(data))\n"
        "        with completed(writer):\n            writer.write_at(0, data)\n        return\n"
        "        try:\n            _replace",
    ),
    Break(
        "Short write counts as done", "local", _FILES,
        "        view = view[count:]\n        offset += count\n", "        view = view[len(view) :]\n",
    ),
    Break(
        "Short read counts as done", "local", _FILES,
        "            left -= count\n            offset += count\n", "            left = 0\n",
    ),
    Break(
        "File moved aside before it is compared", "lease, local", _LOCAL,
        "            if _read(path, DOCUMENT) != expected:\n                return False\n",
    ),
    Break(
        "Lease taken by two: not compared once it is moved aside", "lease, local", _LOCAL,
        "            if _read(aside, DOCUMENT) != expected:\n", "            if False:\n",
    ),
    Break(
        "File that is written past the page cache not synced", "local", _FILES,
        "                if self._durable:\n",
        "                if self._durable and self._direct < 0:\n",
        lambda schedule: getattr(schedule, "direct", False),
    ),
    Break(
        "File's time not set", "local", _LOCAL,
        "        os.utime(self._own(key), (seconds", "        dict(given=self._own(key), times=(seconds",
    ),
    Break(
        "Small file on the host of rank 0 only", "hosts", _HOSTS,
        "            self._mirror(key, data, others)\n", "            pass\n",
    ),
    Break(
        "Lease on another host not looked for again", "hosts", _HOSTS,
        "        if at_home and is_elsewhere():  #", "        if False:  #",
    ),
    Break(
        "File complete before its replicas", "hosts", _HOSTS,
        "            for writer in self._others:\n                writer.close()\n",
    ),
    Break(
        "All hosts count as having the newest save", "hosts", _HOSTS,
        "in marks.items() if marker == newest)", "in marks.items() if marker)",
    ),
    Break(
        "Small file's name not synced on a host", "hosts", _OWN,
        "super().write(key, data)\n        self.sync_dir(_folder(key))\n", "super().write(key, data)\n",
    ),
    Break(
        "Removal ends at the first absent host", "hosts", _HOSTS,
        "problem = problem or error\n        self._members.pop", "raise\n        self._members.pop",
    ),
    Break(
        "Lease kept if another host is away", "hosts", _SESSION,
        "            with suppress(OSError):  # another host may be away: that must not keep the lease\n"
        '                self.storage.remove(f"{PROBES}/{self.probe}")\n',
        '            self.storage.remove(f"{PROBES}/{self.probe}")\n',
    ),
    Break(
        "Failed rename that happened leaves the tag visible", "a lost reply", _JOURNAL,
        " or bool((is_new or self._has_new_name)())",
    ),
    Break(
        "Failed exchange that happened is not reversed", "a lost reply", _JOURNAL,
        "if self.is_there(self.finished) and storage.swap(self.finished, self.target):", "if False:",
    ),
    Break(
        "Closed session listens to the news", "store", _NEWS,
        "            self._peers.listen(self._channel, None)\n",
        "            pass\n",
        lambda schedule: schedule.has_group,
    ),
]


def schedules_until_noticed(number: int, limit: int, seconds: float) -> Found:
    """Run the schedules that may show it, from seed 0 on, until one fails or the ``seconds`` of processor time are
    over, in this process and with its code."""
    gc.disable()
    logging.disable(logging.CRITICAL)
    one = BREAKS[number]
    if one.place == _EVERY_STATE:
        return _states_until_noticed(one.may_show)
    runs = 0
    for seed in range(limit):
        schedule = SCHEDULES[one.place](seed)
        if not one.may_show(schedule):
            continue
        if time.process_time() > seconds:
            break
        runs += 1
        try:
            run(schedule)
        except AssertionError:
            return Found(seed, runs)
        if runs % 100 == 0:
            gc.collect()
    return Found(None, runs)


def _states_until_noticed(may_show: Callable[[Any], bool]) -> Found:
    """As many as are looked at, of those that a loss of power may leave, up to the save that shows it."""
    states = 0
    for work in filter(may_show, SAVES):
        count = enumerated(work, most=_STATES)
        states += count.looked_at
        if count.failures:
            return Found(0, states)
    return Found(None, states)


def broken(number: int, limit: int, seconds: float) -> Found:
    """The same in another process, with a copy of the code that is broken."""
    with tempfile.TemporaryDirectory() as copy:
        for part in ("nxd_ckpt", "tests/simulation"):
            copytree(REPOSITORY / part, Path(copy, part), ignore=ignore_patterns("__pycache__"))
        Path(copy, "tests/support").mkdir()
        for part in ("tests/__init__.py", "tests/support/__init__.py", "tests/support/reliability.py"):
            Path(copy, part).write_bytes((REPOSITORY / part).read_bytes())
        for name, old, new in BREAKS[number].edits:
            path = Path(copy, name)
            text = path.read_text()
            assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
            path.write_text(text.replace(old, new))
        arguments = f"{number}, {limit}, float('{seconds}')"
        code = f"from tests.simulation.broken import *; print(*schedules_until_noticed({arguments}))"
        environment = {**os.environ, "PYTHONPATH": copy, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        seed, runs = done.stdout.split()
    found = Found(None if seed == "None" else int(seed), int(runs))
    print(f"{number}: {BREAKS[number].place}: {BREAKS[number].what} {found}", flush=True)
    return found


_HEADER = ["broken", "place", "schedules", "date"]
_WRITING = Lock()


def _write(number: int, found: Found, date: str) -> None:
    """One row of the table; the rows of others stay, in the order of the list."""
    one, place = BREAKS[number], "broken on purpose"
    with _WRITING:
        rows = {(row[0], row[1]): row for row in rows_of(place)}
        noticed = f"{found.schedules:,}" if found.seed is not None else f"not in {found.schedules:,}"
        rows[one.what, one.place] = [one.what, one.place, noticed, date]
        listed = ((other.what, other.place) for other in BREAKS)
        put(place, table([rows[key] for key in listed if key in rows], _HEADER))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.broken", description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", help="which of the list, from 0 on (default: all)")
    parser.add_argument("--limit", type=int, default=20_000, help="the seeds to try (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="processor time for each (default: no limit)")
    parser.add_argument("--processes", type=int, default=2, help="how many at once (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write what was found into tests/counts.md")
    given = parser.parse_args()
    (_, date), _ = date_and_commit()

    def find(number: int) -> Found:
        found = broken(number, given.limit, given.seconds)
        if given.write:
            _write(number, found, date)
        return found

    with ThreadPoolExecutor(given.processes) as threads:
        found = list(threads.map(find, given.rows or range(len(BREAKS))))
    raise SystemExit(1 if any(seed is None for seed, _ in found) else 0)


if __name__ == "__main__":
    main()
