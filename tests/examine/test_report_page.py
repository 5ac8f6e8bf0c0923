"""The page of the largest report is bounded."""

from typing import Any

from nxd_ckpt.examine.report_page import page_of

TAGS, TENSORS, RANKS = 600, 3000, 1024
NAME = "model.layers.{}.<" + "a" * 100


def test_a_page_of_the_most_that_is_shown_stays_below_2_mb() -> None:
    """600 tags with twenty metrics, 3,000 tensors with long names, a thousand ranks. What is left out is said."""
    norms = [1.0 + place % 7 for place in range(TAGS)]
    numbers = {"numbers": 9, "norm": 1.234e-5, "mean": -1.234e-5, "absmax": 1.234, "nans": 1, "infs": 1, "zeros": 0.123}
    row = {**numbers, "change": 0.1234, "frozen": False, "norms": norms}
    names = [f"model/{NAME.format(tensor // 10)}.w{tensor}" for tensor in range(TENSORS)]
    tensors = [{**row, "name": name} for name in names]
    phase = {"stage_seconds": 1.0, "nbytes": 2**30, "straggler": False, "place": {"fsdp": 511}}
    hosts = [f"h{rank // 8}" for rank in range(RANKS)]
    slow = [1.0 if rank % 3 else 9.0 for rank in range(RANKS)]
    phases = [{**phase, "rank": rank, "host": hosts[rank], "write_seconds": slow[rank]} for rank in range(RANKS)]
    document: dict[str, Any] = {
        "directory": "/run", "made": "2026-01-02T03:04:05Z", "head": [], "note": None,
        "tags": [_tag(step) for step in range(TAGS)],
        "problems": [{"where": f"step_{step}", "what": "damaged" * 40} for step in range(TAGS)],
        "findings": [], "notes": [],
        "ranks": phases,
        "health": {"tags": [f"step_{step}" for step in range(TAGS)], "tensors": tensors},
    }  # fmt: skip
    page = page_of(document)
    assert 1_000_000 < len(page.encode()) < 2_000_000
    for left_out in ("The 300 oldest tags", "1500 more tensors", "500 more problems", "8 more metrics"):
        assert left_out in page


def _tag(step: int) -> dict[str, Any]:
    seconds = {"stage_seconds": 1.0, "write_seconds": 2.0, "commit_alone_seconds": 0.1}
    flags = {"complete": True, "latest": False, "pinned": step % 2 == 0, "problems": ["damaged"], "not_finite": 1}
    metrics = {f"metric {number}": step * 1.234567 for number in range(20)}
    facts = {"tag": f"step_{step}", "step": step, "order_time": "2026-01-02T03:04:05Z", "nbytes": 2**30 + step * 2**20}
    return {**facts, **flags, "metrics": metrics, "timings": seconds, "sizes": "fsdp=512 tp=2"}
