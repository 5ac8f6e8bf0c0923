"""Checkpoints of other trainers, carried over with optimizer and progress."""
