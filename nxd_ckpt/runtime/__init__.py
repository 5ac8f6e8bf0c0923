"""Threads and effects: stage -> write -> vote -> commit, and loading.

One save on one rank::

    caller's thread      plan (which files, laid out how) -> stage (copy into the arena)
    background thread    write + sync -> vote -> [rank 0: collect votes, publish, verdict, retention] -> read verdict

The order of effects follows from promise 1, *visible means complete*:
data sync < vote < manifest < rename < sync of the parent < verdict.
"""
