"""Migration of checkpoints of other trainers, with optimizer and progress."""
