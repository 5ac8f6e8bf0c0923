"""Layouts of other programs, read as a tag is."""
