"""How programs lay out a checkpoint: NxD of every age, and other programs, one in each module."""
