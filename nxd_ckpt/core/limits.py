"""How large what is not a tensor may be: budgets against damaged and hostile files, in one place. Bytes."""

from __future__ import annotations

NOTE = 2**20
"""Markers, the lease, the journal, intents, verdicts: a few fields, and in a verdict an error's message."""

DOCUMENT = 2**28
"""Manifests, indexes and votes. An index of 100,000 tensors, or a manifest of as many parameters, has a tenth of it."""

DCP_METADATA = 2**32
"""``.metadata`` of a torch DCP directory, which lists the chunks of all ranks."""
