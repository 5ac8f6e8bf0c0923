"""What was measured: seconds per round, and the arithmetic on them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

STALL = "stall"
SAVE = "save"
RETURNED = "save, returned"
ASYNC = "async save"
WARM = "load, warm"
COLD = "load, cold"
SLOWDOWN = "step while saving"
LOST = "training time lost"

MEASURES = {
    STALL: "an async save holds its caller (second and later ones)",
    ASYNC: "from the call of an async save until it is durable",
    SAVE: "until the save is durable: files and their directory synced",
    RETURNED: "until the save returned, with nothing synced",
    WARM: "load into the live state, files in the page cache",
    COLD: "load into the live state, files dropped from the page cache before",
    SLOWDOWN: "a training step while a save is in flight, in multiples of one without",
    LOST: "training time that one async save costs: stall and slowed steps",
}
"""What can be measured, in the order in which it is shown. All are seconds, except :data:`SLOWDOWN`."""


NOT_INSTALLED = "not installed"
"""How :attr:`Row.missing` begins where nothing is wrong but that a package is not there."""

EVERYONE = "all"
"""The contestant of a row that is about a whole scenario, which could not be run."""


@dataclass(frozen=True)
class Row:
    """One measure of one contestant in one scenario.

    Attributes:
        values: one per round, of all contestants from the same rounds on; the slowest rank's. Empty: not measured.
        peak: bytes of host memory beyond the live state at the first, cold run, of all ranks together; None: unknown.
        missing: why there is nothing: an import that failed, or what it cannot do.
        note: what a reader must know to compare it.
    """

    scenario: str
    measure: str
    contestant: str
    values: Sequence[float] = ()
    peak: int | None = None
    missing: str = ""
    note: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        return cls(**{**data, "values": tuple(data.get("values", ()))})

    @property
    def key(self) -> tuple[str, str, str]:
        return self.scenario, self.measure, self.contestant


@dataclass
class Results:
    """Everything of one run. ``sizes`` has for each scenario its state's bytes and tensors, per process."""

    rows: list[Row] = field(default_factory=list)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def find(self, scenario: str, measure: str, contestant: str) -> Row | None:
        """The row, if it was measured."""
        key = (scenario, measure, contestant)
        return next((row for row in self.rows if row.key == key and row.values), None)

    def as_json(self) -> dict[str, Any]:
        return {"about": self.about, "sizes": self.sizes, "rows": [asdict(row) for row in self.rows]}


@dataclass(frozen=True)
class Spread:
    """The median of some rounds, the least and the greatest."""

    median: float
    least: float
    greatest: float
    rounds: int


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError for no values at all."""
    if not values:
        raise ValueError("no rounds to take a median of")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Round by round, for as many rounds as both have: what slows a round down slows both."""
    return [a / b for a, b in zip(numerator, denominator, strict=False) if b > 0]


def best(rows: Iterable[Row]) -> list[float]:
    """Round by round the least value of several rows, for as many rounds as all have."""
    return [min(values) for values in zip(*(row.values for row in rows), strict=False)]


def from_json(runs: Iterable[Mapping[str, Any]]) -> Results:
    """The inverse of :meth:`Results.as_json`, of several runs put together."""
    results = Results()
    for data in runs:
        results.rows += [Row.from_json(row) for row in data["rows"]]
        results.sizes |= {name: (nbytes, tensors) for name, (nbytes, tensors) in data["sizes"].items()}
        results.about = dict(data["about"])
    return results
