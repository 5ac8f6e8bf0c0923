"""The step at which all ranks stop after one is asked to: the first that no rank has passed yet.

Ranks are at different steps at that moment, and a rank may wait in a collective of its training until others join. So
the protocol does not wait for anybody's training. Each rank reports how many calls of step it has passed, and passes no
more until it knows where to stop: at the call after the last that any rank has passed. A rank that waits in an earlier
call then continues, so collectives in the training of others complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RankProgress:
    """The state of one rank. Its calls of step are counted from 1."""

    passed: int = 0
    held: bool = False
    """True if it must learn where to stop before it passes another call."""
    stop_at: int | None = None

    def may_go_on(self) -> bool:
        """Return whether the next call can return now."""
        return not self.held or self.stop_at is not None

    def pass_on(self) -> bool:
        """Count the next call as passed; return whether all ranks stop there. Only after `may_go_on`."""
        self.passed += 1
        return self.stop_at is not None and self.passed >= self.stop_at

    def hold(self) -> int:
        """Pass no more calls for now; return how many were passed, which the other ranks must know."""
        self.held = True
        return self.passed


@dataclass
class JobProgress:
    """Rank 0's view of all ranks."""

    world_size: int
    asked: bool = False
    passed: dict[int, int] = field(default_factory=dict)
    """Passed calls by rank, for the ranks that pass no more."""

    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.passed]

    def stop_at(self) -> int | None:
        """Return the call at which all ranks stop; None until all were asked and have answered."""
        return max(self.passed.values()) + 1 if self.asked and not self.missing() else None
