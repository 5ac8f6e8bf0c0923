"""Mutation testing: does a test fail when the code that keeps the promises is changed, or a line of it removed?

Of the tools that do this, mutmut 3.8 removes no statements (a sync, a check, a rename), skips properties, and mostly
changes texts; cosmic-ray 8.7 starts a process for each mutant, which imports torch for seconds. So this is our own:
the standard ``ast`` module (:mod:`.operators`), and a fork of pytest for each mutant (:mod:`.session`).
"""
