"""The state of a run in four lines, the head of a report; and saves in flight. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

from nxd_ckpt.core import units
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import step_of

_LATE = 3
"""A newest tag that is older than this many times the usual interval is late."""
_RECENT = 20
"""The usual interval is the median between this many tags."""

Tags = Sequence[Mapping[str, Any]]
"""Tags of a listing, oldest first."""


class StateLine(NamedTuple):
    """One line of the head: its ``level`` decides the colour, ``title`` and ``text`` say it in words."""

    level: Literal["good", "warning", "bad"]
    title: str
    text: str


class Restart(NamedTuple):
    """Two neighbouring tags of different runs, the seconds between them, and those beyond the usual ones, if known."""

    before: str
    after: str
    seconds: float
    lost: float | None


def resume_line(
    tags: Tags, unfit: Mapping[str, str], looked_at: Collection[str], note: str | None = None
) -> StateLine:
    """Say from which tag the run can be resumed; it is advised only if its values were ``looked_at``.

    ``unfit`` says why a complete tag is none to resume from; ``note`` is what a directory without tags holds instead.
    """
    complete = [tag for tag in tags if tag["complete"]]
    fit = [tag for tag in complete if not tag.get("problems") and tag["tag"] not in unfit]
    if not fit:
        why = f"{units.count(len(complete), 'complete tag')}, none is sound" if complete else "no complete tag"
        return StateLine("bad", "Nothing to resume from", note or why)
    best = fit[-1]["tag"]
    others = len(tags) - len(fit)
    is_known = best in looked_at
    title = f"{'Resume from' if is_known else 'Last complete tag:'} {best or 'the directory itself'}"
    unseen = "" if is_known else "; its bytes and values were not looked at"
    if best != complete[-1]["tag"]:
        why = unfit.get(complete[-1]["tag"], "is damaged")
        return StateLine("warning", title, f"{complete[-1]['tag']} {why}: load {best!r} by name{unseen}")
    bad = [name for name, value in (fit[-1].get("metrics") or {}).items() if value is None]
    if bad:
        return StateLine("warning", title, f"its metrics are not finite: {first_of(bad)}{unseen}")
    unsound_tags = f"; {units.count(others, 'other')} not sound" if others else ""
    text = "the only tag" if len(tags) == 1 else f"the latest tag{unsound_tags}"
    return StateLine("good", title, f"{text}{unseen}")


def age_line(tags: Tags, saves: Sequence[Mapping[str, Any]] = ()) -> StateLine | None:
    """Say how old the newest complete tag is, compared with the usual interval; None without a time."""
    dated = [tag for tag in tags if tag["complete"] and tag["age_seconds"] is not None]
    if not dated:
        return None
    seconds = dated[-1]["age_seconds"]
    title = f"Saved {units.duration(dated[-1]['age_seconds'])} ago"
    running = [name_of(save) for save in saves if not save["is_dead"]]
    if running:
        return StateLine("good", title, f"{running[-1]} is being saved")
    usual = _usual_interval(dated)
    if usual is None:
        return StateLine("good", title, units.time_of_day(dated[-1]["order_time"]) + " UTC")
    rhythm = f"usually every {units.duration(usual)}" if usual >= 1 else "usually more than one in a second"
    if seconds > _LATE * max(usual, 1.0):
        return StateLine("warning", title, f"{rhythm}: the run has ended, or it hangs")
    return StateLine("good", title, rhythm)


def failure_line(restart: Restart | None, saves: Sequence[Mapping[str, Any]], latest: str | None) -> StateLine:
    """Say how much the last failure cost: a save that died, otherwise the last restart."""
    dead = [save for save in saves if save["is_dead"]]
    if dead:
        steps = _steps_between(latest, dead[-1]["tag"])
        since = f"all work since {latest}" if steps is None else f"up to {units.count(steps, 'step')} after {latest}"
        lost = "no tag is left" if latest is None else f"{since} {'is' if steps in (None, 1) else 'are'} lost"
        return StateLine("warning", f"The save of {name_of(dead[-1])} failed", f"its process is gone; {lost}")
    if restart is None:
        return StateLine("good", "No restart seen", "all tags shown are of one run")
    passed = f"{units.duration(restart.seconds)} from {restart.before} to {restart.after}"
    if restart.lost is None:
        return StateLine("warning", "Restarted", f"{passed}; its usual time is not known")
    usual = units.duration(restart.seconds - restart.lost)
    title = f"{units.duration(restart.lost)} lost at the last restart"
    text = f"{passed}, which usually takes {usual}"
    return StateLine("warning" if restart.lost > restart.seconds / 2 else "good", title, text)


def last_restart(tags: Tags, runs: Mapping[str, str]) -> Restart | None:
    """Return the last restart between two tags, by the names of the ``runs`` that saved them, or by steps that go back.

    Lost are the seconds between them, without those that as many steps take within a run. So they count work that was
    done twice, or never saved, and the time when nothing ran.
    """
    dated = [tag for tag in tags if tag["tag"] in runs and tag["age_seconds"] is not None]
    gaps: list[tuple[Mapping[str, Any], Mapping[str, Any], float, int | None]] = [
        (before, after, before["age_seconds"] - after["age_seconds"], _steps_between(before["tag"], after["tag"]))
        for before, after in pairwise(dated)
    ]
    usual = [(seconds, steps) for before, after, seconds, steps in gaps if _same_run(before, after, steps, runs)]
    for before, after, seconds, steps in reversed(gaps):
        if not _same_run(before, after, steps, runs):
            expected = _expected(usual[-_RECENT:], steps)
            lost = None if expected is None else min(seconds, max(0.0, seconds - expected))
            return Restart(before["tag"], after["tag"], seconds, lost)
    return None


def _usual_interval(dated: Tags) -> float | None:
    """Return the median of the seconds between the newest tags; None for fewer than three."""
    ages = [tag["age_seconds"] for tag in dated[-_RECENT:]]
    return median(before - after for before, after in pairwise(ages)) if len(ages) > 2 else None


def save_text(save: Mapping[str, Any]) -> str:
    """Describe a save that is in flight, or whose process died."""
    if save["is_dead"]:
        return f"{name_of(save)}: {failed_text(save)}"
    written = "" if save["nbytes"] is None else f", {units.size(save['nbytes'])} written"
    return f"{name_of(save)}: is being saved: {units.count(save['ranks_done'], 'rank')} done{written}"


def failed_text(save: Mapping[str, Any]) -> str:
    """Describe a save whose process died."""
    left = f", {units.size(save['nbytes'])} are left, which the next job removes" if save["nbytes"] else ""
    return f"its save failed: the process is gone{left}"


def name_of(save: Mapping[str, Any]) -> str:
    """Return the tag of a save in flight, or its attempt while the tag is unknown."""
    return save["tag"] or f"attempt {save['attempt']}"


def unsound(tags: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return why each tag with values that are not finite is none to resume from."""
    counts = {tag: units.count(len(names), "tensor") for tag, names in tags.items() if names}
    return {tag: f"has values that are not finite in {count}" for tag, count in counts.items()}


def _steps_between(before: str | None, after: str | None) -> int | None:
    first, second = (None if tag is None else step_of(tag) for tag in (before, after))
    return None if first is None or second is None else second - first


def _same_run(before: Mapping[str, Any], after: Mapping[str, Any], steps: int | None, runs: Mapping[str, str]) -> bool:
    return runs[before["tag"]] == runs[after["tag"]] and (steps is None or steps > 0)


def _expected(usual: Sequence[tuple[float, int | None]], steps: int | None) -> float | None:
    """Return the seconds that training takes for so many steps, or between two tags."""
    if not usual:
        return None
    paces = [seconds / count for seconds, count in usual if count]
    return max(0.0, median(paces) * steps) if steps is not None and paces else median(seconds for seconds, _ in usual)
