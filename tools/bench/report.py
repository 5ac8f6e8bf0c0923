"""Results as text and as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.bench.results import (
    COLD,
    LOST,
    MEASURES,
    NOT_INSTALLED,
    SAVE,
    SLOWDOWN,
    STALL,
    WARM,
    Results,
    Row,
    ratios,
    spread,
)
from tools.bench.targets import Judged

FLOOR_OF = {
    SAVE: "floor: O_DIRECT write",
    WARM: "floor: read, 1 thread",
    COLD: "floor: read, 1 thread",
}
STALL_FLOORS = ("floor: memcpy", "floor: grouped device-to-host")

Table = list[list[str]]


def result_table(results: Results, scenario: str) -> Table:
    """Every row of a scenario, below a heading: seconds, spread, rate, and how it compares."""
    table = [["measure", "contestant", "median", "min - max", "GiB/s", "x floor", "x nxd_ckpt", "memory", "note"]]
    nbytes = results.sizes.get(scenario, (0, 0))[0]
    rows = [row for row in results.rows if row.scenario == scenario]
    for measure in MEASURES:
        for row in rows:
            if row.measure == measure and row.values:
                table.append(_result(results, row, nbytes))
    for row in rows:
        if row.missing:
            table.append([row.measure, row.contestant, "-", "", "", "", "", "", row.missing])
    return table


def target_table(judged: Sequence[Judged]) -> Table:
    """Every target, its limit and what was measured."""
    table = [["scenario", "measure", "contestant", "against", "target", "measured", "min - max", "rounds", ""]]
    for each in judged:
        target, ratio = each.target, each.ratio
        measured = ["-", "", "0"]
        if ratio is not None:
            measured = [f"{ratio.median:.2f} x", f"{ratio.least:.2f} - {ratio.greatest:.2f}", str(ratio.rounds)]
        against = " or ".join(target.against)
        table.append(
            [target.scenario, target.measure, target.contestant, against, target.limit, *measured, each.verdict]
        )
    return table


def as_text(table: Table) -> str:
    """Columns aligned with spaces."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join(lines) + "\n"


def as_markdown(table: Table) -> str:
    """A table as GitHub shows it."""
    heading, *lines = ["| " + " | ".join(line) + " |" for line in table]
    return "\n".join([heading, "|" + "---|" * len(table[0]), *lines]) + "\n"


def sections(
    results: Results, judged: Sequence[Judged], markdown: bool = False, *, ratios_only: bool = False
) -> Iterator[str]:
    """The whole report, part by part; or the targets, with why contestants that failed have no ratio."""
    layout = as_markdown if markdown else as_text
    mark = "### " if markdown else "== "
    if results.about:
        yield _about(results) + "\n"
    yield f"{mark}Targets\n\n{layout(target_table(judged))}"
    if ratios_only:
        failed = (row for row in results.rows if row.missing and not row.missing.startswith(NOT_INSTALLED))
        yield from (f"{row.scenario}, {row.contestant}: {row.missing}" for row in failed)
        return
    for scenario, (nbytes, tensors) in results.sizes.items():
        size = f"{nbytes / 2**30:.2f} GiB in {tensors:,} tensors a process"
        yield f"{mark}{scenario}: {size}\n\n{layout(result_table(results, scenario))}"


def _about(results: Results) -> str:
    """The machine and the versions, in a sentence."""
    about = dict(results.about)
    versions = about.pop("versions", {})
    facts = {**about, **versions}
    return ", ".join(f"{name} {fact}" for name, fact in facts.items()) + "."


def _result(results: Results, row: Row, nbytes: int) -> list[str]:
    found = spread(row.values)
    if row.measure == SLOWDOWN:
        median, span, rate = f"{found.median:.2f} x", f"{found.least:.2f} - {found.greatest:.2f}", ""
    else:
        median, span = f"{found.median:.3f} s", f"{found.least:.3f} - {found.greatest:.3f}"
        rate = f"{nbytes / 2**30 / found.median:.2f}" if nbytes and row.measure != LOST else ""
    floor = next((each for name in _floors(row) if (each := results.find(row.scenario, row.measure, name))), None)
    ours = _ours(results, row)
    memory = "" if row.peak is None else f"{row.peak / 2**20:.0f} MiB"
    return [row.measure, row.contestant, median, span, rate, _times(row, floor), _times(row, ours), memory, row.note]


def _floors(row: Row) -> tuple[str, ...]:
    return STALL_FLOORS if row.measure == STALL else (FLOOR_OF.get(row.measure, ""),)


def _ours(results: Results, row: Row) -> Row | None:
    if row.measure in (WARM, COLD):
        return results.find(row.scenario, row.measure, 'nxd_ckpt, verify="reading"')
    return results.find(row.scenario, row.measure, "nxd_ckpt")


def _times(row: Row, other: Row | None) -> str:
    found = [] if other is None else ratios(row.values, other.values)
    return f"{spread(found).median:.2f}" if found else ""
