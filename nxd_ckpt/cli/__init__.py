"""The command ``nxd-ckpt``: looking at checkpoints, on any machine with torch and without torch-xla."""
