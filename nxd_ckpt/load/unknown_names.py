"""Names in a tag that no rank of a mesh job has: each rank may lack some that others hold."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import KeyMismatch, OptimizerMismatch


def refuse_unknown_names(agreement: Agreement, unknown_names: Sequence[str], where: str) -> None:
    """Raise on all ranks if a global name is unknown to each. Digests are exchanged first, lists if needed. Collective.

    Raises:
        KeyMismatch: a name of the model.
        OptimizerMismatch: a parameter that the optimizer has state for.
    """
    digests = agreement.gather(sha256("\n".join(unknown_names).encode()).hexdigest() if unknown_names else None)
    reporters = decided_by_rank0(agreement, lambda: _first_ranks(digests or []))
    if not reporters:
        return
    lists = agreement.gather(unknown_names if agreement.rank in reporters else None)

    def decide() -> None:
        common = set.intersection(*(set(names) for names in lists or () if names is not None))
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


def _first_ranks(digests: Sequence[str | None]) -> list[int]:
    """Return one rank for each distinct list.

    None if a rank has no unknown names, because then none is unknown to all.
    """
    return [] if None in digests else [digests.index(digest) for digest in dict.fromkeys(digests)]
