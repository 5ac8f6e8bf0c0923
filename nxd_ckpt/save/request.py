"""A call of save, as its attempt needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nxd_ckpt.commit.tier import Draining
from nxd_ckpt.core.retention import Rule
from nxd_ckpt.save.options import SaveOptions
from nxd_ckpt.save.plan import SavePlan


@dataclass(frozen=True)
class SaveRequest:
    """One call of save, on one rank.

    Attributes:
        plan: the files of this rank; None if it could not be made: then the options may be what is wrong.
        tier_rules: rules of retention of the first tier, for a save without its own.
        versions: of the libraries, for the manifest.
        draining: set if there are further tiers.
    """

    tag: str
    plan: SavePlan | None
    options: SaveOptions
    tier_rules: Sequence[Rule] | None
    versions: Mapping[str, str]
    draining: Draining | None

    @property
    def rules(self) -> Sequence[Rule] | None:
        """Rules for the complete tags to keep; None keeps all."""
        return self.options.rules or self.tier_rules
