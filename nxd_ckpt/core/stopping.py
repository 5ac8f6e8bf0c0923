"""At which step all ranks stop, when one of them is told to: one that none has passed, so that all still come to it.

Ranks are at different steps when the word comes, and a rank may hang in a collective of its training until others have
made theirs. So nobody's training is waited for. Each rank says how many calls of step it has passed, and passes no
further one before it knows where to stop: at the call after the last that any rank has passed. A rank that is held in
an earlier call goes on, so what others wait for in their training comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Member:
    """What one rank knows. Its calls of step are counted from 1."""

    passed: int = 0
    held: bool = False
    """Whether it has to know where to stop before it passes another call."""
    stop_at: int | None = None

    def may_go_on(self) -> bool:
        """Whether the next call can return now."""
        return not self.held or self.stop_at is not None

    def pass_on(self) -> bool:
        """Return from the next call, if it :meth:`may_go_on`; whether all ranks stop there."""
        self.passed += 1
        return self.stop_at is not None and self.passed >= self.stop_at

    def hold(self) -> int:
        """Pass no further call for now. How many were passed, which is what the others must know."""
        self.held = True
        return self.passed


@dataclass
class Tally:
    """What rank 0 knows of all ranks."""

    world_size: int
    asked: bool = False
    passed: dict[int, int] = field(default_factory=dict)
    """By rank, of those that pass no further call."""

    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.passed]

    def stop_at(self) -> int | None:
        """The call at which all stop; None while nobody was asked, or not all have answered."""
        return max(self.passed.values()) + 1 if self.asked and not self.missing() else None
