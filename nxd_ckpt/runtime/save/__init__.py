"""A save: what this rank writes, staged, written, voted on and made visible."""
