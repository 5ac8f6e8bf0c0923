"""How large what is not a tensor may be: budgets against damaged and hostile files, in one place. In bytes."""

from __future__ import annotations

NOTE = 2**20
"""Markers, the lease, the journal, intents, verdicts: a few fields, and in a verdict an error's message."""

DOCUMENT = 2**28
"""Manifests, indexes and votes. An index of 100,000 tensors, or a manifest of as many parameters, has a tenth of it."""

RANKS = 2**20
"""What files' names tell of ranks. A grid of more than a million is one damaged or hostile name."""

DCP_METADATA = 2**32
"""``.metadata`` of a torch DCP directory, which lists the chunks of all ranks."""
