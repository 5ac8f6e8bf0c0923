"""Names in a tag that no rank of a mesh job has: each of its ranks may lack some, which others hold."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import KeyMismatch, OptimizerMismatch


def refuse_strangers(agreement: Agreement, strangers: Sequence[str], where: str) -> None:
    """Raise on all ranks, all at once, where a global name is a stranger to each. Digests go first, lists if needed.

    Raises:
        KeyMismatch: a name of the model.
        OptimizerMismatch: a parameter that the optimizer has state for.
    """
    words = agreement.gather(sha256("\n".join(strangers).encode()).hexdigest() if strangers else None)
    asked = decided_by_rank0(agreement, lambda: _one_of_each(words or []))
    if not asked:
        return
    lists = agreement.gather(strangers if agreement.rank in asked else None)

    def decide() -> None:
        common = set.intersection(*(set(one) for one in lists or () if one is not None))
        model = sorted(name for name in common if name.startswith("model/"))
        if model:
            raise KeyMismatch(
                "the names in the checkpoint and in the model differ; unexpected in the checkpoint: "
                f"{listed(model, ())}; load with strict=False to take the names that both have"
            )
        if common:
            raise OptimizerMismatch(
                f"optimizer: {where} has state for {listed(sorted(common), ())}, which no rank's optimizer holds; "
                "build param_groups as when it was saved (with the same frozen parameters)"
            )

    decided_by_rank0(agreement, decide)


def _one_of_each(words: Sequence[str | None]) -> list[int]:
    """One rank for each list of strangers; none where a rank has no strangers, so that no name is one to all."""
    return [] if None in words else [words.index(word) for word in dict.fromkeys(words)]
