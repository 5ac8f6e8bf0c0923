"""Checkpoint layouts of other programs, read like a tag."""
