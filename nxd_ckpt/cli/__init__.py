"""Command ``nxd-ckpt``: work with checkpoints on any machine with torch, without torch-xla."""
