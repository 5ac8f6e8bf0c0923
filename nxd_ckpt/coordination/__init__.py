"""Agreement between ranks, and exclusion between jobs: lease, journal, intents, stopping."""
