"""Judges that others wrote, on our plug-ins and on what they take the place of: ``python -m tests.chaos``."""
