"""A picture of the results, as an SVG that shows well on light and on dark pages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from tools.bench.results import SAVE, STALL, WARM, Results, spread

WIDTH = 840
LABELS = 250
BAR, STEP, GAP = 16, 24, 34
RIGHT = 120
"""Room for the number behind the longest bar."""

STYLE = """
  text { font: 13px -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 14px; }
  .quiet { fill: #59636e; }
  .ours { fill: #1a7f37; } .floor { fill: #9aa4ae; } .peer { fill: #4a7fbf; }
  text.ours { fill: #1a7f37; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .quiet { fill: #9198a1; }
    .ours { fill: #3fb950; } .floor { fill: #5b646e; } .peer { fill: #5c93d6; }
    text.ours { fill: #3fb950; }
  }
"""


class Panel(NamedTuple):
    """One measure of one scenario, and whose bars it has, under the names that a reader of the README knows."""

    title: str
    scenario: str
    measure: str
    bars: Sequence[tuple[str, str]]


PANELS = (
    Panel(
        "Async save: how long training stops",
        "W3 cpu 1p",
        STALL,
        (
            ("floor: memcpy", "floor: copy to a reused buffer"),
            ("nxd_ckpt", "nxd_ckpt"),
            ("torch DCP, cached staging", "torch DCP, staging kept"),
            ("torch DCP", "torch DCP async_save"),
        ),
    ),
    Panel(
        "Save, until it is on the disk",
        "W3 cpu 1p",
        SAVE,
        (
            ("floor: O_DIRECT write", "floor: direct write"),
            ("nxd_ckpt", "nxd_ckpt, with digests"),
            ("safetensors", "safetensors + fsync"),
            ("torch.save", "torch.save + fsync"),
            ("torch DCP", "torch DCP save"),
        ),
    ),
    Panel(
        "Load into the live model and optimizer, files cached",
        "W3 cpu 1p",
        WARM,
        (
            ("floor: read, 1 thread", "floor: read"),
            ('nxd_ckpt, verify="reading"', "nxd_ckpt, digests compared"),
            ("torch.save, mmap=True", "torch.load(mmap=True) + copy"),
            ("torch.save", "torch.load + copy"),
            ("torch DCP", "torch DCP load"),
        ),
    ),
)


class Bar(NamedTuple):
    """Seconds of one contestant."""

    label: str
    kind: str
    seconds: float


def svg(results: Results, panels: Sequence[Panel] = PANELS) -> str:
    """One panel below the other, each with a scale of its own; what was not measured has no bar."""
    body: list[str] = []
    y = 8
    for panel in panels:
        if bars := _bars(results, panel):
            size = results.sizes[panel.scenario][0]
            body += _panel(panel.title, f"{size / 2**30:.2g} GiB", bars, y)
            y += GAP + STEP * len(bars) + 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


def _bars(results: Results, panel: Panel) -> list[Bar]:
    found = []
    for contestant, label in panel.bars:
        row = results.find(panel.scenario, panel.measure, contestant)
        if row is not None:
            found.append(Bar(label, _kind(contestant), spread(row.values).median))
    return found


def _kind(contestant: str) -> str:
    if contestant.startswith("floor: "):
        return "floor"
    return "ours" if contestant.startswith("nxd_ckpt") else "peer"


def _panel(title: str, size: str, bars: Sequence[Bar], y: int) -> Iterator[str]:
    longest = max(bar.seconds for bar in bars)
    yield f'<text class="title" x="0" y="{y + 14}">{escape(title)}<tspan class="quiet" dx="8">{size}</tspan></text>'
    for number, bar in enumerate(bars):
        top = y + GAP - 6 + number * STEP
        width = max(round((WIDTH - LABELS - RIGHT) * bar.seconds / longest), 2)
        value = _shown(bar.seconds, longest)
        text, number_text = ("ours", "ours") if bar.kind == "ours" else ("label", "quiet")
        yield f'<text class="{text}" x="{LABELS - 10}" y="{top + 13}" text-anchor="end">{escape(bar.label)}</text>'
        yield f'<rect class="{bar.kind}" x="{LABELS}" y="{top}" width="{width}" height="{BAR}" rx="3"/>'
        yield f'<text class="{number_text}" x="{LABELS + width + 8}" y="{top + 13}">{value}</text>'


def _shown(seconds: float, longest: float) -> str:
    return f"{seconds:.2f} s" if longest >= 1 else f"{1000 * seconds:.0f} ms"
