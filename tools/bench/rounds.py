"""Everyone's turn, round after round, on every rank of a scenario."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tools.bench import host
from tools.bench.contestants.contract import Contestant
from tools.bench.host import Ballast
from tools.bench.results import ASYNC, COLD, LOST, RETURNED, SAVE, SLOWDOWN, STALL, WARM, Row
from tools.bench.scenarios import Scenario
from tools.bench.targets import TARGETS
from tools.bench.training import TrainingLoop, slowdown
from tools.bench.workloads import State
from tools.bench.world import World

LOADING = (WARM, COLD)


COLD_ROUNDS = 3
"""Of a cold load that a target is about: they take long, and are only reported."""

BALLAST = 1.25
"""In multiples of the state: what a copy of it, or the page cache of its files, needs at once."""


class WrongValues(Exception):
    """A load left other values in the live state than were saved."""


@dataclass
class Turn:
    """One contestant's measure, and what came of it so far. An async save yields two: its stall and its end."""

    measure: str
    contestant: Contestant
    how: str = ""
    values: dict[str, list[float]] = field(default_factory=dict)
    peak: int | None = None
    highest: int = 0
    missing: str = ""

    @property
    def name(self) -> str:
        return f"{self.contestant.name}, {self.how}" if self.how else self.contestant.name

    def rows(self, scenario: str) -> Iterator[Row]:
        notes = self.contestant.notes
        for measure in self.values or {self.measure: []}:
            values = tuple(self.values.get(measure, ()))
            yield Row(scenario, measure, self.name, values, self.peak, self.missing, notes.get(measure, ""))


class Rounds:
    """The rounds of one scenario."""

    def __init__(self, scenario: Scenario, contestants: list[Contestant], state: State, world: World) -> None:
        self._scenario, self._state, self._world = scenario, state, world
        self._ballast = Ballast(int(BALLAST * state.nbytes))
        self._always = {row for target in TARGETS if target.scenario == scenario.name for row in target.rows}
        self._turns = list(_turns(scenario, contestants))
        self._loop = TrainingLoop()
        self._retained: dict[str, int] = {}
        gc.freeze()  # what was imported need not be looked through before every turn

    def warm_up(self) -> None:
        """The round that does not count: the first save of each, watched for memory, and loads, checked for values."""
        expected = self._state.fingerprint()
        for turn in self._turns:
            if turn.measure not in (COLD, SLOWDOWN):  # their saves and loads are those of other measures
                self._guarded(turn, lambda turn=turn: self._watched(turn, expected))  # type: ignore[misc]
                turn.values.clear()
        gc.freeze()

    def play(self, number: int) -> None:
        """Round ``number``, from 0 on: measure after measure, and who begins changes."""
        for measure in self._scenario.measures:
            turns = [turn for turn in self._turns if turn.measure == measure and self._plays(turn, number)]
            for turn in _in_turn(turns, number):
                if measure in turn.contestant.fresh:
                    self._ballast.hold()
                self._guarded(turn, lambda turn=turn: self._take(turn))  # type: ignore[misc]

    def rows(self) -> list[Row]:
        return [row for turn in self._turns for row in turn.rows(self._scenario.name)]

    def _plays(self, turn: Turn, number: int) -> bool:
        measures = (ASYNC, STALL) if turn.measure == ASYNC else (turn.measure,)
        always = any((measure, turn.name) in self._always for measure in measures)
        enough = self._scenario.other_rounds
        if always:
            enough = COLD_ROUNDS if turn.measure == COLD else self._scenario.rounds
        return not turn.missing and number < enough

    def _guarded(self, turn: Turn, act: Callable[[], None]) -> None:
        """What fails on one rank is out on all; the others go on."""
        problem = ""
        try:
            act()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if any(self._world.gather(float(bool(problem)))):
            turn.missing = problem or "failed on another rank"
            turn.values.clear()

    def _take(self, turn: Turn) -> None:
        self._prepare(turn)
        self._ballast.free()
        for measure, value in self._measure(turn).items():
            turn.values.setdefault(measure, []).append(value)
        turn.highest = host.peak()
        if turn.measure not in LOADING:
            self._world.barrier()
            turn.contestant.tidy()

    def _prepare(self, turn: Turn) -> None:
        """Nothing of what was before is left to do: no dirty page, no garbage."""
        contestant = turn.contestant
        if turn.measure in LOADING and not contestant.saved:
            contestant.save(durable=True)
        gc.collect()
        os.sync()
        self._world.barrier()
        if turn.measure in LOADING:
            # A load is what a process does first: it finds no memory that something before it has freed.
            host.trim()
            (host.evict if turn.measure == COLD else host.cache)(contestant.directory)

    def _measure(self, turn: Turn) -> dict[str, float]:
        contestant, timed = turn.contestant, self._world.timed
        if turn.measure in (SAVE, RETURNED):
            return {turn.measure: timed(lambda: contestant.save(durable=turn.measure == SAVE))}
        if turn.measure in LOADING:
            return {turn.measure: timed(lambda: contestant.load(turn.how))}
        if turn.measure == ASYNC:
            stall: list[float] = []
            return {ASYNC: timed(lambda: self._async(contestant, stall)), STALL: max(self._world.gather(stall[0]))}
        self._world.barrier()
        slowed, lost = slowdown(self._loop, contestant.save_async)
        return {SLOWDOWN: max(self._world.gather(slowed)), LOST: max(self._world.gather(lost))}

    def _async(self, contestant: Contestant, stall: list[float]) -> None:
        started = time.perf_counter()
        pending = contestant.save_async()
        stall.append(time.perf_counter() - started)
        pending.wait()

    def _watched(self, turn: Turn, expected: int) -> None:
        loading, name = turn.measure in LOADING, turn.contestant.name
        checked = loading and turn.contestant.restores
        if checked:
            self._prepare(turn)
            self._state.forget()
        before = host.reset_peak()
        self._take(turn)
        beyond = turn.highest - before
        if checked and self._state.fingerprint() != expected:
            raise WrongValues("what was loaded is not what was saved")
        if not loading:  # what it keeps from one save to the next counts at each
            beyond += self._retained.get(name, 0)
            self._retained[name] = self._retained.get(name, 0) + host.resident() - before
        turn.peak = int(sum(self._world.gather(max(beyond, 0))))


def _in_turn(turns: list[Turn], number: int) -> list[Turn]:
    """Another one first in every round, and every other round backwards: nobody always comes after the same one."""
    first = number % max(len(turns), 1)
    order = turns[first:] + turns[:first]
    return order[::-1] if number % 2 else order


def _turns(scenario: Scenario, contestants: list[Contestant]) -> Iterator[Turn]:
    for measure in scenario.measures:
        for contestant in contestants:
            if measure in contestant.measures:
                for how in contestant.loads if measure in LOADING else ("",):
                    yield Turn(measure, contestant, how)
