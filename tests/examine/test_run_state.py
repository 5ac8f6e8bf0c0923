"""The head of a report: from where a run can be resumed, how old that is, and what the last failure cost."""

from typing import Any

import pytest

from nxd_ckpt.core.manifest import FileEntry, Manifest, Parts, RankPhases
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.examine.report_document import timings
from nxd_ckpt.examine.run_state import Restart, age_line, failure_line, last_restart, resume_line, unsound

MINUTE = 60.0


def _tags(*ages: float, steps: list[int] | None = None) -> list[dict[str, Any]]:
    """Complete tags of these ages in minutes: step_0, step_100 and so on, or of these steps."""
    numbers = steps or [100 * place for place in range(len(ages))]
    facts = {"complete": True, "problems": [], "order_time": "2026-01-02T03"}
    return [
        {**facts, "tag": f"step_{step}", "age_seconds": age * MINUTE}
        for step, age in zip(numbers, ages, strict=True)
    ]


def _save(**fields: Any) -> dict[str, Any]:
    return {"tag": None, "attempt": "run-4", "is_dead": False, "nbytes": None, "ranks_done": 0, **fields}


def test_the_latest_sound_tag_is_named() -> None:
    tags = _tags(30, 20, 10)
    assert ("good", "Resume from step_200") == resume_line(tags, {}, ["step_200"])[:2]
    line = resume_line(tags, unsound({"step_200": ["model/w"], "step_100": []}), ["step_200", "step_100"])
    assert ("warning", "Resume from step_100") == line[:2]
    assert "step_200 has values that are not finite in 1 tensor: load 'step_100' by name" == line.text
    tags[1]["problems"] = ["a file is lost"]
    assert "Resume from step_0" == resume_line(tags, {"step_200": "is bad"}, ["step_0"]).title
    assert ("bad", "Nothing to resume from", "1 complete tag, none is sound") == resume_line(tags[1:2], {}, [])
    assert ("bad", "Nothing to resume from", "it holds 'notes'") == resume_line([], {}, [], "it holds 'notes'")


def test_a_tag_that_was_not_looked_at_is_not_advised() -> None:
    tags = _tags(30, 20, 10)
    line = resume_line(tags, {}, ["step_100"])
    assert ("good", "Last complete tag: step_200", "the latest tag; its bytes and values were not looked at") == line
    tags[2]["metrics"] = {"loss": None, "accuracy": 0.5}
    line = resume_line(tags, {}, ["step_200"])
    assert ("warning", "Resume from step_200", "its metrics are not finite: loss") == line


def test_tags_of_one_second() -> None:
    """No interval is called 0 s, and a tag of the last seconds is not late."""
    fast = [{**tag, "age_seconds": age} for tag, age in zip(_tags(1, 1, 1), (2.3, 2.2, 2.1), strict=True)]
    line = age_line(fast)
    assert line is not None
    assert ("good", "usually more than one in a second") == (line.level, line.text)


@pytest.mark.parametrize(("age", "level"), [(1, "good"), (29, "good"), (31, "warning")])
def test_a_tag_is_old_if_three_were_due_since(age: float, level: str) -> None:
    """By the usual interval of ten minutes; without one, no age is judged; with a save in flight, none is late."""
    line = age_line(_tags(age + 30, age + 20, age + 10, age))
    assert line is not None
    assert level == line.level
    assert "usually every 10 min" in line.text
    old = age_line(_tags(age + 10, age))
    assert old is not None
    assert "good" == old.level
    running = age_line(_tags(99, 98, 97), [_save(tag="step_300")])
    assert running is not None
    assert ("good", "step_300 is being saved") == (running.level, running.text)
    assert age_line([]) is None


def test_time_beyond_the_usual_is_lost_at_a_restart() -> None:
    """Of 42 minutes that a hundred steps took, ten are usual. Steps that were done twice are lost too."""
    tags = _tags(100, 90, 80, 38, 28)
    runs = {tag["tag"]: "first" if place < 3 else "second" for place, tag in enumerate(tags)}
    assert Restart("step_200", "step_300", 42 * MINUTE, 32 * MINUTE) == last_restart(tags, runs)
    line = failure_line(last_restart(tags, runs), [], "step_400")
    assert ("warning", "32 min lost at the last restart") == line[:2]
    assert "42 min from step_200 to step_300, which usually takes 10 min" == line.text
    assert "good" == failure_line(None, [], "step_400").level

    back = _tags(100, 90, 80, 60, steps=[0, 100, 200, 150])
    one = {tag["tag"]: "one" for tag in back}
    assert Restart("step_200", "step_150", 20 * MINUTE, 20 * MINUTE) == last_restart(back, one)
    first = last_restart(tags[:2], {"step_0": "first", "step_100": "second"})
    assert Restart("step_0", "step_100", 10 * MINUTE, None) == first
    assert "not known" in failure_line(first, [], "step_100").text


def test_a_save_that_died_is_told_before_a_restart() -> None:
    """With the steps that are lost, where the names of the tags say them."""
    dead = _save(tag="step_500", is_dead=True)
    line = failure_line(Restart("a", "b", 1.0, 0.0), [dead], "step_400")
    assert ("warning", "The save of step_500 failed") == line[:2]
    assert "its process is gone; up to 100 steps after step_400 are lost" == line.text
    assert "all work since last is lost" in failure_line(None, [dead], "last").text
    assert "no tag is left" in failure_line(None, [dead], None).text


def test_a_commit_does_not_count_the_wait_for_the_slowest_rank() -> None:
    """Rank 0 wrote for 0.2 s, the slowest for 2.4 s: of the 2.4 s until it committed, 2.2 are a wait."""
    recorded = {"stage_seconds": 0.4, "write_seconds": 2.4, "commit_seconds": 2.4}
    phases = (RankPhases(0.4, 0.2, 1, "a"), RankPhases(0.4, 2.4, 1, "b"))
    lines = (FileEntry(1, 0), FileEntry(1, 0))
    manifest = Manifest("t", "run-1", 1.0, Topology(dp=2), Parts(), lines, timings=recorded, phases=phases)
    assert {**recorded, "commit_alone_seconds": 0.2} == timings(manifest)
    alone = Manifest("t", "run-1", 1.0, Topology(), Parts(), lines[:1], timings=recorded)
    assert {**recorded, "commit_alone_seconds": 2.4} == timings(alone)
    assert {} == timings(None)
